"""What an accelerator computes where nobody says: whole steps where it can and the model predicts no faster form."""

from __future__ import annotations

import copy
import warnings

from fastcar_compile.artifact.programs import decoder_section, layers_section
from fastcar_compile.codegen.hls.model import default_offload
from fastcar_compile.codegen.hls.model.workload import workload_of_sections
from fastcar_compile.codegen.hls.step_plan import require_step
from fastcar_compile.config import CompileConfig
from fastcar_compile.config.targets import Target
from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import rewrite_pipeline
from fastcar_compile.report.dry_run import Fallback


def rewritten(
    program: DecoderProgram,
    original: DecoderProgram | None,
    config: CompileConfig,
    wish: CompileConfig | None,
    board: Target,
) -> tuple[DecoderProgram, CompileConfig, list[Fallback]]:
    """Return the rewritten program, the options that it has, and a refusal of the wish, which is a warning too.

    Args:
        program: with known layers; it is rewritten, for the wish if there is one. original: a copy of it.
        config: options. wish: `targets.whole_step`. board: whose modelled times choose between whole steps and linears.

    Raises:
        CompileError: the program cannot be rewritten with `config`.
    """
    refused = list[Fallback]()
    if wish is not None and original is not None:
        reasons = refusal(program, wish)
        if not reasons:
            if _default_offload(program, wish, board) == "all":
                return program, wish, refused
            config = config.model_copy(update={"offload": "linears", "kv": wish.kv})
        else:
            instead, hint = "the accelerator computes its MLPs, the host the rest", "give offload='mlp' (--offload mlp)"
            refused.append(Fallback(kind="offload", what="decode step", instead=instead, reason=reasons, hint=hint))
        program = copy.deepcopy(original)
    run_pipeline(program, rewrite_pipeline(config, len(program.sites)))
    for fallback in refused:  # not before it is certain that there is something to fall back to
        text = f"offload is 'mlp', because the accelerator cannot run this decoder's whole steps: {fallback.reason}"
        warnings.warn(text, UserWarning, stacklevel=3)
    return program, config, refused


def _default_offload(program: DecoderProgram, wish: CompileConfig, board: Target) -> str:
    """Return the faster offload of a decoder rewritten for whole steps; "all" where its layers differ in size."""
    try:
        work = workload_of_sections(wish, decoder_section(program), layers_section(program).layers)
    except UserError:
        return "all"
    return default_offload(work, board)


def refusal(program: DecoderProgram, config: CompileConfig) -> str:
    """Rewrite a program for whole steps; return why that cannot be, or nothing."""
    try:
        run_pipeline(program, rewrite_pipeline(config, len(program.sites)))
        require_step(program)
    except CompileError as error:
        return "; ".join(dict.fromkeys(single.what for single in error.problems or (error,)))
    return ""
