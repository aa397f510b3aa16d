"""The page as a folder: a file server is enough for it, and it asks for nothing else."""

import hashlib
import json
from pathlib import Path

import fastcar_compile as fc
from fastcar_compile.artifact.layout import GPU_PROGRAM, MANIFEST, WEB_MODULES, weight_files
from fastcar_compile.errors import InputError
from fastcar_play.game import Stage
from fastcar_play.lockstep import weights_digest
from fastcar_play.player import copy_player
from fastcar_play.server import hello


def write_page(artifact: fc.Artifact, stage: Stage, folder: Path) -> dict[str, int]:
    """Write the page of a stage; return the bytes of its files by name.

    Args:
        artifact: the one that the stage plays, with a library for WebAssembly. Its program for a GPU, where it has one,
            is the page's too. folder: a new or an empty one.

    Raises:
        InputError: the artifact is for another target, or the folder has files.
        CompileError: the pictures cannot be made.
    """
    variants = artifact.manifest.host.variants
    wasm = next((v.programs for v in variants if v.instruction_set == "wasm-simd128"), None)
    if wasm is None or wasm.prefill is None:
        lacks, hint = "program that reads prompts", "compile it with a prefill_chunk above 1"
        if wasm is None:
            lacks = "library for WebAssembly"
            hint = "compile it for wasm32, or for webgpu with host_cpus native and wasm-simd128"
        raise InputError(f"the artifact has no {lacks}", where=str(artifact.path), hint=hint)
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError("the folder of the page has files", where=str(folder), hint="give a new folder")
    from fastcar_play.onnx_library import write_onnx_library

    folder.mkdir(parents=True, exist_ok=True)
    copy_player(folder)
    listed = artifact.manifest.files
    names = (wasm.library, *weight_files(listed), *(name for name in (GPU_PROGRAM,) if name in listed))
    contents = {name: bytes(artifact.files.data(name)) for name in names}
    for name, content in {MANIFEST: artifact.manifest.to_bytes(), **contents}.items():
        (folder / "artifact" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "artifact" / name).write_bytes(content)
    for name in WEB_MODULES:
        (folder / Path(name).name).write_bytes(artifact.files.data(name))
    image, pixels = stage.world.file.image, folder / "pixels.wasm"
    write_onnx_library(stage.world.pixels, {"tokens": (1, *image.grid)}, pixels)
    exact = artifact.manifest.options.numerics == "exact"  # others may differ from browser to browser
    facts = {
        "hello": hello(stage).model_dump(mode="json") | {"record_frames": None, "saves": exact},
        "world": stage.world.to_json(),
        "weights": weights_digest(artifact),
        "defaults": {"temperature": stage.beginning.temperature, "topK": stage.beginning.top_k},
        "pixels": hashlib.sha256(pixels.read_bytes()).hexdigest(),
    }
    (folder / "page.json").write_text(json.dumps(facts), encoding="utf-8")
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
