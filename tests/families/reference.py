"""The original model in eager attention and without a cache, with replay by definition.

It shares nothing with the compiler. One forward reads the whole sequence: at the MLP of a layer the inputs of all
positions are known, and queries and keys too. So hooks decide every decode step of that layer, in order, and replace
what the MLP gave. Scores are computed in float64 from their definition in docs/reference/gates.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from .case import Case

MARGIN = 2e-4
"""The least distance of a score from the threshold: rounding decides nothing."""

WATCHED = "fastcar_watched"
"""Name in Transformers of a model's own eager attention, whose calls are kept."""


@dataclass(frozen=True)
class Attended:
    """What one attention call read: query [B, Hq, T, D] and key [B, Hkv, T, D] after RoPE and norms, and its scale."""

    query: Tensor
    key: Tensor
    scale: float


@dataclass
class Run:
    """A whole sequence: logits [B, T, V] of all positions; per layer decisions bool [T_decode, B] and the threshold."""

    logits: Tensor
    decisions: list[Tensor] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)


def dense(case: Case, inputs: Tensor) -> Run:
    """Return the model's own logits."""
    with _attention_calls(case.kv):
        return Run(_forward(case, case.build(), inputs))


def replayed(case: Case, inputs: Tensor) -> Run:
    """Return logits and decisions under replay, with thresholds that replay about half of the MLPs."""
    model = case.build()
    run = Run(torch.empty(0))
    with _attention_calls(case.kv) as calls:
        for layer, (first, last) in enumerate(_mlps(model, case.mlp)):
            _Layer(case, layer, calls, run).watch(first, last)
        run.logits = _forward(case, model, inputs)
    return run


