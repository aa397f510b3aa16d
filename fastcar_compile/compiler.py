"""`compile`: answer an equal build from the cache, else run the phases. Neither torch nor TVM is imported before."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from fastcar_compile.artifact.cache import Cache, Kind, cache_of
from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.artifact.writer import ArtifactWriter, NotKept
from fastcar_compile.codegen.tvm.isa import NATIVE, cross_compiler, instruction_sets
from fastcar_compile.config import ReplayConfig
from fastcar_compile.config.options import CompileOptions, asked
from fastcar_compile.config.targets import Target, load_target, require_buildable
from fastcar_compile.errors import ArtifactError, CompileError
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.support.machine import collector_paused, cpu_flags, linker_text
from fastcar_compile.support.packages import needs
from fastcar_compile.support.values import (
    LOGGER,
    NOTED,
    check_current_folder,
    model_hint,
    path_of,
    reporter,
    shown,
    warn,
)

if TYPE_CHECKING:
    from fastcar_compile.phases import Model
    from fastcar_compile.report.dry_run import DryRun

Progress = Callable[[str], None]


class CallOptions(CompileOptions, total=False):
    """The options of `compile` beside the list: they decide how it is built, and where."""

    output: str | Path
    host_cpus: Sequence[str]
    strict: bool
    progress: Progress | None
    cache: Cache | str | Path | bool | None


@overload
def compile(
    model: Model | str | Path,
    target: str | Path | Target = "cpu",
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Artifact: ...


@overload
def compile(
    model: Model | str | Path,
    target: str | Path | Target = "cpu",
    *,
    dry_run: Literal[True],
    **options: Unpack[CallOptions],
) -> DryRun: ...


def compile(
    model: Model | str | Path,
    target: str | Path | Target = "cpu",
    *,
    output: str | Path = "build/fastcar",
    host_cpus: Sequence[str] = (NATIVE,),
    dry_run: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    cache: Cache | str | Path | bool | None = True,
    **options: Unpack[CompileOptions],
) -> Artifact | DryRun:
    """Compile an autoregressive video decoder ahead of time and return its artifact.

    Args:
        model: a Hugging Face decoder, a module that follows docs/reference/step_protocol.md, its export or the .pt2
            file of that, or the path of a Hugging Face folder (or a Checkpoint of it), whose weights are read one
            tensor at a time.
        target: name, path to a .toml file, or Target.
        output: folder of the artifact; written atomically. The artifact's `path` and the logger name the folder.
        host_cpus: instruction sets to carry libraries for: "native" (the build machine's best), or names of
            `fastcar_compile.codegen.tvm.isa`, such as "avx512-vnni", "avx2", "neon". A session picks the best
            library that its CPU runs.
        dry_run: stop before code generation and report what would be built; no file is written. A folder then needs no
            more than its config.json.
        strict: refuse every part that would run in another way than the options ask for, such as a linear that the
            host keeps.
        progress: called with the name of each phase. The logger `fastcar_compile` has the name too, at INFO.
        cache: where weights, libraries and whole builds are kept, and taken from if nothing that decides their bytes
            has changed: True: `builds` in $FASTCAR_CACHE, else in ~/.cache/fastcar_compile, unless $FASTCAR_NO_CACHE is
            set; a folder; the URL of an HTTP store, from which packed weights are taken, into the default folder; a
            `Cache`; None: nowhere. A whole build is found again for a model folder.
        options: what is compiled: the fields of `CompileConfig`. None: target and model decide, and a dry run says why.

    Returns:
        The artifact, open; with `dry_run` a report instead.

    Raises:
        CompileError: the model or the options cannot be compiled; the error lists all problems. With `strict`, every
            fallback with its reason.
        TargetError: the target is unknown, is malformed, or serves estimates only.
        ArtifactError: `output` exists and is not an artifact, cannot be written, has no room, or belongs to another
            build.
        UserError: the memory does not suffice.
    """
    given = asked(options)
    check_current_folder()
    say, board, store = reporter(progress), load_target(target), cache_of(cache)
    require_buildable(board)
    if not isinstance(host_cpus, list | tuple) or not all(isinstance(name, str) for name in host_cpus):
        raise CompileError(f"host_cpus is {shown(host_cpus)}", hint='give a list of names, such as ["native"]')
    key, place = None, path_of("output", output)
    _check_output(place)
    decoder = _checked_path(model) if isinstance(model, str | Path) else model
    if not dry_run:
        _warn_of_thresholds(place)
    if store is not None and isinstance(decoder, Path) and decoder.is_dir() and not dry_run:
        key = _key(store, decoder, board, given, host_cpus, strict)
        found = None if key is None else _answer(store, key, place)
        if found is not None:
            return found
    with collector_paused(), needs("compile"):
        if isinstance(decoder, Path) and not decoder.is_dir():
            from fastcar_compile.frontend.pt2 import load_exported

            decoder = load_exported(decoder)
        from fastcar_compile.frontend.capture import plain_modes
        from fastcar_compile.phases import build

    noted = NOTED.set([])
    try:
        with plain_modes():
            how: dict[str, Any] = {"host_cpus": host_cpus, "output": place, "strict": strict, "dry_run": dry_run}
            return build(decoder, board, given, say, cache=store, key=key, **how)
    finally:
        NOTED.reset(noted)


def _check_output(output: Path) -> None:
    """Raise ArtifactError for a path that libraries of a build cannot be given."""
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError("the output's path is not UTF-8", where=ascii(str(output)), hint="rename it") from error


def _warn_of_thresholds(output: Path) -> None:
    """Warn of an artifact in the place of the new one that has calibrated thresholds: they are its only copy, maybe."""
    with suppress(OSError, ValueError, RecursionError):
        found: Any = json.loads((output / MANIFEST).read_bytes())
        if isinstance(found, dict) and cast("dict[str, Any]", found).get("thresholds"):
            warn(f"the artifact in {output} is replaced, and with it the thresholds that were calibrated for it", 3)


def _checked_path(given: str | Path) -> Path:
    """Return the path of a folder or a .pt2 file that may be a model.

    Raises:
        CompileError: there is none, or it is an artifact.
    """
    model = path_of("the model", given)
    if not model.exists():
        kind = "file" if model.suffix == ".pt2" else "folder"
        what = f"the model does not exist: there is no model {kind}"
        raise CompileError(what, where=str(model), hint=model_hint(model))
    if not model.is_dir() and model.suffix != ".pt2":
        what = "the model is neither a folder nor a .pt2 file"
        hint = "give a Hugging Face folder (config.json and *.safetensors), or torch.export.save(...) to a .pt2 file"
        raise CompileError(what, where=str(model), hint=hint)
    if (model / MANIFEST).is_file() and not (model / "config.json").is_file():
        hint = "give the model's folder to compile it again; `fastcar run` and fastcar_compile.load open an artifact"
        raise CompileError("the model is an artifact, which is compiled already", where=str(model), hint=hint)
    return model


def _key(
    store: Cache, folder: Path, board: Target, options: dict[str, Any], host_cpus: Sequence[str], strict: bool
) -> str | None:
    """Return the key of a build: all that decides its bytes, and its warnings. None: there is no such folder."""
    try:
        model = store.digests_of(folder)
    except OSError:
        return None  # the phases say what is wrong with it
    machine = f"{platform.machine()}-linux-gnu"
    triples = {isa.triple for isa in instruction_sets(host_cpus)} | {board.host_triple}
    replay = options["replay"]
    if not isinstance(replay, ReplayConfig | None):
        return None  # nor is this option
    stated = replay is not None and "threshold" in replay.model_fields_set  # a default threshold is warned of
    inputs = {
        "model": model,
        "target": board.model_dump(mode="json"),
        "options": {name: repr(value) for name, value in options.items()} | {"replay": replay and replay.to_json()},
        "call": [list(host_cpus), repr(strict), stated],
        "machine": [platform.machine(), sorted(cpu_flags())],
        "linkers": [linker_text(cross_compiler(triple, machine)) for triple in sorted(triples)],
    }
    return Kind.BUILD.key(inputs)


def _answer(store: Cache, key: str, output: Path) -> Artifact | None:
    """Write the artifact as an equal build wrote it; None: the cache has none."""
    noted = None
    with suppress(NotKept), ArtifactWriter(output, store) as writer:
        noted = writer.take(key)
    if noted is None:
        return None
    for text, log in noted:
        warn(text, 3, log=log)
    LOGGER.info("the artifact is in %s, as an equal build made it", writer.path)
    return Artifact(writer.path, digests=writer.digests)
