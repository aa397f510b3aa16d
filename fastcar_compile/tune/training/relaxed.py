"""The decoder as a differentiable function: whole videos at once, with relaxed replay decisions.

An MLP reads its layer's input only. So everything but the replay rule is computed for all tokens of a video together.
Only the choice between fresh and cached outputs goes frame by frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fastcar_compile.errors import InputError, InternalError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.query import is_op
from fastcar_compile.passes.canonicalize import FOLDED
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.tune.evaluator import too_short
from fastcar_compile.tune.rule import Stages
from fastcar_compile.tune.training.whole import WholeVideos

UNIFORM_EDGE = 1e-6
"""Random numbers keep this distance from 0 and 1, where the logistic quantile is infinite."""


class Scorer(nn.Module, ABC):
    """A trainable gate of one layer. It replays where its score is at most 0."""

    @abstractmethod
    def prepare(self, query: Tensor, earlier: Tensor, x: Tensor) -> Tensor:
        """Return the part of the score that does not depend on decisions, [N, n, F, …], as `score` takes it.

        Args:
            query, earlier: float32 [N, n, F, Hq, D], queries, and keys one frame earlier, of n frames (without frame
                0).
            x: float32 [N, n, F, H], inputs of the MLP.
        """

    @abstractmethod
    def score(self, prepared: Tensor, x: Tensor, cached: Tensor) -> Tensor:
        """Return the scores of one frame, float32 [N, F].

        Args:
            prepared: one frame of the result of `prepare`. x: [N, F, H]. cached: [N, F, H], x of the last computed
                visit.
        """

    def surrogate(self, x: Tensor) -> Tensor | float:
        """Return what stands in for the MLP of x [..., H] where a row replays, [..., H]; 0: only the cached output."""
        return 0.0

    def gain(self, x: Tensor, cached: Tensor) -> Tensor | float:
        """Return the factor, [N, F, 1], of what the surrogate left of the cached output; arguments as for `score`."""
        return 1.0

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the gate's weights, float32, by their names in its file."""

    @abstractmethod
    def threshold(self) -> float:
        """Return the threshold at which the gate with these weights decides as the scorer does."""

    @abstractmethod
    def assign(self, weights: dict[str, Tensor], threshold: float) -> None:
        """Set weights and threshold: the inverse of `weights` and `threshold`."""


@dataclass
class Relaxation:
    """How hard a decision is.

    Attributes:
        noise: scale of the logistic noise on scores; 0: none.
        random: source of the noise; needed if there is noise.
        softness: 0: a decision is 0 or 1 forwards, and only its gradient is soft. Otherwise it is
            sigmoid(-score / softness) both ways, which measures the loss halfway between both outcomes: the divergence
            has no slope at a computed token, and twice the mean slope at a replayed one.
    """

    noise: float = 0.0
    random: torch.Generator | None = None
    softness: float = 0.0

    def decide(self, score: Tensor) -> Tensor:
        """Return 1 where the score with noise is at most 0, else 0, or values between them; float32."""
        if self.noise:
            edge = UNIFORM_EDGE
            uniform = torch.rand(score.shape, generator=self.random).clamp(edge, 1 - edge)
            # The logit of a uniform number is logistic, so sigmoid(-score / noise) is the probability of a replay.
            score = score + self.noise * torch.logit(uniform)
        if self.softness:
            return torch.sigmoid(-score / self.softness)
        soft = torch.sigmoid(-score)
        # Straight-through: the value is the hard decision, and the gradient is that of the sigmoid.
        return (score <= 0).to(score.dtype) + soft - soft.detach()


@dataclass(frozen=True)
class Sample:
    """Inputs of a layer's gate on the dense decoder, of frames 1 to n.

    Attributes:
        query, earlier: float32 [N, n, F, Hq, D], queries, and keys one frame earlier.
        x, y: float32 [N, n, F, H], inputs and outputs of the MLP.
    """

    query: Tensor
    earlier: Tensor
    x: Tensor
    y: Tensor


