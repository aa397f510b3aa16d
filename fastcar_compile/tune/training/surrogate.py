"""The surrogate of one MLP by least squares, its gains, and a gate that predicts its error.

A layer keeps moments of its MLP's neurons, inputs and outputs, from which drafts of all sizes follow, and some pairs of
visits of a slot. docs/explanation/drafts.md describes the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, fx, nn

from fastcar_compile.errors import CompileError
from fastcar_compile.gates.draft import GAINS, DraftSize
from fastcar_compile.ir.layers import Role, role_nodes
from fastcar_compile.ir.query import bound, node_arg, tensor_attribute
from fastcar_compile.tune.training.whole import WholeVideos

SIZES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8)
"""Sizes that are tried: neurons as a share of the MLP's, and the rank as the same share of the hidden size."""

AGES = (1, 1, 2, 3, 5)
"""Frames between the visits of a pair, drawn alike: a slot is computed some frames before it replays."""

PAIRS, PAIR_VALUES = 40000, 1 << 25
"""Pairs of every layer that gains and gate are fitted to; with a large hidden size so many values instead."""

RIDGE = 1e-4
"""Penalty of the least squares, of the mean square of a feature."""

UNITS, STEPS, BATCH, RATE = 16, 600, 2048, 3e-3
"""The gate's hidden units; its training: steps of Adam, pairs of each, and the rate, which falls along a cosine."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class SurrogateMlp:
    """The weights of a layer's MLP, float32, as `LayerDraft` names them."""

    activation: Callable[[Tensor], Tensor]
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    gate: Tensor | None = None
    gate_bias: Tensor | None = None

    @classmethod
    def all_of(cls, decoder: WholeVideos) -> list[SurrogateMlp]:
        """Return the MLPs of a decoder.

        Raises:
            CompileError: an MLP is of another form than `LayerDraft`.
        """
        module, sites = decoder.prefill, decoder.program.sites
        found = list[SurrogateMlp]()
        for site, nodes in zip(sites, role_nodes(module).values(), strict=True):
            if site.mlp.activation not in _ACTIVATIONS:
                what = f"the MLP has the activation {site.mlp.activation!r}"
                hint = f"a draft has one of: {', '.join(_ACTIVATIONS)}"
                raise CompileError(what, where=site.module_path, hint=hint)
            parts = {role: _linear(module, nodes[role]) for role in (Role.UP_PROJ, Role.DOWN_PROJ)}
            gate = _linear(module, nodes[Role.GATE_PROJ]) if Role.GATE_PROJ in nodes else (None, None)
            (up, up_bias), (down, _) = parts[Role.UP_PROJ], parts[Role.DOWN_PROJ]
            found.append(cls(_ACTIVATIONS[site.mlp.activation], up, up_bias, down, *gate))
        return found

    def neurons(self, x: Tensor, of: Tensor | slice = slice(None)) -> Tensor:
        """Return a(x) [..., n] of chosen neurons for x [..., H]."""

        def linear(weight: Tensor, bias: Tensor | None) -> Tensor:
            return nn.functional.linear(x, weight[of], None if bias is None else bias[of])

        up = linear(self.up, self.up_bias)
        return self.activation(up) if self.gate is None else self.activation(linear(self.gate, self.gate_bias)) * up

    def share(self, size: DraftSize) -> float:
        """Return a draft's weights as a share of the MLP's."""
        return size.share(len(self.up), self.gate is not None)

    def part(self, of: Tensor) -> dict[str, Tensor]:
        """Return the weights of chosen neurons, by the names of `LayerDraft`."""
        named = {"gate_proj": self.gate, "gate_bias": self.gate_bias, "up_proj": self.up, "up_bias": self.up_bias}
        return {name: weight[of].clone() for name, weight in named.items() if weight is not None}


def _linear(module: fx.GraphModule, node: fx.Node) -> tuple[Tensor, Tensor | None]:
    read = {
        name: tensor_attribute(module, str(n.target)).detach()
        for name, n in bound(node).items()
        if isinstance(n, fx.Node) and n.op == "get_attr"
    }
    bias = read.get("bias")
    if "weight" in read:
        return read["weight"].float(), None if bias is None else bias.float()
    # A row with a single one is exact in int8, so the operator of quantised weights shows what they stand for.
    ones = torch.eye(node_arg(node, 0).meta["val"].shape[-1])
    operator = cast("Callable[..., Tensor]", node.target)
    return operator(ones, read["qweight"], read["wscale"], None).T.contiguous(), bias


