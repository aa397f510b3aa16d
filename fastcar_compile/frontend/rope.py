"""Rotary frequencies that depend on the length of the sequence, fixed for the length that is compiled."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_FIXED = "default"


@contextmanager
def fixed_frequencies(model: nn.Module, max_seq_len: int) -> Generator[None]:
    """Give every rotary embedding of the kinds "dynamic" and "longrope" its frequencies at this length.

    Transformers chooses them anew from the largest position of every call: dynamic ones grow with it, longrope changes
    from its short to its long factors at the original length. A decode step is one graph, and the keys of a cache all
    need one table. So the table is that of a sequence of `max_seq_len` tokens. The model gets its own back on exit.
    """
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules() if _depends(module)]
    try:
        for module, _, _ in kept:
            _fix(module, max_seq_len)
        yield
    finally:
        for module, attributes, buffers in kept:
            vars(module).update(attributes)
            module._buffers.update(buffers)


def _depends(module: nn.Module) -> bool:
    return any(_is_by_length(kind) for kind in _kinds(module).values())


def _is_by_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _kinds(module: Any) -> dict[str | None, str]:
    """Kind of RoPE by type of layer; None: the same for all layers."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return dict(kind)
    return {None: kind} if isinstance(kind, str) and hasattr(module, "inv_freq") else {}


def _fix(module: Any, max_seq_len: int) -> None:
    # A model with several types of layers has a table for each type, under a name of its own.
    kinds = _kinds(module)
    for layers, kind in kinds.items():
        if not _is_by_length(kind):
            continue
        name = "inv_freq" if layers is None else f"{layers}_inv_freq"
        old: Tensor = getattr(module, name)
        options = {} if layers is None else {"layer_type": layers}
        length: Any = torch.tensor(max_seq_len)  # as in a forward, so that frequencies have the same bits
        new, _scaling = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=length, **options)
        module.register_buffer(name, new.to(old.dtype), persistent=False)
        # Another kind would make the forward compute its frequencies anew from the positions.
        kinds[layers] = _FIXED
    module.rope_type = kinds if isinstance(module.rope_type, dict) else kinds[None]
