"""The replay rule of one layer over chunks of tokens, on values that no threshold of this layer changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.artifact.sections.decoder import DecoderConfig
from fastcar_compile.calibration.layers import Layer, Stages
from fastcar_compile.gates import Comparison, Gate, GateValues
from fastcar_compile.ir.rings import ring_of
from fastcar_compile.ops.replay import ReplayRule, decide
from fastcar_compile.ops.window import row_of


@dataclass(frozen=True)
class Rules:
    """Everything but the thresholds that decides a replay.

    Attributes:
        gates: one per layer.
    """

    gates: tuple[Gate, ...]
    max_chain: int | None = None
    couple_cfg: bool = False
    refresh_every: int | None = None


@dataclass(frozen=True)
class Span:
    """The tokens of a chunk that are decoded: the forwards t = steps, after a prompt."""

    steps: Tensor
    prompt: int


@dataclass(frozen=True)
class Fresh:
    """A layer's stage on one chunk up to its MLP's output. n tokens are decoded; the rest fills the chunk up.

    Attributes:
        span: the decoded tokens.
        query: float32 [n * B, Hq, 1, D]. keys: [n * B, Hkv, 1, D], one frame earlier.
        x: the MLP's input, float32 [n, B, H]. output: the MLP's output, of the whole chunk.
        values: of `Stages.joined`.
    """

    span: Span
    query: Tensor
    keys: Tensor
    x: Tensor
    output: Tensor
    values: dict[fx.Node, Any]

    @classmethod
    def of(cls, stages: Stages, stage: int, found: dict[fx.Node, Any], span: Span, frame: int) -> Fresh:
        """Return these values out of those of `Stages.body`. frame: tokens per frame."""
        layer, count = stages.layers[stage], len(span.steps)
        query, x, output = found[layer.query], found[layer.x], found[layer.output]
        rows = len(query)
        return cls(
            span=span,
            query=query[:, :, :count].permute(2, 0, 1, 3).flatten(0, 1)[:, :, None],
            keys=_earlier(layer, found[layer.key_cache], span, frame),
            x=x.reshape(rows, -1, x.shape[-1])[:, :count].transpose(0, 1).contiguous(),
            output=output,
            values={node: found[node] for node in stages.joined[stage]},
        )

    @property
    def nbytes(self) -> int:
        """Size in bytes; what the values share with others counts here too."""
        tensors = (self.query, self.keys, self.x, self.output, *self.values.values())
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def _earlier(layer: Layer, cache: Tensor, span: Span, frame: int) -> Tensor:
    """Return the keys [n * B, Hkv, 1, D] one frame before the tokens."""
    # In the first frame there is no earlier token. Position 0 stands in, and no decision reads the score.
    earlier, ring = (span.steps + span.prompt - frame).clamp(min=0), ring_of(layer.key_cache)
    rows = earlier if ring is None else row_of(earlier, ring.sinks, ring.rows)
    return cache[:, :, rows].permute(2, 0, 1, 3).flatten(0, 1)[:, :, None]


def _slots(slots: Tensor) -> Tensor | slice:
    """Return consecutive slots as a slice, which copies nothing, and others as they are."""
    # Slots that wrap around the frame are not consecutive.
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if first <= last else slots


class LayerRule:
    """The replay rule of one layer. It keeps a session's caches of one batch and writes many slots at a time.

    Attributes:
        scores: float32 [n, B] of every chunk so far, for the forwards t >= F. replayed: bool [n, B], for all forwards.
    """

    def __init__(self, config: DecoderConfig, rules: Rules, layer: int, scale: float, threshold: float | None) -> None:
        self._config, self._rules, self._layer, self._scale = config, rules, layer, scale
        self._gate = rules.gates[layer]
        value = self._gate.comparison.never if threshold is None else threshold
        self._threshold = torch.tensor(value, dtype=torch.float32)
        frame, rows, width = config.tokens_per_frame, config.batch_size, config.hidden_size
        self._outputs, self._inputs = torch.zeros(frame, rows, width), torch.zeros(frame, rows, width)
        self._chain = torch.zeros(frame, rows, dtype=torch.int32)
        self.scores: list[Tensor] = []
        self.replayed: list[Tensor] = []

    def continued(self, rules: Rules, threshold: float | None) -> LayerRule:
        """Return the rule with other gates and another threshold, where this one stands. Nothing has replayed yet."""
        after = LayerRule(self._config, rules, self._layer, self._scale, threshold)
        after._outputs, after._inputs = self._outputs.clone(), self._inputs.clone()
        after.replayed = list(self.replayed)
        return after

    def __call__(self, fresh: Fresh) -> Tensor:
        """Return the value for the residual add: the MLP's output, or the cached one where the row replays."""
        rows, frame, steps = self._config.batch_size, self._config.tokens_per_frame, fresh.span.steps
        slots, count, width = _slots(steps % frame), len(steps), fresh.output.shape[-1]
        now, output = fresh.x, fresh.output.reshape(rows, -1, width)[:, :count].transpose(0, 1)
        inputs, chain = self._inputs[slots], self._chain[slots]
        score = self._score(fresh, inputs).reshape(count, rows)
        replay = decide(score, self._threshold, steps[:, None], chain, self._rule())
        y = torch.where(replay[..., None], self._outputs[slots], output)
        # A row that replays writes back what it read: its slot stays.
        self._outputs[slots] = y
        self._inputs[slots] = torch.where(replay[..., None], inputs, now)
        self._chain[slots] = torch.where(replay, chain + 1, 0)
        # Scores of the first frame decide nothing, so thresholds are not chosen from them.
        if int(steps[-1]) >= frame:
            self.scores.append(score[steps >= frame])
        self.replayed.append(replay)
        # `fresh` is kept for other thresholds, so its output must not change.
        result = fresh.output.clone()
        result.view(rows, -1, width)[:, :count] = y.transpose(0, 1)
        return result

    def _rule(self) -> ReplayRule:
        rules, at_most = self._rules, self._gate.comparison is Comparison.AT_MOST
        longest = -1 if rules.max_chain is None else rules.max_chain
        return ReplayRule(self._config.tokens_per_frame, longest, rules.couple_cfg, rules.refresh_every or 0, at_most)

    def _score(self, fresh: Fresh, cached: Tensor) -> Tensor:
        """Return the gate's scores [n * B]: the tokens of a chunk become rows of the gate's own operator."""
        values = GateValues(
            query=fresh.query,
            key_cache=fresh.keys,
            position=torch.zeros(1, dtype=torch.int64),
            step=fresh.span.steps,
            x=fresh.x.flatten(0, 1),
            cached=cached.flatten(0, 1),
            stride=self._config.tokens_per_frame,
            scale=self._scale,
            layer=self._layer,
            rows=self._config.batch_size,
            params=self._gate.params(),
        )
        return self._gate.score(lambda op, *arguments: op(*arguments), values)
