"""Registration of the operators in `fastcar::`: the eager definition, and why a graph has the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx
from torch._library.custom_ops import CustomOpDef
from torch.library import custom_op

REASONS = {
    "cond": "The MLP is skipped when every row replays: one branch computes, the other copies the cached output."
}
"""Operator, without its overload -> what it is for. `cond` is PyTorch's own; the others register themselves."""


def operator(name: str, *, reason: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return the decorator that registers a function as the eager definition of `fastcar::name`.

    Args:
        reason: one sentence for the inspection page: what the operator is for.
    """
    REASONS[f"fastcar.{name}"] = reason
    # No operator mutates: writes are functional, and a backend decides what happens in place.
    return custom_op(f"fastcar::{name}", mutates_args=())


def operator_reasons(modules: Iterable[fx.GraphModule]) -> dict[str, str]:
    """Return the operators of graphs that have a reason -> that reason."""
    calls = (n for module in modules for n in module.graph.nodes if n.op == "call_function")
    names = {str(n.target).rpartition(".")[0] or getattr(n.target, "__name__", "") for n in calls}
    return {name: REASONS[name] for name in sorted(names & REASONS.keys())}
