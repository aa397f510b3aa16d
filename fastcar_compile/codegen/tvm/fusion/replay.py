"""fuse-replay: what a layer decides and counts is one kernel, what it keeps for the next frame another."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fastcar_compile.codegen.tvm.fusion.rewrite import replace_all
from fastcar_compile.ir.schema import bound
from fastcar_compile.passes.patterns.algebra import arguments

aten, fastcar = torch.ops.aten, torch.ops.fastcar
NAME = "fuse-replay"
_RULES = ("stride", "max_chain", "couple_cfg", "refresh_every", "at_most")
_GATE_ARGUMENTS = ("chain", "score", "threshold", "step", *_RULES)


def fuse_replay(graph: fx.Graph) -> None:
    """Replace every gate together with its chain counter, and the two writes of a layer that caches the MLP's input."""
    for node in list(graph.nodes):
        if node.target is fastcar.gate.default and (counted := _counted(node)) is not None:
            # The count follows from the decision, so one kernel makes both and reads the counters once.
            gate = bound(node)
            args = tuple(gate[name] for name in _GATE_ARGUMENTS)
            replace_all((node, counted), fastcar.gate_and_count.default, args, NAME)
    for node in list(graph.nodes):
        if (kept := _kept_input(node)) is not None and (output := _written_output(kept)) is not None:
            cached = arguments(output, fastcar.slot_write)
            assert cached is not None
            args = (cached["cache"], kept["cache"], cached["value"], kept["x"], kept["replay"], kept["step"])
            replace_all((output, node), fastcar.keep_frame.default, args, NAME)


def _counted(gate: fx.Node) -> fx.Node | None:
    """Return the write of (slot_read(chain) + 1) * gate to the gate's chain counters; None where there is none."""
    chain, step = bound(gate)["chain"], bound(gate)["step"]
    for node in chain.users:
        write = arguments(node, fastcar.slot_write)
        if write is None or write["cache"] is not chain or write["step"] is not step:
            continue
        # `slot_write(chain, (slot_read(chain, step) + 1) * to(gate, int32), step)`, as insert-replay writes it.
        product = arguments(write["value"], aten.mul)
        more = arguments(product["self"], aten.add) if product else None
        read = arguments(more["self"], fastcar.slot_read) if more and more["other"] == 1 else None
        factor = arguments(product["other"], aten.to) if product else None
        alone = len(chain.users) == 3  # the gate, the read and the write: nobody else reads what the kernel changes
        if read and factor and factor["self"] is gate and read["cache"] is chain and read["step"] is step and alone:
            return node
    return None


def _kept_input(node: fx.Node) -> dict[str, Any] | None:
    """Return cache, x, replay and step where node writes where(replay, slot_read(cache), x) to the cache, else None."""
    write = arguments(node, fastcar.slot_write)
    choice = arguments(write["value"], aten.where) if write else None
    mask = arguments(choice["condition"], aten.unsqueeze) if choice else None
    read = arguments(choice["self"], fastcar.slot_read) if choice else None
    if write is None or choice is None or mask is None or read is None or mask["dim"] != 1:
        return None
    if read["cache"] is not write["cache"] or read["step"] is not write["step"]:
        return None
    return {**write, "x": choice["other"], "replay": mask["self"]}


def _written_output(kept: dict[str, Any]) -> fx.Node | None:
    """Return the write of the result of the conditional on the same decision: a cache float32 of the same shape."""
    for cond in kept["replay"].users:
        # The decision has other readers as well: the choice of the kept input, and the stacked decisions.
        if cond.target is not torch.ops.higher_order.cond:
            continue
        for result in cond.users:
            assert result.target is operator.getitem
            for user in result.users:
                write = arguments(user, fastcar.slot_write)
                if write and write["value"] is result and write["step"] is kept["step"]:
                    return user
    return None