def _forward(case: Case, model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        if not isinstance(model, PreTrainedModel):
            return model(inputs, torch.arange(inputs.shape[1]), *(case.context() if case.context else ()))
        model.float().set_attn_implementation(WATCHED if _has_eager(model) else "sdpa")
        if inputs.is_floating_point():
            return model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return model(input_ids=inputs, use_cache=False).logits


def _has_eager(model: PreTrainedModel) -> bool:
    """Falcon's own eager attention cannot be watched; its sdpa call can, and is computed step by step there too."""
    return "Falcon" not in type(model).__name__


def _mlps(model: nn.Module, pattern: str | tuple[str, str]) -> list[tuple[nn.Module, nn.Module]]:
    """The first and last module of every layer's MLP."""
    patterns = (pattern, pattern) if isinstance(pattern, str) else pattern
    found: dict[int, list[nn.Module]] = {}
    for one in patterns:
        for name, module in model.named_modules():
            if match := re.fullmatch(one, name):
                found.setdefault(int(match.group(1)), []).append(module)
    assert found, f"no module matches {pattern}"
    return [cast("tuple[nn.Module, nn.Module]", tuple(found[layer])) for layer in sorted(found)]


@dataclass
class _Layer:
    """Replaces the MLP output of one layer by what replay gives."""

    case: Case
    layer: int
    calls: list[Attended]
    run: Run
    x: Tensor | None = None

    def watch(self, first: nn.Module, last: nn.Module) -> None:
        first.register_forward_pre_hook(self._keep)
        last.register_forward_hook(self._replace)

    def _keep(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.x = inputs[0]

    def _replace(self, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        assert self.x is not None
        calls = [
            call
            for call in self.calls
            if call.query.shape[2] == call.key.shape[2] or call.key.shape[2] == self.case.length
        ]
        assert len(calls) == self.layer + 1, "the layer's attention runs before its MLP"
        shape = calls[0].query.shape[0], -1, output.shape[-1]
        x, y = self.x.reshape(shape[0], -1, self.x.shape[-1]), output.reshape(shape)
        found = self._decide(x, y, calls[self.layer])
        self.run.decisions.append(found.decisions)
        self.run.thresholds.append(found.threshold)
        return torch.cat([y[:, : self.case.prompt], found.outputs], 1).reshape(output.shape)

    def _decide(self, x: Tensor, y: Tensor, attended: Attended) -> _Found:
        x, y = x[:, self.case.prompt :], y[:, self.case.prompt :]
        tas = _tas(attended, self.case.prompt, self.case.frame)
        every = [_simulate(self.case, _Inputs(x, y, tas), threshold) for threshold in _candidates(self.case.gate, tas)]
        fair = [one for one in every if 0.25 < one.decisions[self.case.frame :].double().mean() < 0.75]
        best = max(fair, key=lambda one: one.margin)
        assert best.margin > MARGIN, (
            f"layer {self.layer}: a score is {best.margin:.1e} from the threshold; take another seed"
        )
        return best


@dataclass(frozen=True)
class _Inputs:
    """Of the decode steps of a layer: the MLP's input and output [B, T, H], TAS [B, T]."""

    x: Tensor
    y: Tensor
    tas: Tensor


@dataclass(frozen=True)
class _Found:
    """What replay with one threshold does to a layer; margin: the least distance of a score that counted."""

    threshold: float
    decisions: Tensor
    outputs: Tensor
    margin: float


def _tas(attended: Attended, prompt: int, frame: int) -> Tensor:
    """Mean over query heads of scale * <q[t], k[t - F]>, float64 [B, T]; nan in the first frame."""
    query, key = attended.query.double(), attended.key.double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    earlier = torch.full_like(key, float("nan"))
    earlier[:, :, frame:] = key[:, :, : key.shape[2] - frame]
    scores = attended.scale * (query * earlier[:, :, : query.shape[2]]).sum(-1).mean(1)[:, prompt:]
    scores[:, :frame] = float("nan")
    return scores


def _candidates(gate: str, tas: Tensor) -> list[float]:
    """Thresholds to choose from, as float32 numbers: between two scores, or equally far apart."""
    if gate == "tas":
        ordered = tas[tas.isfinite()].sort().values
        middle = (ordered[1:] + ordered[:-1]) / 2
    else:
        middle = torch.linspace(0.1, 3.0, 60)
    return [float(value) for value in middle.float()]


def _simulate(case: Case, given: _Inputs, threshold: float) -> _Found:
    """The rule of docs/reference/gates.md, one decode step after the other."""
    outputs = given.y.clone()
    cached_x, cached_y = torch.zeros_like(given.x[:, : case.frame]), torch.zeros_like(given.y[:, : case.frame])
    decisions, margin = torch.zeros(given.x.shape[1], given.x.shape[0], dtype=torch.bool), float("inf")
    for t in range(given.x.shape[1]):
        slot = t % case.frame
        x, change = given.x[:, t].double(), (given.x[:, t] - cached_x[:, slot]).double()
        score = given.tas[:, t] if case.gate == "tas" else change.abs().sum(-1) / x.abs().sum(-1)
        if t >= case.frame:
            decisions[t] = score >= threshold if case.gate == "tas" else score <= threshold
            margin = min(margin, float((score - threshold).abs().min()))
        again = decisions[t][:, None]
        outputs[:, t] = torch.where(again, cached_y[:, slot], given.y[:, t])
        cached_x[:, slot] = torch.where(again, cached_x[:, slot], given.x[:, t])
        cached_y[:, slot] = outputs[:, t]
    return _Found(threshold, decisions, outputs, margin)


class _PlainAttention(TorchFunctionMode):
    """Computes scaled_dot_product_attention as product, mask, softmax and product, and keeps what it read."""

    def __init__(self, calls: list[Attended]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        scale = options.get("scale") or query.shape[-1] ** -0.5
        self.calls.append(Attended(query, key, scale))
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        weights = scale * (query @ key.transpose(-1, -2))
        if options.get("is_causal"):
            attn_mask = torch.ones(weights.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            weights = weights.masked_fill(~attn_mask, -float("inf"))
        elif attn_mask is not None:
            weights = weights + attn_mask
        return weights.softmax(-1) @ value


def _cached(rows: Tensor, kv: str) -> Tensor:
    """What a cache gives back of keys or values [.., D], by docs/reference/numerics.md; D is one block of MXINT8."""
    if kv in ("float16", "bfloat16"):
        return rows.to(getattr(torch, kv)).float()
    if kv == "int8":
        assert rows.shape[-1] <= 32
        top = rows.abs().amax(-1, keepdim=True)
        exponent = (top / 127.5).log2().floor() + 1
        return (rows / 2**exponent).round() * 2**exponent
    return rows


@contextmanager
def _attention_calls(kv: str) -> Generator[list[Attended]]:
    """Keep the attention calls of what runs inside, of Transformers' eager functions and of plain modules.

    Args:
        kv: what Transformers' functions read of keys and values: those that a cache of this type holds.
    """
    calls: list[Attended] = []

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        key, value = _cached(key, kv), _cached(value, kv)
        calls.append(Attended(query, key, options.get("scaling") or query.shape[-1] ** -0.5))
        eager = cast("Any", inspect.getmodule(type(module))).eager_attention_forward
        return eager(module, query, key, value, *args, **options)

    AttentionInterface.register(WATCHED, attend)
    AttentionMaskInterface.register(WATCHED, eager_mask)
    with _PlainAttention(calls):
        yield calls
