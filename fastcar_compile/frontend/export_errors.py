"""What torch.export says, as a sentence with the place in the user's model."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.provenance import importable_path

_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_LONGEST = 200
_PROTOCOL = "docs/reference/step_protocol.md"


def depends_on_data(error: BaseException) -> bool:
    """Return whether Python asked for a value that only a run of the step knows."""
    return isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in str(error)


@contextmanager
def silenced(*names: str) -> Generator[None]:
    """Let loggers say nothing: torch logs the stack of an error that it raises too."""
    logs = [logging.getLogger(name) for name in names]
    kept = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in zip(logs, kept, strict=True):
            log.disabled = disabled


def export_error(step: nn.Module, error: Exception) -> CompileError:
    """Return the error as one sentence; the caller raises it from the original."""
    place = _place(step, error.__traceback__)
    if depends_on_data(error):
        what = "Python control flow, a shape or an index depends on the value of a tensor"
        hint = (
            "compute it with tensor operators (torch.where, a mask, index_select), so that each step is the same graph"
        )
        return CompileError(what, where=place, hint=hint)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    what = f"the decode step cannot be traced: {type(error).__name__}: {lines[0][:_LONGEST]}"
    hint = (
        f"the forward must run on one token in each of batch_size rows, with static caches of as many; see {_PROTOCOL}"
    )
    return CompileError(what, where=place, hint=hint)


def _place(step: nn.Module, trace: TracebackType | None) -> str:
    """Module path and source line of the deepest frame in the model's own code."""
    frames = [(frame, line) for frame, line in traceback.walk_tb(trace) if _is_theirs(frame)]
    paths = {id(module): path for path, module in step.named_modules()}
    # The deepest frame with a module as `self` gives a path in the model, which says more than a line.
    for frame, line in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            inner = paths[id(owner)].removeprefix("model.") if hasattr(step, "static_cache") else paths[id(owner)]
            return f"{inner}, {importable_path(frame.f_code.co_filename)}:{line}"
    if frames:
        frame, line = frames[-1]
        return f"{importable_path(frame.f_code.co_filename)}:{line}"
    return type(step).__name__


def _is_theirs(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith((_TORCH, _OWN, "<"))
