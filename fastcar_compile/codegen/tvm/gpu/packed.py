"""Types as WGSL has them: no integer of 64 or 8 bits, and no float of 16 that every adapter has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.ir.query import with_branches

STORED = "stored"
"""Key of a node's meta: its type as the program has it, where `narrow` put another."""

PER_WORD = {torch.int8: 4, torch.uint8: 4, torch.float16: 2, torch.bfloat16: 2}
"""Type -> elements of one u32."""


def packed(value: Tensor) -> Tensor:
    """Return what a GPU has of a tensor: int32 of int64, u32 of small types, the last axis in whole words."""
    if value.dtype == torch.int64:
        return value.new_empty(value.shape, dtype=torch.int32, device="meta")
    count = PER_WORD.get(value.dtype)
    if count is None:
        return value
    shape = (*value.shape[:-1], -(-value.shape[-1] // count))
    return torch.empty(shape, dtype=torch.uint32, device="meta")


def narrow(module: fx.GraphModule) -> fx.GraphModule:
    """Give every node of a graph and of its branches the type that a GPU has, and return the graph."""
    for graph in with_branches(module):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if value is None or STORED in node.meta:
                continue
            node.meta[STORED] = value
            node.meta["val"] = _each(packed, value)
            if node.target is torch.ops.aten.arange.default and value.dtype == torch.int64:
                node.kwargs = {**node.kwargs, "dtype": torch.int32}
            node.args, node.kwargs = _each(_int32, node.args), _each(_int32, dict(node.kwargs))
    return module


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _each(function, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_each(function, part) for part in value)
    return function(value)


def _int32(value: Any) -> Any:
    return torch.int32 if value is torch.int64 else value
