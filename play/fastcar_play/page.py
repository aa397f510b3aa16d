"""The page as a folder: a file server is enough for it, and it asks for nothing else."""

import hashlib
import json
from pathlib import Path

import fastcar_compile as fc
from fastcar_compile.artifact.layout import MANIFEST, WEB_MODULE, weight_files
from fastcar_compile.errors import InputError
from fastcar_play.game import Stage
from fastcar_play.lockstep import weights_digest
from fastcar_play.player import copy_player
from fastcar_play.server import hello


def write_page(artifact: fc.Artifact, stage: Stage, folder: Path) -> dict[str, int]:
    """Write the page of a stage; return the bytes of its files by name.

    Args:
        artifact: the one that the stage plays, compiled for wasm32. folder: a new or an empty one.

    Raises:
        InputError: the artifact is for another target, or the folder has files.
        CompileError: the pictures cannot be made.
    """
    wasm = [v.programs.library for v in artifact.manifest.host.variants if v.instruction_set == "wasm-simd128"]
    if not wasm:
        hint = 'compile it with target="wasm32" (--target wasm32)'
        raise InputError("the artifact has no library for WebAssembly", where=str(artifact.path), hint=hint)
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError("the folder of the page has files", where=str(folder), hint="give a new folder")
    from fastcar_play.onnx_library import write_onnx_library

    folder.mkdir(parents=True, exist_ok=True)
    copy_player(folder)
    contents = {name: bytes(artifact.files.data(name)) for name in (*wasm, *weight_files(artifact.manifest.files))}
    for name, content in {MANIFEST: artifact.manifest.to_bytes(), **contents}.items():
        (folder / "artifact" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "artifact" / name).write_bytes(content)
    (folder / "fastcar.mjs").write_bytes(artifact.files.data(WEB_MODULE))
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
