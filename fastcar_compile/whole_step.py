"""Whether an accelerator can run whole decode steps, where nobody says what it computes."""

from __future__ import annotations

import copy
import warnings

from fastcar_compile.codegen.hls.step_plan import require_step
from fastcar_compile.config import CompileConfig
from fastcar_compile.dry_run.report import Fallback
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import rewrite_pipeline


def rewritten(
    program: DecoderProgram, original: DecoderProgram | None, config: CompileConfig, wish: CompileConfig | None
) -> tuple[DecoderProgram, CompileConfig, list[Fallback]]:
    """Return the rewritten program, the options that it has, and a refusal of the wish, which is a warning too.

    Args:
        program: with known layers; it is rewritten, for the wish if there is one. original: a copy of it.
        config: options. wish: `fastcar_compile.targets.whole_step`.

    Raises:
        CompileError: the program cannot be rewritten with `config`.
    """
    refused = list[Fallback]()
    if wish is not None and original is not None:
        reasons = refusal(program, wish)
        if not reasons:
            return program, wish, refused
        instead, hint = "the accelerator computes its MLPs, the host the rest", "give offload='mlp' (--offload mlp)"
        refused.append(Fallback(kind="offload", what="decode step", instead=instead, reason=reasons, hint=hint))
        program = copy.deepcopy(original)
    run_pipeline(program, rewrite_pipeline(config, len(program.sites)))
    for fallback in refused:  # not before it is certain that there is something to fall back to
        text = f"offload is 'mlp', because the accelerator cannot run this decoder's whole steps: {fallback.reason}"
        warnings.warn(text, UserWarning, stacklevel=3)
    return program, config, refused


def refusal(program: DecoderProgram, config: CompileConfig) -> str:
    """Rewrite a program for whole steps; return why that cannot be, or nothing."""
    try:
        run_pipeline(program, rewrite_pipeline(config, len(program.sites)))
        require_step(program)
    except CompileError as error:
        return "; ".join(dict.fromkeys(single.what for single in error.problems or (error,)))
    return ""
