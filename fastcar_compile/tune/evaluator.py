"""Teacher-forced likelihood under given thresholds, layer by layer instead of token by token.

A decision at token t reads inputs of its own layer at tokens t and t - F only. Attention reads keys and values of its
own layer at earlier tokens only. So one layer is computed for all tokens before the next one starts. A chunk is at most
one frame, so no cache slot occurs twice in it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, fx

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.gates import Gate
from fastcar_compile.gates.base import Rotary
from fastcar_compile.ir.layers import ring_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_drafts import drafts_of, spared_of
from fastcar_compile.support.machine import at_once
from fastcar_compile.tune.rule import (
    Attend,
    Details,
    Fresh,
    LayerRule,
    MaskedAttention,
    Measurement,
    Rules,
    Stages,
    counts,
    token_losses,
)

# A store of a limited size that forgets what was not used for longest.


T = TypeVar("T")
Key = tuple[float | None, ...]


class Kept(Generic[T]):
    """Values by key. The latest value stays, whatever its size.

    Args:
        limit: most bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[Key, tuple[T, int]] = OrderedDict()

    def get(self, key: Key) -> T | None:
        """Return the value of a key, which is then the latest; None: there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Key, value: T, size: int) -> None:
        """Keep a value of this size. Those that were not used for longest make room."""
        self._values[key] = value, size
        self._values.move_to_end(key)
        while len(self._values) > 1 and sum(size for _, size in self._values.values()) > self.limit:
            self._values.popitem(last=False)

    def drop(self, gone: Callable[[Key], bool]) -> None:
        """Forget the values of keys for which `gone` holds."""
        for key in [key for key in self._values if gone(key)]:
            del self._values[key]


R = TypeVar("R")

KEPT_BYTES = 1 << 29
"""Most bytes of kept stages, and of kept values before decisions."""

SMALL = 1 << 26
"""Multiplications of a projection below which threads wait for each other longer than they compute."""

Thresholds = tuple[float | None, ...]
"""Thresholds of the first layers: a stage depends on its own threshold and on those of earlier layers."""

Chunks = list[dict[fx.Node, Tensor]]
"""The values of one group that later stages read, by chunk."""


@dataclass(frozen=True)
class _Stage:
    """A computed stage: by group and chunk the values that later stages read; replayed: bool [N, t]."""

    values: list[Chunks]
    scores: Tensor
    replayed: Tensor
    frame: int

    @property
    def ratio(self) -> float:
        """Share of the forwards t >= F that replayed."""
        return float(self.replayed[:, self.frame :].double().mean())

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        tensors = [value for group in self.values for chunk in group for value in chunk.values()]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


@dataclass(frozen=True)
class _Opening:
    """A stage on the prompt and first frame of one group, which never replay.

    Attributes:
        state: the layer's caches afterwards. rule: the layer's rule afterwards. kept: the chunks.
    """

    state: dict[str, Tensor]
    rule: LayerRule
    kept: Chunks


class Evaluator:
    """Measures threshold vectors on fixed videos.

    What several vectors share is computed once, as far as KEPT_BYTES hold it: prompts and first frames, the layers
    before the first change, and the first changed layer up to its decisions.

    Args:
        program: with a prefill graph of at most tokens_per_frame tokens. videos: int64 [N, T], prompt included.
        rules: gates and chain limits. With couple_cfg the second half of the videos are the guidance partners of the
            first half, in the same order. prompt: tokens before decoding starts. attend: replaces attention to all
            earlier positions; takes the arguments of `fastcar::attention`. counted: ids first .. end - 1 of the tokens
            that the decoder predicts; others, such as a world model's actions, are given and count in no mean. Their
            forwards replay like any. None: all count.

    Attributes:
        spared: for each layer, the share of its MLP's weights that a replay does not read: all but the draft's.

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
        attention = attend or MaskedAttention()
        self._stages = Stages(program.prefill, program.prefill_outputs, attention, in_place=True, rotary=self.rotary)
        self._drafts = drafts_of(program, rules.draft) if rules.draft else [None] * program.config.num_layers
        self.spared = spared_of(program, rules.draft)
        self._state = [s for s in program.state if s.name in self._stages.placeholders]
        self._rows, self._valid = _groups(program.config.batch_size, len(videos), rules.couple_cfg)
        self._videos, self._length = torch.from_numpy(videos), videos.shape[1] - 1
        # The first token of each chunk: chunks of the prompt, then chunks of the decoded tokens.
        chunk = program.config.prefill_chunk
        self._starts = [*range(0, prompt, chunk), *range(prompt, self._length, chunk)]
        # The prompt and the chunks that end within the first frame never replay.
        end = prompt + program.config.tokens_per_frame
        self._opening_chunks = sum(self._end(start) <= end for start in self._starts)
        self._done: list[_Stage] = []
        self._stage_store: Kept[_Stage] = Kept(KEPT_BYTES)
        self._fresh_store: Kept[list[list[tuple[int, Fresh]]]] = Kept(KEPT_BYTES)
        self._openings: dict[tuple[int, int], _Opening] = {}

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
            what = f"couple_cfg pairs video b with video b + N / 2, but there are {count_text(len(videos), 'video')}"
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
        self._run(thresholds)
        nll = self._likelihood()
        frame = self._config.tokens_per_frame
        videos = torch.stack([s.replayed[self._order(), frame:].double().mean(1) for s in self._done]).mean(0)
        shares = torch.stack(videos.chunk(2)).mean(0) if self._rules.couple_cfg else videos
        ratios, scores = zip(*((s.ratio, s.scores) for s in self._done), strict=True)
        return Measurement(nll, ratios, scores, tuple(shares.tolist()))

    def details(self, thresholds: Sequence[float | None]) -> Details:
        """Return losses, predictions and decisions by token, under one threshold per layer."""

        def run(group: int) -> list[tuple[Tensor, Tensor]]:
            return [(token_losses(*pair), self._best(pair[0])) for pair in self._predictions(group, 0)]

        self._run(thresholds)
        parts = self._each(run)
        losses, predicted = (torch.cat([torch.cat([p[i] for p in group], 1) for group in parts]) for i in (0, 1))
        order = self._order()
        counted = counts(self._videos[:, self._prompt :], self._counted)
        return Details(losses[order], predicted[order], counted, torch.stack([s.replayed[order] for s in self._done]))

    def _order(self) -> Tensor:
        """Return where each video is in the order of the groups, int64 [N]."""
        rows, valid = (np.concatenate(parts) for parts in (self._rows, self._valid))
        return torch.from_numpy(rows[valid]).argsort()

    def _best(self, logits: Tensor) -> Tensor:
        """Return the most likely token that counts, int64 [rows, n], of logits [rows, n, V]."""
        first, end = self._counted or (0, logits.shape[-1])
        return logits[..., first:end].argmax(-1) + first

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self._stages.layers)

    @property
    def rotary(self) -> Rotary:
        """What is rotated where a gate compares the query with a key: alike in all layers."""
        return "key" if any(gate.rotary == "key" for gate in self._rules.gates) else "both"

    def set_gate(self, layer: int, gate: Gate) -> None:
        """Replace the gate of one layer. Its decisions and later layers will be computed again."""
        gates = self._rules.gates
        self._rules = replace(self._rules, gates=(*gates[:layer], gate, *gates[layer + 1 :]))
        self._done = []
        # A key has a threshold per layer. Longer keys include this layer's decisions, shorter ones do not.
        self._stage_store.drop(lambda key: len(key) > layer)
        # Values before the decisions of this layer have a key without its threshold, so they stay.
        self._fresh_store.drop(lambda key: len(key) > layer)

    def scores(self, layer: int) -> Tensor:
        """Return the scores of the forwards t >= F, float32 [n], with this layer and the earlier ones closed."""
        self._run([None] * (layer + 1))
        return self._done[layer].scores

    def _run(self, thresholds: Sequence[float | None]) -> None:
        """Compute all layers, but for those that are kept."""
        self._done = []
        for layer in range(len(thresholds)):
            key = tuple(thresholds[: layer + 1])
            found = self._stage_store.get(key)
            if found is None:
                found = self._run_layer(key)
                self._stage_store.put(key, found, found.nbytes)
            self._done.append(found)

    def _run_layer(self, thresholds: Thresholds) -> _Stage:
        """Return the last layer's stage under these thresholds; those before it are in `_done`."""
        earlier, layer = thresholds[:-1], len(thresholds) - 1
        # Groups run at the same time, so each has an equal part of the limit.
        kept, limit = self._fresh_store.get(earlier), self._fresh_store.limit // len(self._rows)

        def run(group: int) -> tuple[Chunks, LayerRule, list[tuple[int, Fresh]] | None]:
            if (layer, group) not in self._openings:
                self._openings[layer, group] = self._open(layer, group)
            opening = self._openings[layer, group]
            fresh = self._run_body(layer, group, opening) if kept is None else kept[group]
            rule = opening.rule.continued(self._rules, thresholds[-1])
            decoded = [self._finish(layer, group, number, part, rule) for number, part in fresh]
            small = sum(part.nbytes for _, part in fresh) <= limit
            return opening.kept + decoded, rule, fresh if small else None

        values, rules, bodies = zip(*self._each(run), strict=True)
        fresh = [body for body in bodies if body is not None]
        if kept is None and len(fresh) == len(bodies):
            self._fresh_store.put(earlier, fresh, sum(f.nbytes for body in fresh for _, f in body))
        ruled = [(rule, torch.tensor(rows)) for rule, rows in zip(rules, self._valid, strict=True)]
        scores = [s[:, own].flatten() for rule, own in ruled for s in rule.scores]
        replayed = [torch.cat(rule.replayed)[:, own].T for rule, own in ruled]
        return _Stage(list(values), torch.cat(scores), torch.cat(replayed), self._config.tokens_per_frame)

    def _each(self, run: Callable[[int], R]) -> list[R]:
        """Return `run` of every group, in order. Groups share PyTorch's threads; SMALL operators have one each."""
        threads, groups, config = torch.get_num_threads(), range(len(self._rows)), self._config
        workers = min(threads, len(groups))
        small = config.batch_size * config.prefill_chunk * config.hidden_size**2 < SMALL

        def guarded(group: int) -> R:
            with torch.inference_mode():  # it holds for one thread
                return run(group)

        torch.set_num_threads(1 if small else threads // workers)
        try:
            return at_once(guarded, groups, workers) if workers > 1 else [guarded(group) for group in groups]
        finally:
            torch.set_num_threads(threads)

    def _finish(self, layer: int, group: int, number: int, fresh: Fresh, rule: LayerRule) -> dict[fx.Node, Tensor]:
        """Return what later stages read of a chunk, after the layer's decisions."""
        output = {self._stages.layers[layer].output: rule(fresh)}
        found = self._stages.tail(layer, self._known(group, number, layer) | fresh.values | output)
        return {n: found[n] for n in self._stages.crossing[layer]}

    def _open(self, layer: int, group: int) -> _Opening:
        """Run a stage on the prompt and on the chunks of the first frame of one group."""
        state = {s.name: s.zeros() for s in self._state if s.layer == layer}
        scale = self._stages.layers[layer].scale
        rule = LayerRule(self._config, self._rules, layer, scale, None, self._drafts[layer])
        kept: Chunks = []
        for number, start in enumerate(self._starts[: self._opening_chunks]):
            if start < self._prompt:
                known = self._known(group, number, layer) | self._caches(state)
                found = self._stages.run(layer, known, None)
                state |= {n: found[self._stages.results[n]] for n in state}
                kept.append({n: found[n] for n in self._stages.crossing[layer]})
            else:
                fresh = self._run_chunk(layer, group, number, state)
                kept.append(self._finish(layer, group, number, fresh, rule))
        return _Opening(state, rule, kept)

    def _run_body(self, layer: int, group: int, opening: _Opening) -> list[tuple[int, Fresh]]:
        """Run a stage on what may replay, up to its decisions. Return the number of each chunk and its values.

        A plain cache is written in place: rows that a chunk reads are the opening's, or were written on this run.
        """
        state = opening.state
        # A layer's cache may itself be among the values that are kept.
        caches = {self._stages.results[s.name] for s in self._state if s.layer == layer}
        joined = not caches.isdisjoint(self._stages.joined[layer])
        if joined or ring_of(self._stages.layers[layer].key_cache) is not None:
            state = {name: cache.clone() for name, cache in state.items()}
        numbers = range(self._opening_chunks, len(self._starts))
        return [(number, self._run_chunk(layer, group, number, state)) for number in numbers]

    def _run_chunk(self, layer: int, group: int, number: int, state: dict[str, Tensor]) -> Fresh:
        """Run a stage on one chunk up to its decisions, and write the caches."""
        start = self._starts[number]
        found = self._stages.body(layer, self._known(group, number, layer) | self._caches(state))
        state |= {n: found[self._stages.results[n]] for n in state}
        positions = torch.arange(start, self._end(start))
        # Forward 0 decodes the first token behind the prompt.
        steps, earlier = positions - self._prompt, positions - self._config.tokens_per_frame
        return Fresh.of(self._stages, layer, found, steps, earlier)

    def _caches(self, state: dict[str, Tensor]) -> dict[fx.Node, Tensor]:
        return {self._stages.placeholders[name]: cache for name, cache in state.items()}

    def _known(self, group: int, number: int, layer: int) -> dict[fx.Node, Any]:
        """Return what a chunk is given: its tokens and position, and the values that earlier stages keep of it."""
        start = self._starts[number]
        tokens = self._videos[self._rows[group], start : self._end(start)]
        tokens = torch.nn.functional.pad(tokens, (0, self._config.prefill_chunk - tokens.shape[1]))
        inputs = {"tokens": tokens, "position": torch.tensor([start])}
        places = self._stages.placeholders
        known: dict[fx.Node, Any] = {places[name]: value for name, value in inputs.items() if name in places}
        for stage in self._done[:layer]:
            known |= stage.values[group][number]
        return known

    def _end(self, start: int) -> int:
        """Return the end of the chunk that starts here: no chunk has tokens of the prompt and decoded tokens."""
        return min(start + self._config.prefill_chunk, self._prompt if start < self._prompt else self._length)

    def _likelihood(self) -> float:
        """Return the mean NLL over every frame but the first; infinity where it is not finite."""

        def run(group: int) -> tuple[float, int]:
            total, count = 0.0, 0
            for logits, targets in self._predictions(group, self._config.tokens_per_frame):
                chosen = counts(targets, self._counted)
                total += float(token_losses(logits, targets)[chosen].sum())
                count += int(chosen.sum())
            return total, count

        totals, numbers = zip(*self._each(run), strict=True)
        # Groups differ in how many tokens count, so sums are divided once and no means are averaged.
        nll = sum(totals) / sum(numbers)
        return nll if math.isfinite(nll) else math.inf

    def _predictions(self, group: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits [rows, n, V] and targets [rows, n] of a group's chunks, without `skip` targets."""
        node = self._stages.results["logits"]
        rows, valid = self._rows[group], torch.tensor(self._valid[group])
        for number, start in enumerate(self._starts):
            # Logits at position p predict token p + 1: the first decoded token is predicted by the prompt's last one.
            first = max(start, self._prompt - 1 + skip)
            end = self._end(start)
            if first < end:
                known = self._known(group, number, self.layers)
                logits = self._stages.run(self.layers, known, None)[node]
                targets = self._videos[rows, first + 1 : end + 1][valid]
                yield logits[valid, first - start : end - start], targets


def _groups(rows: int, count: int, coupled: bool) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the videos of each batch, and which rows are real: the last batch is filled up with a copy.

    With `coupled`, rows b and b + rows / 2 are videos v and v + count / 2.
    """
    parts = 2 if coupled else 1
    own, videos = rows // parts, count // parts
    starts = range(0, videos, own)
    taken = [[p * videos + min(g + b, videos - 1) for p in range(parts) for b in range(own)] for g in starts]
    return taken, [[g + b < videos for _ in range(parts) for b in range(own)] for g in starts]
