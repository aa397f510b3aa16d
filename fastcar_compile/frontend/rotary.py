"""Rotary frequencies that Transformers chooses by the length of a sequence: chosen once, for the compiled length."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@contextmanager
def fixed_rotary(model: nn.Module, length: int) -> Generator[None]:
    """Give every rotary embedding the frequencies that it has for sequences of `length` tokens.

    Transformers computes those of "dynamic" and "longrope" in the forward, from the largest position so far. That is
    control flow on data, and it would turn keys that are cached already by other angles than the queries. The model
    gets its own frequencies back on exit.
    """
    kept: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for module in model.modules():
            if changes := _changes(module, length):
                kept.append((module, {name: getattr(module, name) for name in changes}))
                _assign(module, changes)
        yield
    finally:
        for module, values in kept:
            _assign(module, values)


def _assign(module: nn.Module, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, value)


def _changes(module: nn.Module, length: int) -> dict[str, Any]:
    """Return what to set on a rotary embedding; nothing where its frequencies are the same for every length."""
    kinds: object = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return _frequencies(module, kinds, length) | {"rope_type": "default"} if _varies(kinds) else {}
    if not isinstance(kinds, dict):
        return {}
    by_layer, changes = cast("dict[str, str]", kinds), dict[str, Any]()
    for layer_type, kind in by_layer.items():
        if _varies(kind):
            changes |= _frequencies(module, kind, length, layer_type)
    return changes | {"rope_type": dict.fromkeys(by_layer, "default")} if changes else {}


def _varies(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _frequencies(module: nn.Module, kind: str, length: int, layer_type: str | None = None) -> dict[str, Any]:
    options = {} if layer_type is None else {"layer_type": layer_type}
    prefix = "" if layer_type is None else f"{layer_type}_"
    make = ROPE_INIT_FUNCTIONS[kind]
    frequencies, scaling = make(cast("Any", module.config), torch.device("cpu"), seq_len=length, **options)
    return {f"{prefix}inv_freq": frequencies, f"{prefix}attention_scaling": scaling}
