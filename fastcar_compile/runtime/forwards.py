"""The forwards of a session: prompts are read, tokens are decoded, by one or several a step, and all are counted.

What a caller gives has been checked before it comes here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.config.models import Jacobi
from fastcar_compile.ir.types import INACTIVE, PROMPT, DecoderConfig
from fastcar_compile.runtime.backends.base import Array, Stepper, in_rows
from fastcar_compile.runtime.depth import DepthHead
from fastcar_compile.runtime.progress import Guessed, Progress, rows_right
from fastcar_compile.runtime.sampling import Choose

_EXPLORE = 32
"""Every so many decode steps another width is tried: what steps take and give changes."""
_RATE = 0.1
"""Weight of a new sample: guesses of some ten decode steps count, about a frame."""


class WindowChoice:
    """Chooses the positions of each decode step. No choice changes a token.

    Args:
        most: the largest width: rows of a video, and tokens of a frame.
    """

    def __init__(self, jacobi: Jacobi, most: int) -> None:
        self._fixed = None if isinstance(jacobi.window, str) else min(jacobi.window, most)
        widths = {most, *(1 << n for n in range(most.bit_length()))}
        self._widths = sorted(width for width in widths if width <= most)
        # The widest step comes first: it tells of all rows how often they are right. The first time warms up.
        self._untimed = [width for width in self._widths[::-1] for _ in range(2)]
        self._seconds: dict[int, float] = {}
        self._right: NDArray[np.float64] = np.ones(most)
        self._steps = 0

    def __call__(self, room: int) -> int:
        """Return the positions of the next decode step, at most `room`."""
        if self._fixed is not None:
            return min(self._fixed, room)
        fit = [width for width in self._widths if width <= room]
        if untimed := [width for width in self._untimed if width <= room]:
            return untimed[0]
        best = max(range(len(fit)), key=lambda i: self._right[: fit[i]].sum() / self._seconds[fit[i]])
        if self._steps % _EXPLORE:
            return fit[best]
        return fit[(best + (1 if self._steps // _EXPLORE % 2 else -1)) % len(fit)]

    def add(self, width: int, accepted: int, seconds: float) -> None:
        """Count a decode step; accepted: its first rows that were right, at least one."""
        if self._fixed is not None:
            return
        self._steps += 1
        right = np.arange(width) < accepted
        rate = _RATE if self._seconds else 1.0
        self._right[:width] += rate * (right - self._right[:width])
        if accepted == width:  # of rows that were not there nothing is known; hope has them tried again
            self._right[width:] += rate / 4 * (1 - self._right[width:])
        if width in self._untimed:
            self._untimed.remove(width)
        before = self._seconds.get(width, seconds)
        # What interrupts a step makes it longer, nothing makes it shorter: a shorter time counts at once.
        self._seconds[width] = min(seconds, before + _RATE * (min(seconds, 2 * before) - before))


class Forwards:
    """Forwards on one stepper, and where they stand.

    Args:
        thresholds: float32 [L], of the decode steps to come. record: keep every decision. keep: tokens that can be
            taken back.

    Attributes:
        at: position, replay slots, counts, and what the last tokens overwrote.
    """

    def __init__(
        self,
        stepper: Stepper,
        config: DecoderConfig,
        thresholds: Array,
        record: bool,
        keep: int,
        depth: DepthHead | None,
    ) -> None:
        self.stepper, self.thresholds, self.depth, self.keep = stepper, thresholds, depth, keep
        self._config, self._record = config, record
        self.at = self.begun()
        # What one video showed of the machine and of its guesses is kept for the next.
        self.windows: dict[Jacobi, WindowChoice] = {}
        # The last frame's tokens by their place in it: what Jacobi decoding guesses first.
        self._frame = np.zeros((config.batch_size, config.tokens_per_frame), np.int64)

    def begun(self) -> Progress:
        """Return where a session stands that has just begun."""
        return Progress(self._config, self._record, self.keep)

    def reset(self) -> None:
        """Clear states and counts."""
        self.stepper.reset()
        self.at = self.begun()

    def close(self) -> None:
        """Give back states, libraries, threads and device. Position and counts stay."""
        vars(self).pop("stepper", None)
        self.depth = None

    def fork(self) -> Forwards:
        """Return forwards that go on from here on their own."""
        depth = None if self.depth is None else self.depth.again()
        stepper = self.stepper.fork(self.at.filled(self.stepper.states()))
        other = Forwards(stepper, self._config, self.thresholds.copy(), self._record, self.keep, depth)
        other.at, other._frame = copy.deepcopy(self.at), self._frame.copy()
        return other

    def draw(self, logits: Array, **how: Any) -> Array | None:
        """Return tokens; see Stepper.draw."""
        return self.stepper.draw(logits, **how)

    def read(self, tokens: Array) -> Array:
        """Read known tokens, [B, n] or [B, n, H]; return the logits of the last ones, [B, V]."""
        if self.at.behind.any():
            return self.read_rows(list(tokens))
        begin, length = self.at.position, tokens.shape[1]
        if tokens.ndim == 2:
            self._remember(begin, tokens)
        chunk = self.stepper.prefill_chunk or length
        logits = np.empty(0, np.float32)
        for start in range(0, length, chunk):
            logits = self._read_chunk(tokens[:, start : start + chunk], begin + start, chunk)
        self.at.move(length)
        # The logits are a view of memory that the next forward writes, so the caller gets a copy.
        return np.array(logits)

    def _remember(self, begin: int, tokens: Array) -> None:
        """Keep tokens [B, n] that were read from a position on, as guesses of the next frame."""
        frame, end = self._frame.shape[1], begin + tokens.shape[1]
        self._frame[:, np.arange(max(begin, end - frame), end) % frame] = tokens[:, -frame:]

    def read_rows(self, given: Sequence[Array]) -> Array:
        """Read tokens of each row, [n] or [n, H], at its own position; return the logits of the last ones, [B, V]."""
        begins = self.at.position - self.at.behind if self.at.position else np.zeros(len(given), np.int64)
        found, chunk = list[Array](given), self.stepper.video_chunk
        most = max(map(len, given))
        for video, tokens in enumerate(given) if chunk else ():
            for start in range(0, len(tokens), chunk):
                part = tokens[start : start + chunk]
                padded = np.pad(part, [(0, chunk - len(part))] + [(0, 0)] * (part.ndim - 1))[None]
                logits = self.stepper.prefill_video(padded, int(begins[video]) + start, video)
                found[video] = np.array(logits[0, len(part) - 1])
        for at in range(0 if chunk else most):
            here = np.array([at < len(tokens) for tokens in given])
            token = np.stack([tokens[min(at, len(tokens) - 1)] for tokens in given])[:, None]
            row = in_rows(self._config, token, np.where(here, begins + at, -1), np.where(here, PROMPT, INACTIVE))
            logits = self.stepper.decode(**row, thresholds=self.thresholds).logits[:: self._config.rows, 0]
            for video in np.flatnonzero(here):
                found[video] = np.array(logits[video])
        self.at.move(most)
        return np.stack(found)

    def _read_chunk(self, part: Array, start: int, chunk: int) -> Array:
        """Read at most `chunk` tokens from position `start` on; return the logits of the last one, [B, V]."""
        count, logits = part.shape[1], np.empty(0, np.float32)
        alone = count <= self.stepper.single_tokens
        if self.keep:
            for place in range(start, start + (count if alone else chunk)):
                self.at.journal.note(self.stepper, place)
        if alone:
            for i in range(0, count, self.stepper.together):
                logits = self.stepper.prefill(part[:, i : i + self.stepper.together], start + i)
            return logits[:, -1]
        # The logits of padded tokens are dropped.
        short = chunk - count
        padded = np.pad(part, [(0, 0), (0, short)] + [(0, 0)] * (part.ndim - 2)) if short else part
        return self.stepper.prefill(padded, start)[:, count - 1]

    def decode(self, inputs: Array) -> Array:
        """Run one decode forward of int64 [B, 1] or float32 [B, 1, H]; return its logits [B, V]."""
        at = self.at
        step, eligible = self._next(at.position)
        if inputs.ndim == 2:
            self._frame[:, at.position % self._frame.shape[1]] = inputs[:, 0]
        row = in_rows(self._config, inputs, at.position - at.behind if at.behind.any() else at.position, step)
        result, every = self.stepper.decode(**row, thresholds=self.thresholds), slice(None, None, self._config.rows)
        at.decided(at.position, result.decisions[:, every, None], [eligible])
        at.stats.steps += 1
        at.move(1)
        return np.array(result.logits[every, 0])

    def _next(self, place: int) -> tuple[int, bool]:
        """Return number and eligibility of the decode forward at a position, which comes next."""
        if self.keep:
            self.at.note(self.stepper, place)
        return self.at.slots.step(place)

    def generate(self, logits: Array, count: int, choose: Choose, jacobi: Jacobi | None) -> Iterator[Array]:
        """Yield `count` token ids int64 [B], or their codes int64 [B, D].

        Args:
            logits: of the prompt's last token, [B, V].
        """
        if jacobi is not None and jacobi.rows is not None:
            if jacobi not in self.windows:
                most = min(self._config.rows or 1, self._config.tokens_per_frame)
                self.windows[jacobi] = WindowChoice(jacobi, most)
            yield from self.guess(logits, count, choose, self.windows[jacobi])
            return
        depth = self.depth
        pick = choose if depth is None else partial(depth.choose, choose=choose)
        token = pick(logits, self.at.position - 1)
        yield token
        for _ in range(count - 1):
            inputs = token if depth is None else depth.next_input(token)
            token = pick(self.decode(inputs[:, None]), self.at.position - 1)
            yield token

    def guess(self, logits: Array, count: int, choose: Choose, window: WindowChoice) -> Iterator[Array]:
        """Yield what `generate` does, by coupled Jacobi decoding (arXiv 2510.24211).

        Row 0 of a decode step reads the last true token, and every other one what is guessed of the token before it. A
        guess is what its position gave in the decode step before, at first the token of one frame earlier.
        """
        at, frame, base = self.at, self._frame.shape[1], self.at.position
        tokens = np.empty((len(logits), count), np.int64)
        tokens[:, 0] = choose(logits, base - 1)
        known = guessed = 1
        remembered = 0
        yield tokens[:, 0]
        try:
            while known < count:
                width = window(count - known)
                if guessed < known + width:  # as many as the frame before them is known of, at once
                    self._remember(base + remembered, tokens[:, remembered : known - 1])
                    remembered, end = known - 1, min(count, known + max(width, frame - 1))
                    tokens[:, guessed:end] = self._frame[:, np.arange(base + guessed, base + end) % frame]
                    guessed = end
                read = tokens[:, known - 1 : known - 1 + width].copy()
                start = perf_counter()
                logits = self._try(read)
                try:
                    found = choose.several(logits, at.position, read)
                except BaseException:  # the forward of the true token has run, as it has in sequential decoding
                    self._accept(1)
                    raise
                accepted = rows_right(found, read)
                tokens[:, known : known + found.shape[1]] = found
                self._accept(accepted)
                window.add(width, accepted, perf_counter() - start)
                for i in range(known, known + accepted):
                    yield tokens[:, i].copy()
                known += accepted
        finally:
            self._remember(base + remembered, tokens[:, remembered : at.position - base])

    def _try(self, read: Array) -> Array:
        """Run a decode step of tokens int64 [V, N] from the position on; return its logits [V, N, V]."""
        at, config, per = self.at, self._config, self._config.rows or 1
        count = read.shape[1]
        steps, eligible = zip(*(at.slots.step(at.position, k) for k in range(count)), strict=True)
        slots = [step % config.tokens_per_frame for step in steps]
        if self.keep:
            for k, slot in enumerate(slots):
                at.journal.note(self.stepper, at.position + k, slot)
        places: Array = np.arange(at.position + 1, at.position + count, dtype=np.int64)
        own = enumerate(at.behind.tolist()) if at.behind.any() else ()  # such videos write rows of rings of their own
        kept = [Guessed(self.stepper, config, places - n, np.array(slots[1:]), slice(v, v + 1)) for v, n in own]
        kept = kept or [Guessed(self.stepper, config, places, np.array(slots[1:]))]
        rows = in_rows(config, read, at.position - at.behind, np.array([steps]))
        result = self.stepper.decode(**rows, thresholds=self.thresholds)
        at.stats.steps += 1
        self._tried = kept, result.decisions.reshape(-1, config.batch_size, per), eligible
        return result.logits.reshape(config.batch_size, per, -1)[:, :count]

    def _accept(self, count: int) -> None:
        """Count the first rows of the last decode step; the others leave no trace."""
        kept, decisions, eligible = self._tried
        for each in kept:
            each.accept(count)
        self.at.decided(self.at.position, decisions[:, :, :count], eligible[:count])
        self.at.move(count)
