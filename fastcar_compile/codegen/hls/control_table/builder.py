"""The control table of a decoder, made of its sizes and the score of its gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastcar_compile.codegen.hls.control_table import table
from fastcar_compile.codegen.hls.control_table.table import FLOATS_PER_WORD, AttentionShape, DrsTable
from fastcar_compile.errors import UserError
from fastcar_compile.gates.registry import GateKind
from fastcar_compile.gates.scores import float32, score_factor

MAX_WORD = 0xFFFFFFFF

Heads = tuple[tuple[int, float], ...] | None
"""(query head, weight) pairs; None: the mean over all heads."""


@dataclass(frozen=True)
class GateScore:
    """The score of a table's gate.

    Args:
        kind: which score.
        width: elements of the MLP's input, for a gate that reads it; else 0.
        units: of the largest network of gate `learned`; else 0.
        heads: per layer the chosen heads of gate `tas`; None: the mean over all heads in every layer.
    """

    kind: GateKind = GateKind.TAS
    width: int = 0
    units: int = 0
    heads: tuple[Heads, ...] | None = None

    @classmethod
    def of(cls, kind: GateKind, hidden: int, units: int, heads: tuple[Heads, ...] | None = None) -> GateScore:
        """Return the score of a gate in front of MLPs with `hidden` inputs; what it does not read is 0."""
        return cls(kind, hidden if kind.reads_input else 0, units if kind is GateKind.LEARNED else 0, heads)

    @property
    def weighted(self) -> bool:
        """Whether query heads have a weight each: some layer chooses heads."""
        return any(chosen is not None for chosen in self.heads or ())

    @property
    def input_words(self) -> int:
        """128-bit words of one row of the MLP's input."""
        return -(-self.width // FLOATS_PER_WORD)

    def problems(self, shape: AttentionShape, layers: int) -> list[str]:
        """Return what is out of the format's range, as texts."""
        name, wrong = self.kind.name.lower(), list[str]()
        learned = self.kind is GateKind.LEARNED
        if not (1 <= self.units <= table.MAX_UNITS if learned else self.units == 0):
            most = table.MAX_UNITS
            wrong.append(f"a network of {self.units} units for gate {name} (1 to {most} for learned, else 0)")
        if not (1 <= self.width <= table.MAX_PRODUCTS if self.kind.reads_input else self.width == 0):
            most = table.MAX_PRODUCTS
            wrong.append(f"an input of {self.width} elements for gate {name} (1 to {most} if read, else 0)")
        if self.heads is not None and self.kind is not GateKind.TAS:
            wrong.append(f"chosen heads for gate {name}")
        if self.heads is not None and len(self.heads) != layers:
            wrong.append(f"heads of {len(self.heads)} layers for {layers} layers")
        chosen = [head for layer in self.heads or () for head, _ in layer or ()]
        return wrong + [f"head {head} of {shape.heads}" for head in chosen if not 0 <= head < shape.heads]

    def factor(self, layer: int, scale: float, shape: AttentionShape) -> float:
        """Return what the integer sum of a layer with a gate is multiplied with."""
        if self.kind is not GateKind.TAS:
            return 1.0
        return score_factor(scale, shape.heads if self._chosen(layer) is None else 1)

    def head_weights(self, layers: int, shape: AttentionShape) -> tuple[tuple[float, ...], ...] | None:
        """Return float32 per layer and query head; None where every layer takes the mean over all heads."""
        if not self.weighted:
            return None
        return tuple(self._weights_of(layer, shape.heads) for layer in range(layers))

    def _weights_of(self, layer: int, heads: int) -> tuple[float, ...]:
        chosen = self._chosen(layer)
        by_head = dict(chosen or ())
        # All heads weigh 1 in a layer without chosen heads: its factor divides by the number of heads instead.
        return tuple(1.0 if chosen is None else float32(by_head.get(head, 0.0)) for head in range(heads))

    def _chosen(self, layer: int) -> Heads:
        return None if self.heads is None else self.heads[layer]


def build_table(
    layers: int,
    rows: int,
    cores: int,
    tokens_per_frame: int,
    thresholds: Sequence[float],
    *,
    attention: AttentionShape | None = None,
    scales: Sequence[float | None] | None = None,
    max_chain: int | None = None,
    couple_cfg: bool = False,
    refresh_every: int | None = None,
    gate: GateScore | None = None,
) -> DrsTable:
    """Return the control table of a decoder.

    Args:
        thresholds: one per layer, rounded to float32; +inf where the layer never replays.
        attention: heads of q and k; None: one head of one element, for a decoder without gates.
        scales: per layer the attention's factor on its logits; None (also for all layers): the layer has no gate.
        max_chain: at least 1. couple_cfg: needs an even number of rows.
        refresh_every: every row computes in the frames that are a multiple of this; None: in none.
        gate: the score, TAS by default; thresholds are as the controller compares them.

    Raises:
        UserError: sizes that are out of the format's range, all of them.
    """
    shape, score = attention or AttentionShape(1, 1, 1), gate or GateScore()
    scales = [None] * layers if scales is None else scales
    period = tokens_per_frame * (refresh_every or 0)
    sizes = {"layers": layers, "rows": rows, "cores": cores, "tokens_per_frame": tokens_per_frame}
    wrong = _out_of_range(sizes | ({} if max_chain is None else {"max_chain": max_chain}))
    per_layer = {"thresholds": thresholds, "scales": scales}
    wrong += [f"{len(v)} {name} for {layers} layers" for name, v in per_layer.items() if len(v) != layers]
    # A refresh shorter than a frame would refresh some slots and never others.
    if refresh_every is not None and not tokens_per_frame <= period <= MAX_WORD:
        wrong.append(f"a refresh every {period} forwards ({tokens_per_frame} to {MAX_WORD})")
    if couple_cfg and rows % 2:
        wrong.append(f"coupled pairs of {rows} rows")
    wrong += shape.problems() + score.problems(shape, layers)
    _require(wrong)
    made = DrsTable(
        *(rows, cores, tokens_per_frame, shape, max_chain, couple_cfg),
        # The controller compares in float32, so a threshold is rounded once, here.
        thresholds=tuple(float32(threshold) for threshold in thresholds),
        # The factor 0 marks a layer without a gate: `decide` never reads operands of such a layer.
        factors=tuple(0.0 if s is None else score.factor(layer, s, shape) for layer, s in enumerate(scales)),
        gate=score.kind,
        units=score.units,
        input_words=score.input_words,
        refresh_period=period,
        head_weights=score.head_weights(layers, shape),
    )
    if made.words > table.MAX_TABLE_WORDS:
        _require([f"{made.words} words (at most {table.MAX_TABLE_WORDS})"])
    return made


def _require(wrong: list[str]) -> None:
    """Raise UserError with these reasons, if there are any."""
    if wrong:
        raise UserError(f"no DRS table can be built: {'; '.join(wrong)}", hint="change the model, batch or target")


_MOST = {
    "layers": table.MAX_LAYERS,
    "rows": table.MAX_ROWS,
    "cores": table.MAX_CORES,
    "tokens_per_frame": MAX_WORD,
    "max_chain": table.MAX_CHAIN,
}


def _out_of_range(sizes: dict[str, int]) -> list[str]:
    return [f"{name} = {n} (1 to {_MOST[name]})" for name, n in sizes.items() if not 1 <= n <= _MOST[name]]
