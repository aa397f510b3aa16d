"""The phases of a build, in order: capture, rewrite, lower to every backend, and write the artifact."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.artifact.cache import Cache
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.emit import emit_artifact
from fastcar_compile.codegen.plan import decide
from fastcar_compile.codegen.tvm.emit import host_variants
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.config.resolve import resolve
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.checkpoint import Checkpoint, open_folder
from fastcar_compile.frontend.huggingface import is_huggingface
from fastcar_compile.frontend.model_facts import ModelFacts, unwrapped
from fastcar_compile.frontend.structures import check_signature, explained
from fastcar_compile.ir.pass_manager import Pass, run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.weight_checks import require_numbers, warn_of_losses
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.repeat_layers import RepeatLayers
from fastcar_compile.report.dry_run import DryRun, dry_run_of
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.support.machine import collector_paused, require_memory
from fastcar_compile.support.values import LOGGER, NOTED, warn

CODE_GENERATION_BYTES = 128 << 20
"""Lower bound of what a build takes beyond the imports: a build of two layers took 181 MB on 23 November 2026."""

Progress = Callable[[str], None]
Model = nn.Module | ExportedProgram | Checkpoint


def build(
    model: Model | Path,
    board: Target,
    given: Mapping[str, Any],
    say: Progress,
    *,
    host_cpus: Sequence[str],
    output: Path,
    strict: bool = False,
    dry_run: bool = False,
    cache: Cache | None = None,
    key: str | None = None,
) -> Artifact | DryRun:
    """Return the artifact of a decoder, or with `dry_run` what it would be.

    Args:
        model: as `compile` takes it, or the path of a folder. given: every option of the list; None: it is decided.
        say: reports a phase. host_cpus, output, strict: see `compile`. cache: of what other builds made.
        key: what the cache keeps this build under; None: it does not keep it as a whole.

    Raises:
        UserError: see `compile`.
    """
    quant = given["quant"]
    variants = host_variants(host_cpus, board, quant if isinstance(quant, str) else "")
    if isinstance(model, Path):
        say("checking the model folder")
        model = open_folder(model, weights=not dry_run)
    if isinstance(model, nn.Module):
        model = unwrapped(model)
    _check_replay(given["replay"])
    asked = resolve(given, board, vars(_facts(model, given["max_seq_len"])))
    if asked.assumes_frame:
        frame = asked.config.tokens_per_frame
        warn(f"the model's config gives no tokens_per_frame; {frame} is assumed. Give tokens_per_frame", 3)
    # The writer claims the folder first: a place that cannot be written is found before minutes of work.
    made = nullcontext() if dry_run else ArtifactWriter(output, cache)
    with collector_paused(), made as writer:
        if writer is not None:
            require_memory(CODE_GENERATION_BYTES, "code generation")
        program, passes = _analysed(model, asked.config, say)
        # The passes change the program in place; the artifact shows a copy as the graph before.
        original = None if writer is None and asked.whole is None else program.copied()
        say("rewriting the graph and choosing the hardware design")
        plan = decide(program, asked, board, original=original, before=passes)
        warn_of_losses(plan.config.quant, plan.program.losses)
        if strict:
            plan.require_no_fallback()
        if writer is None or original is None:
            return dry_run_of(plan)
        plan.require_buildable()
        for reason in (fallback.reason for fallback in plan.fallbacks if fallback.kind == "accelerator"):
            warn(f"target {plan.board.name} gets no accelerator kernels: {reason}", 3)
        if plan.accelerator is not None and plan.accelerator.found.slow:
            warn(f"the accelerator is slow: {plan.accelerator.found.slow}", 3)
        _warn_of_defaults(plan.config.replay)
        emit_artifact(writer, plan, original, variants, say)
    if key is not None:
        writer.keep(key, NOTED.get())
    LOGGER.info("the artifact is in %s", writer.path)
    return Artifact(writer.path, digests=writer.digests)


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
    if program.config.batch_size != config.batch_size * (config.rows or 1):
        what = f"the exported program has batch {program.config.batch_size}, but batch_size is {config.batch_size}"
        raise CompileError(what, hint=f"give batch_size={program.config.batch_size}, or export again")
    passes: list[Pass] = [*analysis_pipeline(), *_repetition(model)]
    run_pipeline(program, passes)
    require_numbers(program)
    return program, passes


def _facts(model: object, max_seq_len: int | None) -> ModelFacts:
    """Return what a model says of itself.

    Raises:
        CompileError: the model is not a decoder, or neither caller nor model gives max_seq_len.
    """
    if not isinstance(model, nn.Module | ExportedProgram | Checkpoint):
        what = f"cannot compile a {type(model).__name__}"
        hint = "give an nn.Module, a torch.export.ExportedProgram or the path of a Hugging Face folder"
        raise CompileError(what, hint=hint)
    facts = ModelFacts.of(model)
    if max_seq_len is None and facts.max_seq_len is None:
        if isinstance(model, nn.Module) and not is_huggingface(model):
            check_signature(model)
        hint = "give max_seq_len, or set it on the model's config"
        raise _explained(model, CompileError("the model does not say its max_seq_len", hint=hint))
    return facts


def _warn_of_defaults(replay: ReplayConfig | None) -> None:
    """Warn of thresholds that nobody gave: the default threshold of a gate fits no decoder in particular."""
    if replay is None or "threshold" in replay.model_fields_set:
        return
    text = f"no thresholds were given: every layer replays at the default threshold of gate {replay.gate}, "
    text += f"{replay.threshold:g}, which was not chosen for this decoder. Calibrate the artifact (fc.calibrate, "
    text += "fastcar calibrate), or compile without replay (replay=None, --no-replay)"
    warn(text, 4)


def _check_replay(replay: ReplayConfig | None) -> None:
    """Raise CompileError for limits of replays that there are not. Not for a configuration: manifests may have it."""
    limits = ("max_chain", "couple_cfg", "refresh_every", "draft")
    idle = " and ".join(name for name in limits if getattr(replay, name, None))
    if replay is None or not idle:
        return
    values = replay.threshold if isinstance(replay.threshold, tuple) else (replay.threshold,)
    if replay.gate == "never" or not any(value is not None for value in values):
        why = "gate never replays nothing" if replay.gate == "never" else "threshold None is never replay"
        raise CompileError(f"{idle} without effect: {why}", hint=f"leave {idle} out, or let some MLPs replay")


def _repetition(model: object) -> list[Pass]:
    """Return the pass that repeats a checkpoint's last captured layer; empty where every layer was captured."""
    if not isinstance(model, Checkpoint):
        return []
    skeleton = model.skeleton
    if skeleton.layers_path is None or skeleton.captured_layers == skeleton.layers:
        return []
    return [RepeatLayers(skeleton.layers_path, skeleton.layers, skeleton.period)]
