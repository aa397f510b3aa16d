"""When a row may replay. A new gate is one class: a file here and its line in `registry.py`, or an entry point."""

from fastcar_compile.gates.base import Call, Comparison, Gate, GateValues, operator
from fastcar_compile.gates.draft import Draft
from fastcar_compile.gates.registry import GATES, decided_on_accelerator, gate_class, gate_named
from fastcar_compile.gates.weights import GateWeights, LayerWeights

__all__ = [
    "GATES",
    "Call",
    "Comparison",
    "Draft",
    "Gate",
    "GateValues",
    "GateWeights",
    "LayerWeights",
    "decided_on_accelerator",
    "gate_class",
    "gate_named",
    "operator",
]
