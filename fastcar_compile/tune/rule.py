"""The replay rule of one layer over chunks of tokens, on values that no threshold of this layer changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.errors import InputError
from fastcar_compile.gates import Comparison, Draft, Gate, GateValues
from fastcar_compile.gates.base import Rotary
from fastcar_compile.ir.dataflow import descendants
from fastcar_compile.ir.layers import Role, ring_of, role_nodes, schedule
from fastcar_compile.ir.ops.attention import capped_attention, row_of
from fastcar_compile.ir.ops.gates import ReplayRule, decide
from fastcar_compile.ir.ops.operator import loaded, stored
from fastcar_compile.ir.query import get_attribute, is_op, node_arg, output_nodes
from fastcar_compile.ir.sites import Rotations, attention_site, mlp_output
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.passes.insert_drafts import DraftBranch

Attend = Callable[..., Tensor]
"""(query, key cache, value cache, position, scale) -> result, like `fastcar::attention`."""


@dataclass(frozen=True)
class SinkWindow:
    """A token at p attends to positions 0 .. sinks - 1 and p - window + 1 .. p. Rotary positions stay absolute.

    A call has the arguments of `fastcar::attention`, so an `Evaluator` can use it instead.

    Raises:
        InputError: the window is below 1, or sinks are below 0.
    """

    window: int
    sinks: int

    def __post_init__(self) -> None:
        if self.window < 1 or self.sinks < 0:
            what = f"a window of {self.window} tokens with {self.sinks} sinks"
            raise InputError(what, hint="window >= 1, sinks >= 0")

    def __str__(self) -> str:
        return f"window {self.window}, sinks {self.sinks}"

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, position: Tensor, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Return attention float32 [B, Hq, T, D] for caches [B, Hkv, S, D] of any KV type and position int64 [1]."""
        start, steps = int(position), query.shape[2]
        rows = torch.arange(start, start + steps)[:, None]
        columns = torch.arange(min(start + steps, keys.shape[2]))
        # keep the columns that some row of this call sees
        columns = columns[(columns < self.sinks) | (columns > start - self.window)]
        seen = (columns <= rows) & ((columns < self.sinks) | (columns > rows - self.window))
        grouped = query.shape[1] != keys.shape[1]
        seen_rows = [loaded(cache[:, :, columns], query.shape[3]) for cache in (keys, values)]
        if softcap is not None:
            return capped_attention(query, seen_rows[0], seen_rows[1], seen, scale, softcap)
        return torch.nn.functional.scaled_dot_product_attention(
            query, *seen_rows, attn_mask=seen, scale=scale, enable_gqa=grouped
        )


fastcar = torch.ops.fastcar


