"""`compile`: capture, rewrite, lower to every backend, and write the artifact."""

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from torch import nn
from torch.export import ExportedProgram

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.emit import emit_artifact
from fastcar_compile.codegen.plan import BuildPlan, Fallback, assumed_frame, decide
from fastcar_compile.codegen.tvm.emit import host_variants
from fastcar_compile.codegen.tvm.isa import NATIVE
from fastcar_compile.config import CompileConfig, ReplayConfig, SparseAttention
from fastcar_compile.config.targets import Target, load_target, require_buildable, whole_step
from fastcar_compile.config.wavefront import Wavefront
from fastcar_compile.errors import CompileError, count_text
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.checkpoint import Checkpoint, open_folder
from fastcar_compile.frontend.huggingface import is_huggingface
from fastcar_compile.frontend.model_facts import ModelFacts, unwrapped
from fastcar_compile.frontend.structures import check_signature, explained
from fastcar_compile.ir.pass_manager import Pass, run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.linears import merged_weights
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.repeat_layers import RepeatLayers
from fastcar_compile.report.dry_run import DryRun, dry_run_of
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.support.machine import collector_paused, require_memory
from fastcar_compile.support.values import LOGGER, path_of, plain, reporter, shown

DEFAULT_TOKENS_PER_FRAME = 256
CODE_GENERATION_BYTES = 128 << 20
"""Lower bound of what a build takes beyond the imports: a build of two layers took 181 MB on 23 November 2026."""

Progress = Callable[[str], None]
Model = nn.Module | ExportedProgram | Checkpoint


class CompileOptions(TypedDict, total=False):
    """The options of `compile`; its docstring describes them."""

    tokens_per_frame: int | None
    max_seq_len: int | None
    batch_size: int
    rows: int | None
    wavefront: Wavefront | None
    quant: str | None
    replay: ReplayConfig | None
    prefill_chunk: int | None
    offload: str | None
    sparse_attention: SparseAttention | None
    kv: str | None
    numerics: str | None
    host_cpus: Sequence[str]
    output: str | Path
    strict: bool
    progress: Progress | None


@overload
def compile(
    model: Model | str | Path,
    target: str | Path | Target = "zcu102",
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[CompileOptions],
) -> Artifact: ...


@overload
def compile(
    model: Model | str | Path,
    target: str | Path | Target = "zcu102",
    *,
    dry_run: Literal[True],
    **options: Unpack[CompileOptions],
) -> DryRun: ...


