"""One batch of videos under given thresholds, layer by layer instead of token by token.

A decision at token t reads inputs of its own layer at tokens t and t - F only. Attention reads keys and values of its
own layer at earlier tokens only. So one layer is computed for all tokens before the next one starts. A chunk is at most
one frame, so no cache slot occurs twice in it.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, fx

from fastcar_compile.gates.base import Rotary
from fastcar_compile.ir.layers import ring_of
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_drafts import drafts_of
from fastcar_compile.tune.rule import Attend, Fresh, LayerRule, Rules, Stages, counts, token_losses

T = TypeVar("T")
Thresholds = tuple[float | None, ...]
"""Thresholds of the first layers: a stage depends on its own threshold and on those of earlier layers."""


class KeptSlice(Generic[T]):
    """Values by key. The latest value stays, whatever its size.

    Args:
        limit: most bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._values: OrderedDict[Thresholds, tuple[T, int]] = OrderedDict()

    def get(self, key: Thresholds) -> T | None:
        """Return the value of a key, which is then the latest; None: there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: Thresholds, value: T, size: int) -> None:
        """Keep a value of this size. Those that were not used for longest make room."""
        self._values[key] = value, size
        self._values.move_to_end(key)
        while len(self._values) > 1 and sum(size for _, size in self._values.values()) > self.limit:
            self._values.popitem(last=False)


KEPT_BYTES = 1 << 29
"""Most bytes of kept stages of all slices, and of kept values before decisions."""

Chunks = list[dict[fx.Node, Tensor]]
"""The values that later stages read, by chunk."""


@dataclass(frozen=True)
class Sums:
    """What a slice of n videos adds to a measurement.

    Attributes:
        loss: nats, summed over the tokens from the second frame on that count. count: of these tokens.
        replays: int64 [L, n], how many of the forwards t >= F replayed. forwards: of one layer and video, t >= F.
        scores: float32 of those forwards, one tensor per layer; empty unless they were asked for.
    """

    loss: float
    count: int
    replays: np.ndarray
    forwards: int
    scores: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Stage:
    """A computed stage: by chunk the values that later stages read; scores [t, B] of t >= F; replayed bool [t, B]."""

    values: Chunks
    scores: Tensor
    replayed: Tensor

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        tensors = [value for chunk in self.values for value in chunk.values()]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


@dataclass(frozen=True)
class _Opening:
    """A stage on the prompt and first frame, which never replay.

    Attributes:
        state: the layer's caches afterwards. rule: the layer's rule afterwards. kept: the chunks.
    """

    state: dict[str, Tensor]
    rule: LayerRule
    kept: Chunks


class Reading:
    """How every slice of some videos is read.

    Args:
        program, rules, prompt, attend, counted: as `Evaluator` takes them. length: input tokens of a video, prompt
            included.
    """

    def __init__(
        self,
        program: DecoderProgram,
        rules: Rules,
        prompt: int,
        attend: Attend | None,
        counted: tuple[int, int] | None,
        length: int,
    ) -> None:
        assert program.prefill is not None
        self.config, self.rules, self.prompt, self.counted, self.length = program.config, rules, prompt, counted, length
        # What is rotated where a gate compares the query with a key is alike in all layers.
        rotary: Rotary = "key" if any(gate.rotary == "key" for gate in rules.gates) else "both"
        self.stages = Stages(program.prefill, program.prefill_outputs, attend, in_place=True, rotary=rotary)
        self.drafts = drafts_of(program, rules.draft) if rules.draft else [None] * program.config.num_layers
        self.state = [s for s in program.state if s.name in self.stages.placeholders]
        # The first token of each chunk: chunks of the prompt, then chunks of the decoded tokens.
        chunk = program.config.prefill_chunk
        self.starts = [*range(0, prompt, chunk), *range(prompt, length, chunk)]
        # The prompt and the chunks that end within the first frame never replay.
        end = prompt + program.config.tokens_per_frame
        self.opening_chunks = sum(self.end(start) <= end for start in self.starts)

    def end(self, start: int) -> int:
        """Return the end of the chunk that starts here: no chunk has tokens of the prompt and decoded tokens."""
        return min(start + self.config.prefill_chunk, self.prompt if start < self.prompt else self.length)


class Slice:
    """A batch of videos, measured by one thread at a time.

    What several threshold vectors share is computed once, as far as the limit holds it: prompts and first frames, the
    layers before the first change, and the first changed layer up to its decisions.

    Args:
        videos: int64 [B, T]. valid: of each row, whether it is a video of its own and no copy that fills the batch up.
        limit: most bytes of kept stages, and of kept values before decisions.
    """

    def __init__(self, reading: Reading, videos: Tensor, valid: Sequence[bool], limit: int) -> None:
        self._reading, self._videos, self._valid = reading, videos, torch.tensor(valid)
        self._config, self._stages = reading.config, reading.stages
        self._done: list[_Stage] = []
        self._stage_store: KeptSlice[_Stage] = KeptSlice(limit)
        self._fresh_store: KeptSlice[list[tuple[int, Fresh]]] = KeptSlice(limit)
        self._openings: dict[int, _Opening] = {}

    @torch.inference_mode()  # it holds for one thread
    def sums(self, thresholds: Thresholds, scores: bool) -> Sums:
        """Return what the slice adds under one threshold per layer; None never replays."""
        self._run(thresholds)
        frame, loss, count = self._config.tokens_per_frame, 0.0, 0
        for logits, targets in self._predictions(frame):
            chosen = counts(targets, self._reading.counted)
            loss += float(token_losses(logits, targets)[chosen].sum())
            count += int(chosen.sum())
        later = torch.stack([stage.replayed[frame:, self._valid] for stage in self._done])
        found = tuple(s.scores[:, self._valid].flatten() for s in self._done) if scores else ()
        return Sums(loss, count, later.sum(1).numpy(), later.shape[1], found)

    @torch.inference_mode()
    def tokens(self, thresholds: Thresholds) -> tuple[Tensor, Tensor, Tensor]:
        """Return losses float32 [n, T - P], predictions int64 [n, T - P] and decisions bool [L, n, t] of n videos."""
        self._run(thresholds)
        parts = [(token_losses(*pair), self._best(pair[0])) for pair in self._predictions(0)]
        losses, predicted = (torch.cat(own, 1) for own in zip(*parts, strict=True))
        return losses, predicted, torch.stack([stage.replayed[:, self._valid].T for stage in self._done])

    def _best(self, logits: Tensor) -> Tensor:
        """Return the most likely token that counts, int64 [rows, n], of logits [rows, n, V]."""
        first, end = self._reading.counted or (0, logits.shape[-1])
        return logits[..., first:end].argmax(-1) + first

    def _run(self, thresholds: Thresholds) -> None:
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
        if layer not in self._openings:
            self._openings[layer] = self._open(layer)
        opening = self._openings[layer]
        fresh = self._fresh_store.get(earlier)
        if fresh is None:
            fresh = self._run_body(layer, opening)
            size = sum(part.nbytes for _, part in fresh)
            if size <= self._fresh_store.limit:
                self._fresh_store.put(earlier, fresh, size)
        rule = opening.rule.continued(thresholds[-1])
        decoded = [self._finish(layer, number, part, rule) for number, part in fresh]
        return _Stage(opening.kept + decoded, torch.cat(rule.scores), torch.cat(rule.replayed))

    def _finish(self, layer: int, number: int, fresh: Fresh, rule: LayerRule) -> dict[fx.Node, Tensor]:
        """Return what later stages read of a chunk, after the layer's decisions."""
        output = {self._stages.layers[layer].output: rule(fresh)}
        found = self._stages.tail(layer, self._known(number, layer) | fresh.values | output)
        return {n: found[n] for n in self._stages.crossing[layer]}

    def _open(self, layer: int) -> _Opening:
        """Run a stage on the prompt and on the chunks of the first frame."""
        reading = self._reading
        state = {s.name: s.zeros() for s in reading.state if s.layer == layer}
        scale = self._stages.layers[layer].scale
        rule = LayerRule(self._config, reading.rules, layer, scale, None, reading.drafts[layer])
        kept: Chunks = []
        for number, start in enumerate(reading.starts[: reading.opening_chunks]):
            if start < reading.prompt:
                known = self._known(number, layer) | self._caches(state)
                found = self._stages.run(layer, known, None)
                state |= {n: found[self._stages.results[n]] for n in state}
                kept.append({n: found[n] for n in self._stages.crossing[layer]})
            else:
                fresh = self._run_chunk(layer, number, state)
                kept.append(self._finish(layer, number, fresh, rule))
        return _Opening(state, rule, kept)

    def _run_body(self, layer: int, opening: _Opening) -> list[tuple[int, Fresh]]:
        """Run a stage on what may replay, up to its decisions. Return the number of each chunk and its values.

        A plain cache is written in place: rows that a chunk reads are the opening's, or were written on this run.
        """
        state = opening.state
        # A layer's cache may itself be among the values that are kept.
        caches = {self._stages.results[s.name] for s in self._reading.state if s.layer == layer}
        joined = not caches.isdisjoint(self._stages.joined[layer])
        if joined or ring_of(self._stages.layers[layer].key_cache) is not None:
            state = {name: cache.clone() for name, cache in state.items()}
        numbers = range(self._reading.opening_chunks, len(self._reading.starts))
        return [(number, self._run_chunk(layer, number, state)) for number in numbers]

    def _run_chunk(self, layer: int, number: int, state: dict[str, Tensor]) -> Fresh:
        """Run a stage on one chunk up to its decisions, and write the caches."""
        start = self._reading.starts[number]
        found = self._stages.body(layer, self._known(number, layer) | self._caches(state))
        state |= {n: found[self._stages.results[n]] for n in state}
        positions = torch.arange(start, self._reading.end(start))
        # Forward 0 decodes the first token behind the prompt.
        steps, earlier = positions - self._reading.prompt, positions - self._config.tokens_per_frame
        return Fresh.of(self._stages, layer, found, steps, earlier)

    def _caches(self, state: dict[str, Tensor]) -> dict[fx.Node, Tensor]:
        return {self._stages.placeholders[name]: cache for name, cache in state.items()}

    def _known(self, number: int, layer: int) -> dict[fx.Node, Any]:
        """Return what a chunk is given: its tokens and position, and the values that earlier stages keep of it."""
        start = self._reading.starts[number]
        tokens = self._videos[:, start : self._reading.end(start)]
        tokens = torch.nn.functional.pad(tokens, (0, self._config.prefill_chunk - tokens.shape[1]))
        inputs = {"tokens": tokens, "position": torch.tensor([start])}
        places = self._stages.placeholders
        known: dict[fx.Node, Any] = {places[name]: value for name, value in inputs.items() if name in places}
        for stage in self._done[:layer]:
            known |= stage.values[number]
        return known

    def _predictions(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits [rows, n, V] and targets [rows, n] of the chunks, without `skip` targets."""
        stages, valid = self._stages, self._valid
        for number, start in enumerate(self._reading.starts):
            # Logits at position p predict token p + 1: the first decoded token is predicted by the prompt's last one.
            first = max(start, self._reading.prompt - 1 + skip)
            end = self._reading.end(start)
            if first < end:
                logits = stages.run(len(stages.layers), self._known(number, len(stages.layers)), None)
                targets = self._videos[:, first + 1 : end + 1][valid]
                yield logits[stages.results["logits"]][valid, first - start : end - start], targets


def slices_of(rows: int, count: int, coupled: bool) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the videos of each slice, and which rows are real: the last slice is filled up with a copy.

    With `coupled`, rows b and b + rows / 2 are videos v and v + count / 2.
    """
    parts = 2 if coupled else 1
    own, videos = rows // parts, count // parts
    starts = range(0, videos, own)
    taken = [[p * videos + min(g + b, videos - 1) for p in range(parts) for b in range(own)] for g in starts]
    return taken, [[g + b < videos for _ in range(parts) for b in range(own)] for g in starts]