def sizes_of(mlp: SurrogateMlp) -> list[DraftSize]:
    """Return the sizes that are tried for an MLP, from none on; no draft is as large as the MLP."""
    found = [DraftSize(0, 0)]
    for part in SIZES:
        size = DraftSize.of_part(part, *mlp.up.shape)
        if size != found[-1] and size.neurons <= len(mlp.up) and mlp.share(size) < 1:
            found.append(size)
    return found


class Moments:
    """What a layer keeps of the videos: second moments of [a, x, 1] and y, and pairs of visits.

    Args:
        mlp: the layer's. neurons: their numbers, the most important first. pairs: of all videos together.
    """

    def __init__(self, mlp: SurrogateMlp, neurons: Tensor, random: torch.Generator) -> None:
        self.mlp, self.order, self._random = mlp, neurons, random
        self.hidden, features = mlp.up.shape[1], len(neurons) + mlp.up.shape[1] + 1
        self.gram = torch.zeros(features, features, dtype=torch.float64)
        self.cross = torch.zeros(features, self.hidden, dtype=torch.float64)
        self.square, self.count = 0.0, 0
        self._pairs = list[tuple[Tensor, ...]]()

    def add(self, x: Tensor, y: Tensor, pairs: int) -> None:
        """Take in inputs and outputs float32 [N, frames, F, H] of whole frames, and draw pairs of them."""
        rows, outputs = x.flatten(0, 2), y.flatten(0, 2)
        features = torch.cat([self.mlp.neurons(rows, self.order), rows, rows.new_ones(len(rows), 1)], 1)
        # Sums of one batch are float32, those of batches float64.
        self.gram += features.T @ features
        self.cross += features.T @ outputs
        self.square += float(outputs.double().square().sum())
        self.count += len(rows)
        ages = torch.tensor([age for age in AGES if age < x.shape[1]])
        age = ages[torch.randint(len(ages), (pairs,), generator=self._random)]
        video, place = (torch.randint(n, (pairs,), generator=self._random) for n in (x.shape[0], x.shape[2]))
        frame = age + (torch.rand(pairs, generator=self._random) * (x.shape[1] - age)).long()
        now, before = (video, frame, place), (video, frame - age, place)
        self._pairs.append((x[now], x[before], y[now], y[before]))

    @cached_property
    def pairs(self) -> tuple[Tensor, ...]:
        """x, x_c, y, y_c of all pairs, float32 [n, H]."""
        return tuple(torch.cat(parts) for parts in zip(*self._pairs, strict=True))

    def draft(self, size: DraftSize) -> tuple[dict[str, Tensor], float]:
        """Return the draft of a size, without gains, and its mean square error.

        The linear part is fitted at full rank, reduced to the directions in which it moves the output most, and all is
        fitted again.
        """
        n, k, hidden, most = size.neurons, size.rank, self.hidden, len(self.order)
        kept = torch.cat([torch.arange(n), torch.arange(most, most + hidden + 1)])
        gram, cross = self.gram[kept][:, kept], self.cross[kept]
        linear = _solved(gram, cross)[n : n + hidden]
        moves = linear.T @ gram[n : n + hidden, n : n + hidden] @ linear
        inner = linear @ torch.linalg.eigh(moves).eigenvectors[:, -k:]
        # The features of the second fit, [a, inner x, 1], are linear in those of the first.
        change = torch.zeros(len(kept), n + k + 1, dtype=gram.dtype)
        change[:n, :n], change[n : n + hidden, n : n + k], change[-1, -1] = torch.eye(n), inner, 1.0
        gram, cross = change.T @ gram @ change, change.T @ cross
        weights = _solved(gram, cross)
        error = self.square - 2 * float((weights * cross).sum()) + float((weights * (gram @ weights)).sum())
        # Inner features get the size of neurons: a row of both is quantised with one scale.
        sizes = gram.diagonal().clamp(min=1e-30).sqrt()
        scale = sizes[:n].square().mean().sqrt() / sizes[n : n + k]
        outer = torch.cat([weights[:n], weights[n : n + k] / scale[:, None]]).T
        found = {"inner": (inner * scale).T, "outer": outer, "bias": weights[-1]}
        own = self.mlp.part(self.order[:n])
        return own | {name: t.float().contiguous() for name, t in found.items()}, max(error, 0.0) / self.count