Replace = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query, written key cache, MLP input, MLP output) -> the value for the residual add in place of the MLP output."""


@dataclass(frozen=True)
class Layer:
    """The nodes of one layer that replay reads and replaces.

    Attributes:
        query: what the gate compares. swapped: it is [B, T, Hq, D] and not [B, Hq, T, D].
    """

    query: fx.Node
    key_cache: fx.Node
    x: fx.Node
    output: fx.Node
    scale: float
    swapped: bool = False


class Stages:
    """The graph in stages. A change in one layer recomputes only that layer and the later ones.

    Attributes:
        layers: in order. Stage i computes layer i (stage 0 also what precedes it), and the last stage the head.
        crossing: for each stage, the nodes whose values later stages read.
        joined: for each layer's stage, the nodes of `body` that `tail` reads, and those of `crossing`.
        placeholders: input name -> node. results: output name -> node.
        constants: `get_attr` node -> its value.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        outputs: list[str],
        attend: Attend | None = None,
        in_place: bool = False,
        rotary: Rotary = "both",
    ) -> None:
        """Cut the graph.

        Args:
            attend: replaces attention. in_place: `body` writes keys and values into the caches that it is given.
            rotary: of the gates.
        """
        self._attend, self._in_place = attend or torch.ops.fastcar.attention.default, in_place
        self.layers = _layers(module, rotary)
        cut = schedule(module.graph)
        first, *later = cut.layers
        self.nodes = [[*cut.before, *first], *map(list, later), list(cut.behind)]
        rank = {node: stage for stage, part in enumerate(self.nodes) for node in part}
        self.placeholders = {str(n.target): n for n in module.graph.nodes if n.op == "placeholder"}
        self.results = dict(zip(outputs, output_nodes(module.graph), strict=True))
        self.crossing = [
            [n for n in part if any(rank.get(u, s) > s for u in n.users)] for s, part in enumerate(self.nodes)
        ]
        # What depends on a layer's MLP output runs behind it; the head's stage has no such nodes.
        behind = [descendants(layer.output) - {layer.output} for layer in self.layers] + [set()]
        self._bodies = [[n for n in part if n not in late] for part, late in zip(self.nodes, behind, strict=True)]
        self._tails = [[n for n in part if n in late] for part, late in zip(self.nodes, behind, strict=True)]
        self.joined = [self._joined(stage) for stage in range(len(self.layers))]
        attributes = [n for n in module.graph.nodes if n.op == "get_attr"]
        self.constants = {n: get_attribute(module, str(n.target)) for n in attributes}

    def _joined(self, stage: int) -> list[fx.Node]:
        tail = set(self._tails[stage])
        read = {a for node in tail for a in node.all_input_nodes} | set(self.crossing[stage])
        return [n for n in self.nodes[stage] if n in read and n not in tail]

    def run(self, stage: int, values: Mapping[fx.Node, Any], replace: Replace | None) -> dict[fx.Node, Any]:
        """Return the values of all nodes of one stage.

        Args:
            values: of placeholders, and of the crossing nodes of earlier stages.
            replace: called on the layer's MLP output; None keeps it.
        """
        found = self.body(stage, values)
        if replace is not None:
            layer = self.layers[stage]
            found[layer.output] = replace(*(found[n] for n in (layer.query, layer.key_cache, layer.x, layer.output)))
        return self.tail(stage, found)

    def body(self, stage: int, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Return the values of a layer's stage up to its MLP's output: those that no replay of this layer changes."""
        return self._computed(self._bodies[stage], values)

    def tail(self, stage: int, values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        """Return the values of the rest of a layer's stage.

        Args:
            values: as `body` takes them, and those of `joined`, with the MLP's output.
        """
        return self._computed(self._tails[stage], values)

    def _computed(self, nodes: list[fx.Node], values: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        known: dict[fx.Node, Any] = {**self.constants, **values}
        for node in nodes:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            known[node] = self._operator(node)(*args, **kwargs)
        return known

    def _operator(self, node: fx.Node) -> Callable[..., Any]:
        if is_op(node, fastcar.attention):
            return self._attend
        if self._in_place and is_op(node, fastcar.cache_write):
            return _write
        return cast("Callable[..., Any]", node.target)  # only call_function nodes are in a stage


def _write(cache: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """Return the cache itself after the write of `fastcar::cache_write`."""
    start = int(position)
    # Padding of the last chunk may reach beyond the cache.
    rows = max(0, min(value.shape[2], cache.shape[2] - start))
    cache[:, :, start : start + rows] = stored(value[:, :, :rows], cache.dtype)
    return cache


def _layers(module: fx.GraphModule, rotary: Rotary) -> list[Layer]:
    """Return where replay acts, by the roles that find-sites gave to the nodes."""
    layers: list[Layer] = []
    rotations = Rotations(module.graph) if rotary == "key" else None
    for nodes in role_nodes(module).values():
        attention = nodes[Role.ATTENTION]
        keys, x = node_arg(attention, 1), node_arg(nodes[Role.UP_PROJ], 0)
        query, swapped = (node_arg(attention, 0), False) if rotations is None else rotations.unrotated(attention)
        layers.append(Layer(query, keys, x, mlp_output(nodes), attention_site(attention).scale, swapped))
    return layers


@dataclass(frozen=True)
class Rules:
    """Everything but the thresholds that decides a replay.

    Attributes:
        gates: one per layer. draft: what a row that replays gets; None: the cached output.
    """

    gates: tuple[Gate, ...]
    max_chain: int | None = None
    couple_cfg: bool = False
    refresh_every: int | None = None
    draft: Draft | None = None


@dataclass(frozen=True)
class Fresh:
    """A layer's stage on one chunk up to its MLP's output. n tokens are decoded; the rest fills the chunk up.

    Attributes:
        steps: numbers t of their forwards, int64 [n].
        query: float32 [n * B, Hq, 1, D]. keys: [n * B, Hkv, 1, D], one frame earlier.
        x: the MLP's input, float32 [n, B, H]. output: the MLP's output, of the whole chunk.
        values: of `Stages.joined`.
    """

    steps: Tensor
    query: Tensor
    keys: Tensor
    x: Tensor
    output: Tensor
    values: dict[fx.Node, Any]

    @classmethod
    def of(cls, stages: Stages, stage: int, found: dict[fx.Node, Any], steps: Tensor, earlier: Tensor) -> Fresh:
        """Return these values out of those of `Stages.body`. earlier: positions one frame before the tokens."""
        layer, count = stages.layers[stage], len(steps)
        query, x, output = found[layer.query], found[layer.x], found[layer.output]
        rows, query = len(query), query.transpose(1, 2) if layer.swapped else query
        return cls(
            steps=steps,
            query=query[:, :, :count].permute(2, 0, 1, 3).flatten(0, 1)[:, :, None],
            keys=_earlier(layer, found[layer.key_cache], earlier),
            x=x.reshape(rows, -1, x.shape[-1])[:, :count].transpose(0, 1).contiguous(),
            output=output,
            values={node: found[node] for node in stages.joined[stage]},
        )

    @property
    def nbytes(self) -> int:
        """Size in bytes; what the values share with others counts here too."""
        tensors = (self.query, self.keys, self.x, self.output, *self.values.values())
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


def _earlier(layer: Layer, cache: Tensor, positions: Tensor) -> Tensor:
    """Return the keys [n * B, Hkv, 1, D] at the positions one frame before the tokens."""
    # In the first frame there is no earlier token. Position 0 stands in, and no decision reads the score.
    earlier, ring = positions.clamp(min=0), ring_of(layer.key_cache)
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

    def __init__(
        self,
        config: DecoderConfig,
        rules: Rules,
        layer: int,
        scale: float,
        threshold: float | None,
        draft: DraftBranch | None = None,
    ) -> None:
        self._config, self._rules, self._layer, self._scale, self._draft = config, rules, layer, scale, draft
        self._gate = rules.gates[layer]
        longest = -1 if rules.max_chain is None else rules.max_chain
        at_most, refresh = self._gate.comparison is Comparison.AT_MOST, rules.refresh_every or 0
        self._rule = ReplayRule(config.tokens_per_frame, longest, rules.couple_cfg, refresh, at_most)
        value = self._gate.comparison.never if threshold is None else threshold
        self._threshold = torch.tensor(value, dtype=torch.float32)
        frame, rows, width = config.tokens_per_frame, config.batch_size, config.hidden_size
        self._outputs, self._inputs = torch.zeros(frame, rows, width), torch.zeros(frame, rows, width)
        self._chain = torch.zeros(frame, rows, dtype=torch.int32)
        self.scores: list[Tensor] = []
        self.replayed: list[Tensor] = []

    def continued(self, threshold: float | None) -> LayerRule:
        """Return the rule with another threshold, where this one stands. Nothing has replayed yet."""
        after = LayerRule(self._config, self._rules, self._layer, self._scale, threshold, self._draft)
        after._outputs, after._inputs = self._outputs.clone(), self._inputs.clone()
        after.replayed = list(self.replayed)
        return after

    def __call__(self, fresh: Fresh) -> Tensor:
        """Return the value for the residual add: the MLP's output; where a row replays, the cached one or a draft's."""
        rows, frame, steps = self._config.batch_size, self._config.tokens_per_frame, fresh.steps
        slots, count, width = _slots(steps % frame), len(steps), fresh.output.shape[-1]
        now, output = fresh.x, fresh.output.reshape(rows, -1, width)[:, :count].transpose(0, 1)
        inputs, chain = self._inputs[slots], self._chain[slots]
        score = self._score(fresh, inputs).reshape(count, rows)
        replay = decide(score, self._threshold, steps[:, None], chain, self._rule)
        # A row that replays writes back what it read: its slot stays.
        kept = torch.where(replay[..., None], self._outputs[slots], output)
        y = kept if self._draft is None else self._drafted(replay, now, inputs, kept)
        self._outputs[slots] = kept
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

    def _drafted(self, replay: Tensor, now: Tensor, inputs: Tensor, kept: Tensor) -> Tensor:
        """Return `kept`, with the draft's output in the rows that replay; all float32 [n, B, H], replay bool [n, B]."""
        assert self._draft is not None
        result = kept.clone()
        if replay.any():
            result[replay] = self._draft(now[replay], inputs[replay], kept[replay])
        return result

    def _score(self, fresh: Fresh, cached: Tensor) -> Tensor:
        """Return the gate's scores [n * B]: the tokens of a chunk become rows of the gate's own operator."""
        values = GateValues(
            query=fresh.query,
            key_cache=fresh.keys,
            position=torch.zeros(1, dtype=torch.int64),
            step=fresh.steps,
            x=fresh.x.flatten(0, 1),
            cached=cached.flatten(0, 1),
            stride=self._config.tokens_per_frame,
            scale=self._scale,
            layer=self._layer,
            rows=self._config.batch_size,
            params=self._gate.params(),
        )
        return self._gate.score(lambda op, *arguments: op(*arguments), values)


@dataclass(frozen=True)
class Measured:
    """A teacher-forced result.

    Attributes:
        nll: nats per token that counts, from the second frame on.
        ratios: for each layer, the share of the forwards t >= F that replayed.
        scores: for each layer, the scores of those forwards, float32 [n].
        shares: for each video, or with couple_cfg each pair of videos, the mean of its layers' ratios.
    """

    nll: float
    ratios: tuple[float, ...]
    scores: tuple[Tensor, ...] = field(repr=False)
    shares: tuple[float, ...] = ()

    @property
    def replay(self) -> float:
        """Mean of the layers' ratios."""
        return sum(self.ratios) / len(self.ratios)


@dataclass(frozen=True)
class Details:
    """A teacher-forced result by token: N videos, n predicted tokens (all but the prompt), L layers, t decode forwards.

    Attributes:
        losses: float32 [N, n], nats. The first tokens_per_frame are the first frame.
        predicted: int64 [N, n], the most likely symbol given the true past, of those that count.
        counted: bool [N, n], whether the token counts in a mean.
        replayed: bool [L, N, t], whether each forward replayed.
    """

    losses: Tensor
    predicted: Tensor
    counted: Tensor
    replayed: Tensor


def counts(tokens: Tensor, counted: tuple[int, int] | None) -> Tensor:
    """Return which tokens count in a mean, bool of their shape."""
    if counted is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    first, end = counted
    return (tokens >= first) & (tokens < end)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses in nats, float32 [rows, n], of logits [rows, n, V] and targets [rows, n].

    A loss that is not a number is infinite.
    """
    # A token that does not count, such as an action, may have no logit. Its loss is never read.
    targets = targets.clamp(max=logits.shape[-1] - 1)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