def compile(
    model: Model | str | Path,
    target: str | Path | Target = "zcu102",
    *,
    tokens_per_frame: int | None = None,
    max_seq_len: int | None = None,
    batch_size: int = 1,
    rows: int | None = None,
    wavefront: Wavefront | None = None,
    quant: str | None = None,
    replay: ReplayConfig | None = ReplayConfig(),  # noqa: B008  (frozen)
    prefill_chunk: int | None = None,
    offload: str | None = None,
    sparse_attention: SparseAttention | None = None,
    kv: str | None = None,
    numerics: str | None = None,
    host_cpus: Sequence[str] = (NATIVE,),
    output: str | Path = "build/fastcar",
    dry_run: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> Artifact | DryRun:
    """Compile an autoregressive video decoder ahead of time and return its artifact.

    Args:
        model: a Hugging Face decoder, a module that follows docs/reference/step_protocol.md, its export, or the
            path of a Hugging Face folder (or a Checkpoint of it), whose weights are read one tensor at a time.
        target: name, path to a .toml file, or Target.
        tokens_per_frame: stride F in tokens between a token and its counterpart one frame earlier; default: the model
            config's `tokens_per_frame`, else 256 with a warning.
        max_seq_len: positions of a sequence in tokens; default: the model config's. Without sparse attention, also
            the rows of the KV cache.
        batch_size: videos of one session, at most 32.
        rows: rows of each video in a decode step, each with a position of its own, for `Wavefront` and `Batcher`; None:
            a row of each video, all at one position. On a board, offload is "all" with them.
        wavefront: the order in which `Session.generate` decodes: several image rows of a frame at once; None: raster
            order. `rows` is what it needs, by default.
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
    say = reporter(progress)
    board = load_target(target)
    require_buildable(board)
    if not isinstance(host_cpus, list | tuple) or not all(isinstance(name, str) for name in host_cpus):
        raise CompileError(f"host_cpus is {shown(host_cpus)}", hint='give a list of names, such as ["native"]')
    variants = host_variants(host_cpus)
    if isinstance(model, str | Path):
        say("checking the model folder")
        model = open_folder(path_of("the model", model), weights=not dry_run)
    if isinstance(model, nn.Module):
        model = unwrapped(model)
    if rows is None and isinstance(wavefront, Wavefront) and wavefront.rows > 1:
        rows = wavefront.rows
    sizes, assumed = _sizes(model, plain(tokens_per_frame), plain(max_seq_len))
    options: dict[str, Any] = {
        **sizes,
        "batch_size": batch_size,
        "rows": rows,
        "wavefront": wavefront,
        "replay": replay,
        "prefill_chunk": prefill_chunk,
    }
    options["quant"] = ("w8a8" if board.kind == "fpga" else "none") if quant is None else quant
    options["sparse_attention"] = sparse_attention
    options |= {name: value for name, value in {"kv": kv, "numerics": numerics}.items() if value is not None}
    if rows is not None and board.kind == "fpga" and offload is None:
        offload = "all"  # the host's part of other steps has one position for all rows
    _check_target(board, offload, rows)
    config = CompileConfig(target=board.name, **options, offload="mlp" if offload is None else offload)
    wish = None if offload is not None else whole_step(board, options)
    # The writer claims the folder first: a place that cannot be written is found before minutes of work.
    with collector_paused(), nullcontext() if dry_run else ArtifactWriter(path_of("output", output)) as writer:
        if writer is not None:
            require_memory(CODE_GENERATION_BYTES, "code generation")
        program, passes = _analysed(model, config, say)
        # The passes change the program in place; the artifact shows a copy as the graph before.
        original = None if writer is None and wish is None else copy.deepcopy(program)
        say("rewriting the graph and choosing the hardware design")
        plan = decide(program, config, board, original=original, wish=wish, before=passes)
        plan = replace(plan, fallbacks=(*assumed, *plan.fallbacks))
        if strict:
            plan.require_no_fallback()
        if writer is None or original is None:
            return dry_run_of(plan)
        plan.require_buildable()
        _warn_of_host(plan)
        _warn_of_defaults(plan.config.replay)
        emit_artifact(writer, plan, original, variants, say)
    LOGGER.info("the artifact is in %s", writer.path)
    return Artifact(writer.path, None if plan.program.lazy else original.graph_module, digests=writer.digests)


def _analysed(model: Model, config: CompileConfig, say: Progress) -> tuple[DecoderProgram, list[Pass]]:
    """Return the captured program with explicit state and known layers, and the passes that made it.

    Raises:
        CompileError: the model cannot be compiled; the error names a structure of the model where it is the reason.
    """
    try:
        return _captured(model, config, say)
    except CompileError as error:
        if (reason := _explained(model, error)) is error:
            raise
        raise reason from error


def _explained(model: Model, error: CompileError) -> CompileError:
    """Return the error with the structures of the model that are its reason; else the error itself."""
    if isinstance(model, ExportedProgram):
        return error
    return explained(model.model() if isinstance(model, Checkpoint) else model, error)


def _captured(model: Model, config: CompileConfig, say: Progress) -> tuple[DecoderProgram, list[Pass]]:
    """Return the captured program with explicit state and known layers, and the passes that made it."""
    say("capturing the decode step")
    sizes = {name: getattr(config, name) for name in ("batch_size", "max_seq_len", "tokens_per_frame")}
    program = capture(model, **sizes, prefill_chunk=config.chunk, rows=config.rows)
    _check_capture(program, config)
    passes: list[Pass] = [*analysis_pipeline(), *_repetition(model)]
    run_pipeline(program, passes)
    if merged := merged_weights(program):
        number = count_text(len(merged), "weight")
        text = f"LoRA adapters are merged into {number}, such as {merged[0]}; other adapters need a new build"
        warnings.warn(text, UserWarning, stacklevel=5)
    return program, passes


def _sizes(
    model: Model, tokens_per_frame: int | None, max_seq_len: int | None
) -> tuple[dict[str, int], list[Fallback]]:
    """Return the caller's sizes, or the sizes that the model states; and the assumed sizes.

    Raises:
        CompileError: the model is not a decoder, or neither caller nor model gives max_seq_len.
    """
    if not isinstance(model, nn.Module | ExportedProgram | Checkpoint):
        what = f"cannot compile a {type(model).__name__}"
        hint = "give an nn.Module, a torch.export.ExportedProgram or the path of a Hugging Face folder"
        raise CompileError(what, hint=hint)
    facts = ModelFacts.of(model)
    length = facts.max_seq_len if max_seq_len is None else max_seq_len
    if length is None:
        hint = "give max_seq_len, or set it on the model's config"
        if isinstance(model, nn.Module) and not is_huggingface(model):
            check_signature(model)
        raise _explained(model, CompileError("the model does not say its max_seq_len", hint=hint))
    frame = facts.tokens_per_frame if tokens_per_frame is None else tokens_per_frame
    assumed: list[Fallback] = []
    if frame is None:
        frame = DEFAULT_TOKENS_PER_FRAME
        assumed.append(assumed_frame(frame))
        text = f"the model's config gives no tokens_per_frame; {frame} is assumed. Give compile(tokens_per_frame=…)"
        warnings.warn(text, UserWarning, stacklevel=3)
    return {"tokens_per_frame": frame, "max_seq_len": length}, assumed


def _warn_of_host(plan: BuildPlan) -> None:
    """Warn where a board gets no kernels."""
    for fallback in plan.fallbacks:
        if fallback.kind == "accelerator":
            text = f"target {plan.board.name} gets no accelerator kernels: {fallback.reason}"
            warnings.warn(text, UserWarning, stacklevel=3)


def _warn_of_defaults(replay: ReplayConfig | None) -> None:
    """Warn of thresholds that nobody gave: the default threshold of a gate fits no decoder in particular."""
    if replay is None or "threshold" in replay.model_fields_set:
        return
    text = f"no thresholds were given: every layer replays at the default threshold of gate {replay.gate}, "
    text += f"{replay.threshold:g}, which was not chosen for this decoder. Calibrate the artifact (fc.calibrate, "
    text += "fastcar calibrate), or compile without replay (replay=None, --no-replay)"
    warnings.warn(text, UserWarning, stacklevel=3)


def _check_target(board: Target, offload: str | None, rows: int | None) -> None:
    if rows is not None and board.kind == "fpga" and offload != "all":
        what = f"rows with positions of their own need whole decode steps on the accelerator, not offload={offload!r}"
        raise CompileError(what, hint='give offload="all", or leave rows out: then all rows are at one position')
    if offload in ("linears", "all") and board.kind != "fpga":
        what = f"offload={offload!r} needs an accelerator, and target {board.name} has none"
        raise CompileError(what, hint="choose an FPGA target, or leave offload out")


def _repetition(model: object) -> list[Pass]:
    """Return the pass that repeats a checkpoint's last captured layer; empty where every layer was captured."""
    if not isinstance(model, Checkpoint):
        return []
    skeleton = model.skeleton
    if skeleton.layers_path is None or skeleton.captured_layers == skeleton.layers:
        return []
    return [RepeatLayers(skeleton.layers_path, skeleton.layers, skeleton.period)]


def _check_capture(program: DecoderProgram, config: CompileConfig) -> None:
    if program.config.batch_size != config.batch_size * (config.rows or 1):
        what = f"the exported program has batch {program.config.batch_size}, but batch_size is {config.batch_size}"
        raise CompileError(what, hint=f"give batch_size={program.config.batch_size}, or export again")