class RelaxedDecoder(WholeVideos):
    """A decoder on whole videos of one length. Its weights are frozen unless `own_weights` was called.

    Args:
        model: as `fastcar_compile.compile` takes it. rows: videos per batch. length: input tokens, prompt included.
        tokens_per_frame: F. prompt: tokens before decoding starts.

    Raises:
        CompileError: the model cannot be captured. InputError: a decoder without head, or fewer than two frames.
    """

    def __init__(self, model: nn.Module, rows: int, length: int, tokens_per_frame: int, prompt: int = 1) -> None:
        if length < prompt + tokens_per_frame + 1:
            raise too_short(length + 1, prompt, tokens_per_frame, 1, 2)
        sizes = {"batch_size": rows, "max_seq_len": length, "tokens_per_frame": tokens_per_frame}
        program = run_pipeline(capture(model, prefill_chunk=length, **sizes), analysis_pipeline())
        super().__init__(program, length, prompt)
        self._parameters = list(model.named_parameters())
        _without_custom_writes(self.prefill)
        self._stages = Stages(self.prefill, program.prefill_outputs, _attend)
        self.scales = [layer.scale for layer in self._stages.layers]
        # The last frame may be incomplete. Its padding counts neither as replayed nor as computed.
        able = torch.arange(self.frames * tokens_per_frame) < length - prompt
        self._able = able.view(self.frames, tokens_per_frame)[1:].float()

    def own_weights(self) -> dict[str, nn.Parameter]:
        """Replace the decoder's parameters by trainable copies and return these by their names in the model.

        A parameter with several names (tied embedding and head) has one copy, under the first name.

        Raises:
            InternalError: the captured program holds none of the model's parameters. InputError: it holds a weight that
                was computed from one.
        """
        # Capture keeps the storage of a parameter, so an address and a shape identify it.
        if folded := [str(n.target) for n in self._stages.constants if FOLDED in str(n.target)]:
            what = f"{folded[0].partition(FOLDED)[0]} is a parameter that a weight is computed from"
            raise InputError(what, hint="remove it before training: nn.utils.parametrize.remove_parametrizations(…)")
        known = {(p.data_ptr(), p.shape): (name, nn.Parameter(p.detach().clone())) for name, p in self._parameters}
        used: dict[str, nn.Parameter] = {}
        for node, tensor in self._stages.constants.items():
            found = known.get((tensor.data_ptr(), tensor.shape)) if isinstance(tensor, Tensor) else None
            if found is not None:
                used[found[0]] = self._stages.constants[node] = found[1]
        if not used:
            raise InternalError("the captured program holds none of the model's parameters")
        return used

    def samples(self, tokens: Tensor) -> list[Sample]:
        """Return the gate inputs of every layer on the dense decoder, for tokens int64 [rows, length]."""
        found: list[Sample] = []

        def record(query: Tensor, key_cache: Tensor, x: Tensor, output: Tensor) -> Tensor:
            found.append(_sample(self, query, key_cache, x, output))
            return output

        with torch.no_grad():
            self.run(tokens, [record] * self.layers)
        return found

    def replayed(
        self, tokens: Tensor, scorers: Sequence[Scorer], relaxation: Relaxation | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits float32 [rows, length, V], and the replayed share of the forwards t >= F, [layers].

        Args:
            tokens: int64 [rows, length]. scorers: one per layer. relaxation: None: hard decisions without noise.
        """
        hooks = [_Replay(self, scorer, relaxation or Relaxation()) for scorer in scorers]
        logits = self.run(tokens, hooks)
        return logits, torch.stack([hook.share for hook in hooks])

    def run(self, tokens: Tensor, hooks: Sequence[Any]) -> Tensor:
        """Return the logits float32 [rows, length, V]; hooks: as `rule.Replace`, one per layer, or None."""
        inputs = {"tokens": tokens, "position": torch.tensor([0])}
        known: dict[fx.Node, Any] = {node: inputs.get(name) for name, node in self._stages.placeholders.items()}
        for stage, hook in enumerate(hooks):
            found = self._stages.run(stage, known, hook)
            known |= {node: found[node] for node in self._stages.crossing[stage]}
        return self._stages.run(self.layers, known, None)[self._stages.results["logits"]].float()

    def share(self, replay: Tensor) -> Tensor:
        """Return the replayed share of the forwards t >= F, of decisions [rows, frames - 1, F]."""
        return (replay * self._able).sum() / (self._able.sum() * len(replay))


class _Replay:
    """A hook with the replay rule of one layer: the caches of a session, frame by frame."""

    def __init__(self, decoder: RelaxedDecoder, scorer: Scorer, relaxation: Relaxation) -> None:
        self._decoder, self._scorer, self._relaxation = decoder, scorer, relaxation
        self.share = torch.zeros(())

    def __call__(self, query: Tensor, key_cache: Tensor, x: Tensor, output: Tensor) -> Tensor:
        decoder, rows = self._decoder, len(query)
        flat = output.reshape(rows, decoder.length, -1)
        inputs = decoder.framed(x.reshape(rows, decoder.length, -1).float())
        fresh = decoder.framed(flat)
        sample = _sample(decoder, query, key_cache, x, output)
        scorer = self._scorer
        prepared, surrogate = scorer.prepare(sample.query, sample.earlier, sample.x), scorer.surrogate(inputs)
        left = fresh - surrogate
        kept, cached = left[:, 0], inputs[:, 0]
        outputs, decisions = [fresh[:, 0]], []
        for frame in range(1, decoder.frames):
            now = inputs[:, frame]
            replay = self._relaxation.decide(scorer.score(prepared[:, frame - 1], now, cached))
            decisions.append(replay)
            # A blend instead of `where`: the gradient reaches the decision through the difference of both outcomes.
            computed = (1 - replay[..., None]).to(fresh.dtype)
            y = scorer.gain(now, cached) * kept
            y = y + surrogate[:, frame] if isinstance(surrogate, Tensor) else y
            outputs.append(y + computed * (fresh[:, frame] - y))
            kept = kept + computed * (left[:, frame] - kept)
            cached = cached + computed * (now - cached)
        self.share = decoder.share(torch.stack(decisions, 1))
        decoded = torch.stack(outputs, 1).flatten(1, 2)[:, : decoder.length - decoder.prompt]
        return torch.cat([flat[:, : decoder.prompt], decoded], 1).reshape(output.shape)


def _sample(decoder: RelaxedDecoder, query: Tensor, key_cache: Tensor, x: Tensor, output: Tensor) -> Sample:
    """Return the inputs of the gate. Frame 0 always computes, so it needs no earlier keys."""
    keys = key_cache.repeat_interleave(query.shape[1] // key_cache.shape[1], 1)
    now = decoder.framed(query.transpose(1, 2).float())
    earlier = decoder.framed(keys.transpose(1, 2).float())
    inputs, outputs = (decoder.framed(v.reshape(len(query), decoder.length, -1).float()) for v in (x, output))
    return Sample(now[:, 1:], earlier[:, :-1], inputs[:, 1:], outputs[:, 1:])


def _attend(query: Tensor, keys: Tensor, values: Tensor, _position: Tensor, scale: float) -> Tensor:
    """Return causal attention of all positions at once, with a gradient."""
    grouped = query.shape[1] != keys.shape[1]
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)


def _without_custom_writes(module: fx.GraphModule) -> None:
    """Replace each `cache_write`, which has no gradient, by its value: the chunk is as long as the cache."""
    for node in list(module.graph.nodes):
        if is_op(node, torch.ops.fastcar.cache_write):
            node.replace_all_uses_with(node.args[1])
            module.graph.erase_node(node)


# Trainable gates: differentiable scores of many tokens at once.
#
# They are the float32 formulas of the gates. Compiled gates round their terms and sum them exactly
# (docs/reference/numerics.md), so a decision may differ where a score is within that rounding of the threshold.


FIRST_SHARE = 0.5
"""Replay of an untrained gate on the dense decoder."""

SPREAD = 0.02
"""Standard deviation of the first weights, for inputs of size 1."""

CHANGE = 0.03
"""Mean of the first weights of |x - x_cached|: an untrained gate measures the size of the change."""

STEEPNESS = 3.0
"""Sum of the first output weights: the spread of the scores, for decisions of softness 1."""

Weights = dict[str, Tensor]


class LearnedScorer(Scorer):
    """score = w2 . relu(w1 @ [x ; |x - x_cached|] + b1) + b2.

    Args:
        sample: inputs of the layer's gate; they set the scale of x and the first b2. units: size of the hidden layer.
        random: source of the first weights.
    """

    def __init__(self, sample: Sample, units: int, random: torch.Generator) -> None:
        super().__init__()
        width = sample.x.shape[-1]
        first, second, third = (torch.randn(*shape, generator=random) for shape in ((units, width),) * 2 + ((units,),))
        # The scale of x differs by layer. Dividing by it lets one learning rate fit all layers.
        self._scale = float(sample.x.square().mean().sqrt().clamp(min=1e-12))
        self.by_input = nn.Parameter(SPREAD * first)
        self.by_change = nn.Parameter(CHANGE + SPREAD * second)
        self.b1 = nn.Parameter(torch.zeros(units))
        self.w2 = nn.Parameter((STEEPNESS + third) / units)
        self.b2 = nn.Parameter(torch.zeros(()))
        with torch.no_grad():
            before, after = sample.x[:, :-1], sample.x[:, 1:]
            scores = self.score(self.prepare(sample.query, sample.earlier, after), after, before)
            self.b2 -= _quantile(scores, FIRST_SHARE)

    def prepare(self, query: Tensor, earlier: Tensor, x: Tensor) -> Tensor:
        """Return the contribution of x to the hidden layer."""
        return nn.functional.linear(x / self._scale, self.by_input, self.b1)

    def score(self, prepared: Tensor, x: Tensor, cached: Tensor) -> Tensor:
        """Return the scores of one or more frames."""
        change = nn.functional.linear((x - cached).abs() / self._scale, self.by_change)
        return torch.relu(prepared + change) @ self.w2 + self.b2

    def weights(self) -> Weights:
        """Return the weights of gate `learned`, float32: w1 [units, 2 H], b1 [units], w2 [units], b2 [1]."""
        # The scale moves into the weights: a compiled gate reads x as it is.
        w1 = torch.cat([self.by_input, self.by_change], 1) / self._scale
        found = {"w1": w1, "b1": self.b1, "w2": self.w2, "b2": self.b2[None]}
        return {name: tensor.detach().float().contiguous().clone() for name, tensor in found.items()}

    def threshold(self) -> float:
        """Return 0: b2 contains the threshold."""
        return 0.0

    def assign(self, weights: Weights, threshold: float) -> None:
        """Set the weights; b2 takes the threshold."""
        by_input, by_change = (weights["w1"] * self._scale).chunk(2, 1)
        found = (by_input, by_change, weights["b1"], weights["w2"], weights["b2"][0] - threshold)
        for own, given in zip((self.by_input, self.by_change, self.b1, self.w2, self.b2), found, strict=True):
            own.data.copy_(given)


class TasScorer(Scorer):
    """score = bias - sum over query heads of weight * logit: TAS of weighted heads replays where TAS is large.

    Args:
        sample: inputs of the layer's gate. The first weights best predict how much the MLP's output changes from one
            frame to the next. scale: attention's own.
    """

    def __init__(self, sample: Sample, scale: float) -> None:
        super().__init__()
        self._scale = scale
        logits = self._logits(sample.query, sample.earlier)
        self._spread = float(logits.flatten(0, -2).std(0).mean().clamp(min=1e-12))
        weights = _regression(logits[:, 1:] / self._spread, _change(sample.y))
        self.heads = nn.Parameter(-weights * STEEPNESS / weights.abs().sum().clamp(min=1e-12))
        self.bias = nn.Parameter(torch.zeros(()))
        with torch.no_grad():
            scores = self.prepare(sample.query, sample.earlier, sample.x)
            self.bias -= _quantile(scores, FIRST_SHARE)

    def prepare(self, query: Tensor, earlier: Tensor, x: Tensor) -> Tensor:
        """Return the scores: they do not depend on decisions."""
        return self.bias - (self._logits(query, earlier) / self._spread) @ self.heads

    def score(self, prepared: Tensor, x: Tensor, cached: Tensor) -> Tensor:
        """Return the prepared scores."""
        return prepared

    def weights(self) -> Weights:
        """Return heads [Hq], float32. Their absolute values sum to 1, so that thresholds have the size of logits."""
        heads = self.heads.detach()
        return {"heads": (heads / heads.abs().sum().clamp(min=1e-12)).float().clone()}

    def threshold(self) -> float:
        """Return the threshold at which the gate with these heads decides as the scorer does."""
        return float(self.bias.detach() * self._spread / self.heads.detach().abs().sum().clamp(min=1e-12))

    def assign(self, weights: Weights, threshold: float) -> None:
        """Set heads and threshold. The scores get the size of an untrained gate's."""
        self.heads.data.copy_(weights["heads"] * STEEPNESS)
        self.bias.data.fill_(threshold * STEEPNESS / self._spread)

    def _logits(self, query: Tensor, earlier: Tensor) -> Tensor:
        return (query * earlier).sum(-1) * self._scale


def _quantile(scores: Tensor, share: float) -> Tensor:
    """Return a quantile. torch.quantile is limited to 16 million elements."""
    flat = scores.flatten()
    return flat.kthvalue(max(1, round(share * len(flat)))).values


def _change(outputs: Tensor) -> Tensor:
    """Return log ||y - y one frame earlier||, [N, n - 1, F], of y [N, n, F, H], at least a thousandth of the mean."""
    change = outputs.diff(dim=1).norm(dim=-1)
    return change.clamp(min=1e-3 * float(change.mean()) + 1e-12).log()


def _regression(inputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the least-squares weights [k] of inputs [..., k] for `wanted` [...], with a constant and a small ridge."""
    x, y = inputs.flatten(0, -2).double(), wanted.flatten().double()
    x, y = x - x.mean(0), y - y.mean()
    moments = x.T @ x / len(x)
    # Heads may be nearly dependent; the ridge keeps the system solvable.
    ridge = 1e-3 * moments.diagonal().mean().clamp(min=1e-12) * torch.eye(len(moments), dtype=x.dtype)
    return torch.linalg.solve(moments + ridge, x.T @ y / len(x)).float()
