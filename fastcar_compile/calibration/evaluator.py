"""Teacher-forced likelihood under given thresholds, layer by layer instead of token by token.

A decision at token t reads inputs of its own layer at tokens t and t - F only. Attention reads keys and values of its
own layer at earlier tokens only. So one layer is computed for all tokens before the next one starts. A chunk is at most
one frame, so no cache slot occurs twice in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from fastcar_compile.calibration.layers import Attend, Stages
from fastcar_compile.errors import InputError
from fastcar_compile.gates import Comparison, Gate, GateValues
from fastcar_compile.ir.program import DecoderProgram
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
class Measurement:
    """A teacher-forced result.

    Attributes:
        nll: nats per token that counts, from the second frame on.
        ratios: for each layer, the share of the forwards t >= F that replayed.
        scores: for each layer, the scores of those forwards, float32 [n].
    """

    nll: float
    ratios: tuple[float, ...]
    scores: tuple[Tensor, ...] = field(repr=False)

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


Chunks = list[dict[fx.Node, Tensor]]
"""The values of one group that later stages read, by chunk."""


@dataclass
class _Stage:
    """A computed stage: by group and chunk the values that later stages read; replayed: bool [N, t]."""

    threshold: float | None
    values: list[Chunks]
    ratio: float
    scores: Tensor
    replayed: Tensor


@dataclass(frozen=True)
class _Prompt:
    """A stage on the prompt of one group, which never replays: the layer's caches afterwards, and its chunks."""

    state: dict[str, Tensor]
    kept: Chunks


