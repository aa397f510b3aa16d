"""Gates by name. A new gate is a class here, its operator in `ops/gates.py` and that operator's two lowerings."""

from __future__ import annotations

from fastcar_compile.errors import CompileError
from fastcar_compile.gates.base import Comparison, Gate, GateValues
from fastcar_compile.gates.input_delta import BoundGate, InputDeltaGate
from fastcar_compile.gates.learned import LearnedGate
from fastcar_compile.gates.study import AlwaysGate, NeverGate, RandomGate
from fastcar_compile.gates.tas import TasGate
from fastcar_compile.gates.weights import GateWeights, LayerWeights

GATES: dict[str, type[Gate]] = {
    gate.name: gate for gate in (TasGate, InputDeltaGate, BoundGate, LearnedGate, AlwaysGate, NeverGate, RandomGate)
}


def gate_named(
    name: str, heads: tuple[tuple[int, float], ...] | None = None, weights: LayerWeights | None = None
) -> Gate:
    """The gate of that name with its options.

    Args:
        heads: (query head, weight) pairs, for a gate that averages over heads.
        weights: of this layer, for a gate that was trained.

    Raises:
        CompileError: unknown name, or heads or weights for a gate that has none.
    """
    if name not in GATES:
        raise CompileError(f"unknown gate {name!r}", hint=f"known gates: {', '.join(GATES)}")
    kind = GATES[name]
    if heads is not None and not kind.takes_heads:
        able = ", ".join(gate.name for gate in GATES.values() if gate.takes_heads)
        raise CompileError(
            f"gate {name!r} does not average over heads", hint=f"leave heads away, or use one of: {able}"
        )
    if weights is not None and not kind.takes_weights:
        raise CompileError(needless_weights(name), hint="leave the weights away, or use gate learned")
    return kind(heads=heads, weights=weights)


def needless_weights(name: str) -> str:
    """What is wrong with weights for this gate."""
    return f"gate {name!r} has no weights"


def decided_on_accelerator(
    gate: str | None, heads: tuple[tuple[int, float], ...] | None, refresh_every: int | None
) -> bool:
    """Whether the accelerator's TAS unit has this rule; every other gate is decided on the host."""
    return gate == TasGate.name and heads is None and not refresh_every


__all__ = [
    "GATES",
    "Comparison",
    "Gate",
    "GateValues",
    "GateWeights",
    "LayerWeights",
    "decided_on_accelerator",
    "gate_named",
]
