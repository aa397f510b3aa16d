"""The caller's model as it was written: wrappers off for the capture; modes and compiled calls put back afterwards."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

from torch import nn

from fastcar_compile.errors import CompileError

_COMPILED = "_orig_mod"
"""Where torch.compile keeps the module that it wraps."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of torch.compile, of data parallelism and of peft's adapters.

    Raises:
        CompileError: a peft model puts learned tokens or prefixes in front of the sequence.
    """
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: nn.Module) -> nn.Module | None:
    children = dict(model.named_children())
    if _COMPILED in children:
        return children[_COMPILED]
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return children["module"]
    base = getattr(model, "get_base_model", None)  # peft need not be installed to be recognised
    if base is None:
        return None
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        what = f"{type(model).__name__} is prompt learning: it puts learned tokens or prefixes in front of the sequence"
        raise CompileError(
            what, hint="give the base model and feed the learned tokens as a prompt, or train LoRA adapters"
        )
    return cast("nn.Module", base())


@contextmanager
def as_written(model: nn.Module) -> Generator[None]:
    """Put every module in evaluation mode, without compiled calls; on exit each gets back what it had."""
    # `model.eval()` sets every module, and a caller may have left parts in training.
    modes = [(m, m.training) for m in model.modules()]
    calls = [(m, m._compiled_call_impl) for m in model.modules()]
    wrapped = [
        (m, n, c) for m in model.modules() for n, c in m.named_children() if _COMPILED in dict(c.named_children())
    ]
    try:
        for owner, name, child in wrapped:
            setattr(owner, name, unwrapped(child))
        for module, _ in calls:
            module._compiled_call_impl = None
        model.eval()
        yield
    finally:
        for owner, name, child in wrapped:
            setattr(owner, name, child)
        for module, call in calls:
            module._compiled_call_impl = call
        for module, mode in modes:
            module.training = mode