class Evaluator:
    """Measures threshold vectors on fixed videos. Stages before the first changed layer are kept, and all prompts.

    Args:
        program: with a prefill graph of at most tokens_per_frame tokens. videos: int64 [N, T], prompt included.
        rules: gates and chain limits. With couple_cfg the second half of the videos are the guidance partners of the
            first half, in the same order. prompt: tokens before decoding starts. attend: replaces attention to all
            earlier positions; takes the arguments of `fastcar::attention`. counted: ids first .. end - 1 of the tokens
            that the decoder predicts; others, such as a world model's actions, are given and count in no mean. Their
            forwards replay like any. None: all count.

    Raises:
        InputError: a decoder without head, no usable prefill graph, or videos that do not fit it.
    """

    def __init__(
        self,
        program: DecoderProgram,
        videos: np.ndarray,
        rules: Rules,
        prompt: int = 1,
        attend: Attend | None = None,
        counted: tuple[int, int] | None = None,
    ) -> None:
        self._config, self._rules, self._prompt, self._counted = program.config, rules, prompt, counted
        self._check(program, videos)
        if attend is not None and program.config.ring is not None:
            what = "this decoder was compiled with sparse attention, for which no other attention can stand in"
            raise InputError(what, hint="evaluate it as it is, or a decoder compiled without sparse attention")
        assert program.prefill is not None
        self._stages = Stages(program.prefill, program.prefill_outputs, attend)
        self._placeholders = {str(n.target): n for n in program.prefill.graph.nodes if n.op == "placeholder"}
        self._state = [s for s in program.state if s.name in self._placeholders]
        self._rows, self._valid = _groups(program.config.batch_size, len(videos), rules.couple_cfg)
        self._videos, self._length = torch.from_numpy(videos), videos.shape[1] - 1
        self._done: list[_Stage] = []
        self._prompts: dict[tuple[int, int], _Prompt] = {}

    def _check(self, program: DecoderProgram, videos: np.ndarray) -> None:
        config = program.config
        if config.takes_embeddings or config.vocab_size is None:
            raise InputError("a headless decoder has no likelihood to calibrate on", hint="calibrate it with its head")
        if config.context is not None:
            what = "the decoder has cross-attention, and calibration reads videos without their contexts"
            raise InputError(what, hint="choose thresholds by hand: session.set_threshold(…)")
        if program.prefill is None or config.prefill_chunk > config.tokens_per_frame:
            frame = config.tokens_per_frame
            what = f"calibration runs the prefill graph in chunks of at most one frame ({frame} tokens)"
            raise InputError(what, hint=f"compile with prefill_chunk <= {frame}")
        if videos.ndim != 2 or videos.dtype != np.int64 or not len(videos):
            raise InputError(f"the videos are {videos.dtype} {list(videos.shape)}, expected int64 [N, T]")
        if self._rules.couple_cfg and (len(videos) % 2 or config.batch_size % 2):
            what = f"couple_cfg pairs video b with video b + N / 2, but there are {len(videos)} videos"
            what += f" in batches of {config.batch_size}"
            hint = "give the conditional videos, then the unconditional ones, and an even batch_size"
            raise InputError(what, hint=hint)
        least, most = self._prompt + config.tokens_per_frame + 2, config.max_seq_len + 1
        if not least <= videos.shape[1] <= most:
            hint = "give at least two frames, and no more tokens than were compiled for"
            raise InputError(f"videos of {videos.shape[1]} tokens; from {least} to {most} can be used", hint=hint)
        if not counts(torch.from_numpy(videos[:, self._prompt + config.tokens_per_frame :]), self._counted).any():
            hint = "give the ids of the tokens that the decoder predicts"
            raise InputError(f"no token after the first frame has an id in {self._counted}", hint=hint)

    def measure(self, thresholds: Sequence[float | None]) -> Measurement:
        """Return the NLL, ratios and scores under one threshold per layer; None never replays."""
        with torch.inference_mode():
            self._run(thresholds)
            nll = self._likelihood()
        return Measurement(nll, tuple(s.ratio for s in self._done), tuple(s.scores for s in self._done))

    def details(self, thresholds: Sequence[float | None]) -> Details:
        """Return losses, predictions and decisions by token, under one threshold per layer."""
        with torch.inference_mode():
            self._run(thresholds)
            parts = [[(_losses(*pair), self._best(pair[0])) for pair in group] for group in self._predictions(0)]
        losses, predicted = (torch.cat([torch.cat([p[i] for p in group], 1) for group in parts]) for i in (0, 1))
        rows, valid = (np.concatenate(parts) for parts in (self._rows, self._valid))
        order = torch.from_numpy(rows[valid]).argsort()
        counted = counts(self._videos[:, self._prompt :], self._counted)
        return Details(losses[order], predicted[order], counted, torch.stack([s.replayed[order] for s in self._done]))

    def _best(self, logits: Tensor) -> Tensor:
        """Return the most likely token that counts, int64 [rows, n], of logits [rows, n, V]."""
        first, end = self._counted or (0, logits.shape[-1])
        return logits[..., first:end].argmax(-1) + first

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self._stages.layers)

    def set_gate(self, layer: int, gate: Gate) -> None:
        """Replace the gate of one layer. This layer and later ones will be computed again."""
        gates = self._rules.gates
        self._rules = replace(self._rules, gates=(*gates[:layer], gate, *gates[layer + 1 :]))
        del self._done[layer:]

    def scores(self, layer: int) -> Tensor:
        """Return the scores of the forwards t >= F, float32 [n], with this layer and the earlier ones closed."""
        with torch.inference_mode():
            self._run([None] * (layer + 1))
        return self._done[layer].scores

    def _run(self, thresholds: Sequence[float | None]) -> None:
        """Compute all layers from the first changed threshold on."""
        keep = 0
        while keep < min(len(self._done), len(thresholds)) and self._done[keep].threshold == thresholds[keep]:
            keep += 1
        del self._done[keep:]
        for layer in range(keep, len(thresholds)):
            self._done.append(self._run_layer(layer, thresholds[layer]))

    def _starts(self) -> list[int]:
        """Return the first token of each chunk: chunks of the prompt, then chunks of the decoded tokens."""
        chunk = self._config.prefill_chunk
        return [*range(0, self._prompt, chunk), *range(self._prompt, self._length, chunk)]

    def _run_layer(self, layer: int, threshold: float | None) -> _Stage:
        values, scores, replayed = [], [], []
        for group in range(len(self._rows)):
            if (layer, group) not in self._prompts:
                self._prompts[layer, group] = self._run_prompt(layer, group)
            prompt = self._prompts[layer, group]
            replay = _LayerReplay(self, layer, threshold)
            values.append(prompt.kept + self._run_chunks(layer, group, dict(prompt.state), replay))
            valid = torch.tensor(self._valid[group])
            scores += [s[:, valid].flatten() for s in replay.scores]
            replayed.append(torch.cat(replay.replayed)[:, valid].T)
        decisions = torch.cat(replayed)
        ratio = float(decisions[:, self._config.tokens_per_frame :].double().mean())
        return _Stage(threshold, values, ratio, torch.cat(scores), decisions)

    def _run_prompt(self, layer: int, group: int) -> _Prompt:
        state = {s.name: s.zeros() for s in self._state if s.layer == layer}
        return _Prompt(state, self._run_chunks(layer, group, state, None))

    def _run_chunks(self, layer: int, group: int, state: dict[str, Tensor], replay: _LayerReplay | None) -> Chunks:
        """Run a stage on the prompt, or with `replay` on what is decoded. `state` becomes that after it."""
        kept: Chunks = []
        for number, start in enumerate(self._starts()):
            if (start < self._prompt) != (replay is None):
                continue
            known = self._known(group, number, start, layer) | {self._placeholders[n]: t for n, t in state.items()}
            if replay is not None:
                replay.start = start
            found = self._stages.run(layer, known, replay)
            state |= {n: found[self._stages.results[n]] for n in state}
            kept.append({n: found[n] for n in self._stages.crossing[layer]})
        return kept

    def _known(self, group: int, number: int, start: int, layer: int) -> dict[fx.Node, Any]:
        chunk = self._config.prefill_chunk
        tokens = self._videos[self._rows[group], start : min(start + chunk, self._end(start))]
        tokens = torch.nn.functional.pad(tokens, (0, chunk - tokens.shape[1]))
        inputs = {"tokens": tokens, "position": torch.tensor([start])}
        known: dict[fx.Node, Any] = {self._placeholders[n]: t for n, t in inputs.items() if n in self._placeholders}
        for stage in self._done[:layer]:
            known |= stage.values[group][number]
        return known

    def _end(self, start: int) -> int:
        """Return the end of the part (prompt or decoded tokens) that a chunk belongs to."""
        return self._prompt if start < self._prompt else self._length

    def _likelihood(self) -> float:
        """Return the mean NLL over every frame but the first; infinity where it is not finite."""
        total, count = 0.0, 0
        for group in self._predictions(self._config.tokens_per_frame):
            for logits, targets in group:
                chosen = counts(targets, self._counted)
                total += float(_losses(logits, targets)[chosen].sum())
                count += int(chosen.sum())
        return total / count if math.isfinite(total) else math.inf

    def _predictions(self, skip: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield for each group the logits [rows, n, V] and targets [rows, n] of its chunks, without `skip` targets."""
        node = self._stages.results["logits"]
        for group, rows in enumerate(self._rows):
            valid, parts = torch.tensor(self._valid[group]), []
            for number, start in enumerate(self._starts()):
                first = max(start, self._prompt - 1 + skip)
                end = min(start + self._config.prefill_chunk, self._end(start))
                if first < end:
                    known = self._known(group, number, start, len(self._stages.layers))
                    logits = self._stages.run(len(self._stages.layers), known, None)[node]
                    targets = self._videos[rows, first + 1 : end + 1][valid]
                    parts.append((logits[valid, first - start : end - start], targets))
            yield parts


def counts(tokens: Tensor, counted: tuple[int, int] | None) -> Tensor:
    """Return which tokens count in a mean, bool of their shape."""
    if counted is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    first, end = counted
    return (tokens >= first) & (tokens < end)


def _groups(rows: int, count: int, coupled: bool) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the videos of each batch, and which rows are real: the last batch is filled up with a copy.

    With `coupled`, rows b and b + rows / 2 are videos v and v + count / 2.
    """
    parts = 2 if coupled else 1
    own, videos = rows // parts, count // parts
    starts = range(0, videos, own)
    taken = [[p * videos + min(g + b, videos - 1) for p in range(parts) for b in range(own)] for g in starts]
    return taken, [[g + b < videos for _ in range(parts) for b in range(own)] for g in starts]


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses in nats, float32 [rows, n], of logits [rows, n, V] and targets [rows, n]."""
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


class _LayerReplay:
    """The replay rule of one layer over chunks. It keeps a session's caches and writes many slots at a time."""

    def __init__(self, owner: Evaluator, layer: int, threshold: float | None) -> None:
        config = owner._config
        self.config, self.rules, self.layer = config, owner._rules, layer
        nodes = owner._stages.layers[layer]
        self.gate, self.scale, self.ring = owner._rules.gates[layer], nodes.scale, ring_of(nodes.key_cache)
        self.threshold = self.gate.comparison.never if threshold is None else threshold
        frame, rows, width = config.tokens_per_frame, config.batch_size, config.hidden_size
        self.outputs, self.inputs = torch.zeros(frame, rows, width), torch.zeros(frame, rows, width)
        self.chain = torch.zeros(frame, rows, dtype=torch.int32)
        self.prompt, self.length, self.start = owner._prompt, owner._length, 0
        self.scores: list[Tensor] = []
        self.replayed: list[Tensor] = []

    def __call__(self, query: Tensor, key_cache: Tensor, x: Tensor, output: Tensor) -> Tensor:
        """Return the value for the residual add: the MLP's output, or the cached one where the row replays."""
        rows, frame = self.config.batch_size, self.config.tokens_per_frame
        steps = torch.arange(self.start, min(self.start + self.config.prefill_chunk, self.length)) - self.prompt
        slots, count = steps % frame, len(steps)
        now = x.reshape(rows, -1, x.shape[-1])[:, :count].transpose(0, 1)
        fresh = output.reshape(rows, -1, output.shape[-1])[:, :count].transpose(0, 1)
        score = self._score(query[:, :, :count], key_cache, steps, now, self.inputs[slots]).reshape(count, rows)
        chain = self.chain[slots]
        tau = torch.tensor(self.threshold, dtype=torch.float32)
        replay = decide(score, tau, steps[:, None], chain, self._rule())
        y = torch.where(replay[..., None], self.outputs[slots], fresh)
        self.outputs[slots] = y
        self.inputs[slots] = torch.where(replay[..., None], self.inputs[slots], now)
        self.chain[slots] = torch.where(replay, chain + 1, 0)
        able = steps >= frame
        self.scores.append(score[able])
        self.replayed.append(replay)
        result = output.clone()
        result.view(rows, -1, output.shape[-1])[:, :count] = y.transpose(0, 1)
        return result

    def _rule(self) -> ReplayRule:
        rules, at_most = self.rules, self.gate.comparison is Comparison.AT_MOST
        longest = -1 if rules.max_chain is None else rules.max_chain
        return ReplayRule(self.config.tokens_per_frame, longest, rules.couple_cfg, rules.refresh_every or 0, at_most)

    def _score(self, query: Tensor, key_cache: Tensor, steps: Tensor, now: Tensor, cached: Tensor) -> Tensor:
        """Return the gate's scores [tokens * B]: the tokens of a chunk become rows of the gate's own operator."""
        count, rows = now.shape[:2]
        earlier = (steps + self.prompt - self.config.tokens_per_frame).clamp(min=0)
        ring = self.ring
        rows_of = earlier if ring is None else row_of(earlier, ring.sinks, ring.rows)
        keys = key_cache[:, :, rows_of].permute(2, 0, 1, 3).flatten(0, 1)[:, :, None]
        values = GateValues(
            query=query.permute(2, 0, 1, 3).flatten(0, 1)[:, :, None],
            key_cache=keys,
            position=torch.zeros(1, dtype=torch.int64),
            step=steps,
            x=now.reshape(count * rows, -1),
            cached=cached.reshape(count * rows, -1),
            stride=self.config.tokens_per_frame,
            scale=self.scale,
            layer=self.layer,
            rows=rows,
            params=self.gate.params(),
        )
        return self.gate.score(lambda op, *arguments: op(*arguments), values)
