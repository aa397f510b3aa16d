"""What a gate costs: bytes that it keeps and reads, and time where the host decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastcar_compile.codegen.hls.model.shapes import DecoderShape
from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import InputError
from fastcar_compile.gates import GATES, decided_on_accelerator
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.weights import weight_bytes
from fastcar_compile.ir.types import LayerSite
from fastcar_compile.support.values import whole

CHANGE_FLOPS = 4
"""Per element of the MLP's input: a subtraction, two absolute values, a sum; the relative change and what a network
reads cost about the same."""

DEFAULT_UNITS = 16
"""Hidden units of gate `learned` where the estimate is of no artifact."""


@dataclass(frozen=True)
class GateModel:
    """The gate of every layer.

    Args:
        name: in `fastcar_compile.gates.GATES`. units: hidden units of a network; 0: it has none.
        on_host: whether the host decides; else the accelerator's controller does.
    """

    name: str = "tas"
    units: int = 0
    on_host: bool = False

    @classmethod
    def named(cls, name: str, units: int | None = None) -> GateModel:
        """Return the gate with its usual options.

        Raises:
            InputError: unknown, or units for a gate without a network.
        """
        if name not in GATES:
            raise InputError(f"unknown gate {name!r}", hint=f"known gates: {', '.join(GATES)}")
        if units is not None and not GATES[name].takes_weights:
            raise InputError(f"gate {name!r} has no hidden units", hint="leave them out, or choose gate learned")
        hidden = whole("the gate's units", DEFAULT_UNITS if units is None else units, 1)
        own = hidden if GATES[name].takes_weights else 0
        return cls(name, own, not decided_on_accelerator(name))

    @classmethod
    def of_sections(cls, replay: ReplayConfig | None, layers: Sequence[LayerSite]) -> GateModel:
        """Return the gate of an artifact, with the most units of any layer."""
        gated = [layer.replay for layer in layers if layer.replay is not None]
        if replay is None or not gated:
            return cls()
        units = max(part.gate_units or 0 for part in gated)
        return cls(replay.gate, units, not decided_on_accelerator(replay.gate))

    @property
    def kind(self) -> GateKind:
        """What the accelerator's controller is built for; TAS where the host decides."""
        return GateKind.TAS if self.on_host else GateKind[self.name.upper()]

    @property
    def caches_input(self) -> bool:
        """Whether the MLP's input is kept, so that the norm before the MLP is computed for rows that replay too."""
        return GATES[self.name].caches_input

    def cache_bytes(self, shape: DecoderShape, rows: int) -> int:
        """Return the bytes of all layers' gate caches: the MLP's input of every slot, as large as the MLP cache."""
        return shape.mlp_cache_bytes(rows) if self.caches_input else 0

    def weight_bytes(self, shape: DecoderShape) -> int:
        """Return the bytes of the networks of all layers."""
        return shape.layers * weight_bytes(self.units, shape.hidden) if self.units else 0

    def moved_bytes(self, shape: DecoderShape, rows: int) -> int:
        """Return the bytes of one layer's decision on the host: the network, per row an input read and one written."""
        row = 2 * 4 * shape.hidden if self.caches_input else 0
        return self.weight_bytes(shape) // shape.layers + rows * row

    def flops(self, shape: DecoderShape, rows: int) -> int:
        """Return the operations of one layer's decision on the host."""
        per_row = CHANGE_FLOPS * shape.hidden if self.caches_input else 0
        per_row += 2 * self.units * 2 * shape.hidden
        per_row += GATES[self.name].flops_per_query_element * shape.heads * shape.head_dim
        return rows * per_row

    def to_json(self, shape: DecoderShape, rows: int) -> dict[str, Any]:
        """Return plain values, for a result."""
        return {
            "name": self.name,
            "decided_on": "host" if self.on_host else "accelerator",
            "units": self.units,
            "cache_bytes": self.cache_bytes(shape, rows),
            "weight_bytes": self.weight_bytes(shape),
        }


TAS = GateModel()
"""The paper's gate on the accelerator's unit."""
