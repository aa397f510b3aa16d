"""`compile`: answer an equal build from the cache, else run the phases. Neither torch nor TVM is imported before."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from fastcar_compile.artifact.cache import Cache, Kind, cache_of
from fastcar_compile.artifact.layout import MANIFEST
from fastcar_compile.artifact.writer import ArtifactWriter, NotKept
from fastcar_compile.codegen.tvm.isa import NATIVE, cross_compiler, instruction_sets
from fastcar_compile.config import ReplayConfig, SparseAttention
from fastcar_compile.config.jacobi import Jacobi
from fastcar_compile.config.targets import Target, load_target, require_buildable
from fastcar_compile.config.wavefront import Wavefront
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


class CompileOptions(TypedDict, total=False):
    """The options of `compile`; its docstring describes them."""

    tokens_per_frame: int | None
    max_seq_len: int | None
    batch_size: int
    rows: int | None
    wavefront: Wavefront | None
    jacobi: Jacobi | None
    quant: str | None
    replay: ReplayConfig | None
    prefill_chunk: int | None
    offload: str | None
    engine: str | None
    sparse_attention: SparseAttention | None
    kv: str | None
    numerics: str | None
    host_cpus: Sequence[str]
    output: str | Path
    strict: bool
    progress: Progress | None
    cache: Cache | str | Path | bool | None


@overload
def compile(
    model: Model | str | Path,
    target: str | Path | Target = "cpu",
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[CompileOptions],
) -> Artifact: ...


@overload
def compile(
    model: Model | str | Path,
    target: str | Path | Target = "cpu",
    *,
    dry_run: Literal[True],
    **options: Unpack[CompileOptions],
) -> DryRun: ...


def compile(
    model: Model | str | Path,
    target: str | Path | Target = "cpu",
    *,
    tokens_per_frame: int | None = None,
    max_seq_len: int | None = None,
    batch_size: int = 1,
    rows: int | None = None,
    wavefront: Wavefront | None = None,
    jacobi: Jacobi | None = None,
    quant: str | None = None,
    replay: ReplayConfig | None = ReplayConfig(),  # noqa: B008  (frozen)
    prefill_chunk: int | None = None,
    offload: str | None = None,
    engine: str | None = None,
    sparse_attention: SparseAttention | None = None,
    kv: str | None = None,
    numerics: str | None = None,
    host_cpus: Sequence[str] = (NATIVE,),
    output: str | Path = "build/fastcar",
    dry_run: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
    cache: Cache | str | Path | bool | None = True,
) -> Artifact | DryRun:
    """Compile an autoregressive video decoder ahead of time and return its artifact.

    Args:
        model: a Hugging Face decoder, a module that follows docs/reference/step_protocol.md, its export or the .pt2
            file of that, or the path of a Hugging Face folder (or a Checkpoint of it), whose weights are read one
            tensor at a time.
        target: name, path to a .toml file, or Target.
        tokens_per_frame: stride F in tokens between a token and its counterpart one frame earlier; default: the model
            config's `tokens_per_frame`, else 256 with a warning.
        max_seq_len: positions of a sequence in tokens; default: the model config's. Without sparse attention, also
            the rows of the KV cache.
        batch_size: videos of one session, at most 32.
        rows: rows of each video in a decode step, each with a position of its own, for `Jacobi` and `Batcher`; None:
            a row of each video, all at one position. On a board, offload is "all" with them.
        wavefront: the order in which `Session.generate` decodes: several image rows of a frame at once; None: raster
            order. `rows` is what it needs, by default.
        jacobi: how `Session.generate` decodes: several positions in a decode step, with the tokens of sequential
            decoding; None: one after the other. `rows` is its window, by default, and 8 for "auto".
        quant: "none" (float32), "bf16" (bfloat16 weights), "fp16" (float16 weights), "w8a8" or "w4a8"; default: w8a8
            where the target has an accelerator, else none.
        replay: when MLPs replay; None compiles a dense decoder. Without thresholds, the gate's default holds, with
            a warning: `calibrate` chooses thresholds.
        prefill_chunk: tokens per prefill call. Default: 64; where a frame has more tokens, an equal part of a frame of
            at most 256, so that frames as a prompt need no padding.
        offload: the accelerator's part: "mlp"; "linears" (the MLPs, the projections and the head); or
            "all": the whole decode step, one launch per token, with kv="int8" and numerics="exact". Default: "all"
            where it can, unless kv or numerics say otherwise or the hardware model predicts a shorter dense step for
            "linears"; where it cannot, "mlp", with a warning that gives the reasons.
        engine: what computes the accelerator's linears and MLPs: "hls" (default): its one kernel, in C++; or "rtl": a
            kernel of their own (docs/explanation/accelerator.md#the-rtl), which has no drafts.
        sparse_attention: attention sinks and a sliding window over a bounded KV cache; None: all positions are seen.
        kv: type of cached keys and values: "float32"; "float16": half the bytes, values rounded half to even and
            at most ±65504; "bfloat16": half the bytes too, for larger values, with an eighth of the precision; or
            "int8": a quarter, 32 values of a head sharing an exponent. Default: "float32", and "int8" where the
            accelerator computes whole steps or, by default, linears.
        numerics: "native", or "exact": the whole decode step is defined bit for bit, so that backends, threads and
            prefill give equal logits; for w8a8 and w4a8 with kv="int8" (docs/reference/numerics.md). Default: "native",
            and "exact" with offload="all".
        host_cpus: instruction sets to carry libraries for: "native" (the build machine's best), or names of
            `fastcar_compile.codegen.tvm.isa`, such as "avx512-vnni", "avx2", "neon". A session picks the best
            library that its CPU runs.
        output: folder of the artifact; written atomically. The artifact's `path` and the logger name the folder.
        dry_run: stop before code generation and report what would be built; no file is written. A folder then needs no
            more than its config.json.
        strict: refuse every part that would run in another way than the options ask for, such as a linear that the
            host keeps.
        progress: called with the name of each phase. The logger `fastcar_compile` has the name too, at INFO.
        cache: where weights, libraries and whole builds are kept, and taken from if nothing that decides their bytes
            has changed: True: `builds` in $FASTCAR_CACHE, else in ~/.cache/fastcar_compile, unless $FASTCAR_NO_CACHE is
            set; a folder; the URL of an HTTP store, from which packed weights are taken, into the default folder; a
            `Cache`; None: nowhere. A whole build is found again for a model folder.

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
    given = dict(locals())
    check_current_folder()
    say, board, store = reporter(progress), load_target(target), cache_of(cache)
    require_buildable(board)
    if not isinstance(host_cpus, list | tuple) or not all(isinstance(name, str) for name in host_cpus):
        raise CompileError(f"host_cpus is {shown(host_cpus)}", hint='give a list of names, such as ["native"]')
    key, place = None, path_of("output", output)
    _check_output(place)
    decoder = _checked_path(model) if isinstance(model, str | Path) else model
    if store is not None and isinstance(decoder, Path) and decoder.is_dir() and not dry_run:
        key = _key(store, decoder, board, given)
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
            return build(decoder, board, given, say, dry_run=dry_run, cache=store, key=key)
    finally:
        NOTED.reset(noted)


def _check_output(output: Path) -> None:
    """Raise ArtifactError for a path that libraries of a build cannot be given."""
    try:
        str(output.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError("the output's path is not UTF-8", where=ascii(str(output)), hint="rename it") from error


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


_NO_INPUTS = frozenset({"model", "target", "output", "progress", "cache", "dry_run", "replay", "sparse_attention"})
"""Arguments of `compile` that do not decide what is built, or are stated otherwise."""


def _key(store: Cache, folder: Path, board: Target, options: dict[str, Any]) -> str | None:
    """Return the key of a build: all that decides its bytes, and its warnings. None: there is no such folder."""
    try:
        model = store.digests_of(folder)
    except OSError:
        return None  # the phases say what is wrong with it
    machine = f"{platform.machine()}-linux-gnu"
    triples = {isa.triple for isa in instruction_sets(options["host_cpus"])} | {board.host_triple}
    replay, sparse = options["replay"], options["sparse_attention"]
    if not isinstance(replay, ReplayConfig | None) or not isinstance(sparse, SparseAttention | None):
        return None  # nor are these options
    stated = replay is not None and "threshold" in replay.model_fields_set  # a default threshold is warned of
    inputs = {
        "model": model,
        "target": board.model_dump(mode="json"),
        "options": {name: repr(value) for name, value in options.items() if name not in _NO_INPUTS},
        "replay": [replay and replay.to_json(), stated],
        "sparse attention": sparse and sparse.to_json(),
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