def _solved(gram: Tensor, cross: Tensor) -> Tensor:
    """Return the least-squares weights [f, H] of moments [f, f] and [f, H], with a ridge."""
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.cholesky_solve(cross, torch.linalg.cholesky(gram + ridge))


def surrogate(mlp: SurrogateMlp, draft: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return m(x) [..., H] of a draft without gains."""
    gate, up_bias = (draft.get("gate_proj"), draft.get("gate_bias")), draft.get("up_bias")
    own = SurrogateMlp(mlp.activation, draft["up_proj"], up_bias, mlp.down, *gate)
    features = torch.cat([own.neurons(x), x @ draft["inner"].T], -1)
    return features @ draft["outer"].T + draft["bias"]


def gains_of(now: Tensor, before: Tensor, change: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return edges and gains, and what is left of the errors, float32 [n, H].

    The gain of a bin is the least-squares factor of the cached remainder, within 0 and 1.

    Args:
        now, before: y - m(x) and y_c - m(x_c), float32 [n, H]. change: float32 [n].
    """
    edges = torch.quantile(change, torch.arange(1, GAINS) / GAINS)
    place = (change[:, None] >= edges).sum(-1)
    both, own = (torch.zeros(GAINS).index_add_(0, place, (v * before).sum(-1)) for v in (now, before))
    gains = (both / own.clamp(min=1e-20)).clamp(0, 1)
    return {"edges": edges, "gains": gains}, now - gains[place][:, None] * before


def candidates(moments: Moments, sizes: Sequence[DraftSize], random: torch.Generator) -> list[dict[str, Tensor]]:
    """Return for each size the tensors of draft and gate, and `error`, the mean square of m(x) - y.

    The size 0 has no draft; its error is that of the cached output.
    """
    x, cached_x, y, cached = moments.pairs
    change = (x - cached_x).abs().sum(-1) / x.abs().sum(-1).clamp(min=1e-12)
    found, wanted = list[dict[str, Tensor]](), list[Tensor]()
    for size in sizes:
        if not size.neurons:
            draft, left = dict[str, Tensor](), y - cached
            error = float(left.square().sum(-1).mean())
        else:
            draft, error = moments.draft(size)
            now, before = (b - surrogate(moments.mlp, draft, a) for a, b in ((x, y), (cached_x, cached)))
            gains, left = gains_of(now, before, change)
            draft |= gains
        found.append(draft | {"error": torch.tensor(error, dtype=torch.float64)})
        wanted.append(left.square().sum(-1).clamp(min=1e-20).log())
    for draft, gate in zip(found, fitted_gates(x, cached_x, torch.stack(wanted), random), strict=True):
        draft |= gate
    return found


def fitted_gates(x: Tensor, cached: Tensor, wanted: Tensor, random: torch.Generator) -> list[dict[str, Tensor]]:
    """Return networks of gate `learned` that predict `wanted` [S, n] from [x ; |x - x_c|], all trained at once."""
    features = torch.cat([x, (x - cached).abs()], 1)
    scale = features.square().mean().sqrt().clamp(min=1e-20)
    features = features / scale
    count, width = len(wanted), features.shape[1]
    first = torch.randn(count, UNITS, width, generator=random) / math.sqrt(width)
    second = torch.randn(count, UNITS, generator=random) / math.sqrt(UNITS)
    parts = first, -(first @ features.mean(0)), second, wanted.mean(1)
    w1, b1, w2, b2 = (nn.Parameter(t) for t in parts)
    optimizer = torch.optim.Adam([w1, b1, w2, b2], RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, RATE / 30)
    with torch.enable_grad():
        for _ in range(STEPS):
            chosen = torch.randint(len(x), (min(BATCH, len(x)),), generator=random)
            hidden = torch.relu(
                nn.functional.linear(features[chosen], w1.flatten(0, 1)).unflatten(1, (count, UNITS)) + b1
            )
            loss = ((hidden * w2).sum(-1) + b2 - wanted.T[chosen]).square().mean(0).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    found = w1.detach() / scale, b1.detach(), w2.detach(), b2.detach()[:, None]
    return [dict(zip(("w1", "b1", "w2", "b2"), parts, strict=True)) for parts in zip(*found, strict=True)]
