"""Continuous batching: sequences of many callers share decode steps, each of which reads the weights once."""

import atexit
import threading
import traceback
import weakref
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.thresholds import LayerThresholds, Thresholds
from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.types import ATTENTION_ROLES, INACTIVE, PROMPT, DecoderConfig
from fastcar_compile.runtime.backends.base import Stepper, opened
from fastcar_compile.runtime.forwards import Choose
from fastcar_compile.runtime.inputs import check_ids, to_numpy
from fastcar_compile.runtime.progress import Guessed, rows_right
from fastcar_compile.runtime.sampling import Sampling, TokenChoice, chooser
from fastcar_compile.runtime.streams import Shared, TokenQueue, TokenStream
from fastcar_compile.support.values import check_kind, whole

Array = NDArray[Any]
EXIT_SECONDS = 5.0
"""Time that a process waits for a decode step at its end; a caller's sampler may never return."""


class _Sequence(TokenQueue):
    """A sequence where it stands; only the decoding thread changes it.

    Args:
        prompt: int64 [P]. thresholds: float32 [L]. frame: tokens of a frame.

    Attributes:
        position: of the next token. forwards: decoded so far. known: ids by position: the prompt, chosen tokens, and
            guesses behind them. first: position of the first decode forward.
    """

    position = forwards = 0

    def __init__(
        self, shared: Shared, count: int, prompt: Array, choose: Choose, thresholds: Array, frame: int
    ) -> None:
        super().__init__(shared, count)
        self.prompt, self.choose, self.thresholds, self.first = prompt, choose, thresholds, len(prompt)
        self.known, self._frame, self._guessed = np.append(prompt, np.zeros(count, np.int64)), frame, len(prompt)

    def row(self, ahead: int) -> tuple[int, int, int] | None:
        """Return token, position and forward number of row number `ahead` of its next decode step; None: it has none.

        Tokens of a prompt are read side by side, and those that follow by Jacobi decoding, of a frame at most. The
        last one is not read.
        """
        at = self.position + ahead
        if at < self.first:
            return int(self.known[at]), at, PROMPT
        if ahead and (self.position < self.first or ahead >= self._frame or at >= len(self.known) - 1):
            return None
        if at > self._guessed:
            self.known[at], self._guessed = self.known[max(0, at - self._frame)], at
        return int(self.known[at]), at, at - self.first

    def accept(self, tokens: Array) -> int:
        """Note what follows the rows of a decode step, int64 [N]; return how many of the rows were right."""
        begin, end = self.position + 1, self.position + 1 + len(tokens)
        right = rows_right(tokens[None], self.known[None, self.position : end])
        self.known[begin:end] = tokens
        self._guessed = max(self._guessed, end - 1)
        return right


class _Decoding(Shared):
    """The thread that decodes, and what only this thread touches. It calls nothing of a caller but samplers.

    Args:
        stepper: its memory is given back when the thread ends. limits: thresholds of rows that are not there.
        unread: tokens of a sequence that may wait to be read.
    """

    def __init__(self, stepper: Stepper, config: DecoderConfig, limits: Array, unread: int) -> None:
        super().__init__(unread)
        self._stepper, self._config, self._limits, self._rows = stepper, config, limits, config.rows or 1
        # Fewer tokens are read sooner by decode steps, which the others have in any case.
        self._chunk, self._few = stepper.video_chunk, max(stepper.single_tokens, self._rows)
        self._turn, self._abandoned, self._vocabulary = 0, False, config.token_ids or 0
        self.places: list[_Sequence | None] = [None] * config.batch_size
        self.thread = threading.Thread(target=self._run, name="fastcar-batcher", daemon=True)
        self.thread.start()
        # The process would be aborted where libraries end before a thread that uses them.
        atexit.register(self.close, EXIT_SECONDS)

    def draw(self, logits: Array, **how: Any) -> Array | None:
        """Return tokens; see Stepper.draw. A sequence, which a caller may keep, holds no stepper."""
        return self._stepper.draw(logits, **how)

    def close(self, seconds: float | None = None) -> None:
        """End every sequence and the thread. seconds: to wait for it, while a sampler may block; None: any time."""
        self.require_other_thread("close()")
        self.end(InputError("the batcher was closed"))
        self.thread.join(seconds)

    def abandon(self) -> None:
        """End the thread behind the last sequence."""
        self._abandoned = True
        self.news.put(None)

    def _run(self) -> None:
        """Decode until the batcher is closed. What fails here ends every sequence with its error."""
        try:
            while self._admit():
                self._read_chunk()
                self._decode()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the stepper
            self.end(error)
        self.end(InputError("the batcher was closed"))
        self.places.clear()
        del self._stepper
        atexit.unregister(self.close)

    def _admit(self) -> bool:
        """Fill free places, and wait for a sequence that can go on; return False at the end."""
        while True:
            while not self.news.empty():  # what is put from here on wakes the `get` below, so all else is asked behind
                self.news.get()
            if self.error is not None or (self._abandoned and not self.going):
                return False
            waiting = (own for own in list(self.going) if own not in self.places)
            self.places = [own if own in self.going else next(waiting, None) for own in self.places]
            if any(own is not None and not own.paused for own in self.places):
                return True
            self.news.get()

    def _chunked(self, own: _Sequence) -> bool:
        """Whether what is left of a prompt is read in chunks."""
        return self._chunk > 0 and own.first - own.position > self._few

    def _read_chunk(self) -> None:
        """Read a chunk of one prompt, by turns where several are long. A prompt holds the others up for no longer."""
        for place in [*range(self._turn, len(self.places)), *range(self._turn)]:
            own = self.places[place]
            if own is not None and not own.paused and self._chunked(own):
                ids = own.prompt[own.position : own.position + self._chunk]
                padded = np.pad(ids, (0, self._chunk - len(ids)))[None]
                logits = self._stepper.prefill_video(padded, own.position, place)[:, len(ids) - 1]
                self._turn = place + 1
                self._accept(own, logits, len(ids))
                return

    def _decode(self) -> None:
        """Run one decode step of the sequences that can go on. What fails for one of them ends it alone."""
        count = len(self.places) * self._rows
        inputs, places, steps = np.zeros((count, 1), np.int64), np.full(count, -1), np.full(count, INACTIVE)
        limits = np.repeat(self._limits[:, None], count, 1)
        going: list[tuple[int, _Sequence, int, Guessed | None]] = []
        for place, own in enumerate(self.places):
            if own is None or own.paused or self._chunked(own):
                continue
            rows = [row for k in range(self._rows) if (row := own.row(k)) is not None]
            for at, row in enumerate(rows, place * self._rows):
                inputs[at], places[at], steps[at] = row
            limits[:, place * self._rows : (place + 1) * self._rows] = own.thresholds[:, None]
            kept = None
            if own.position >= own.first:
                part = slice(place * self._rows + 1, place * self._rows + len(rows))
                slots = steps[part] % self._config.tokens_per_frame
                kept = Guessed(self._stepper, self._config, places[part], slots, slice(place, place + 1))
            going.append((place, own, len(rows), kept))
        if not going:
            return
        given = {"inputs": inputs, "position": places, "step": steps}
        result = self._stepper.decode(**given, thresholds=limits)
        for place, own, rows, kept in going:
            part = slice(place * self._rows, place * self._rows + rows)
            if kept is None:
                self._accept(own, result.logits[part][-1], rows)
            else:
                self._accept_decoded(own, result.logits[part, 0], result.decisions[:, part], kept)

    def _accept(self, own: _Sequence, logits: Array, count: int) -> None:
        """Give a sequence the results of `count` tokens of its prompt. What fails ends it alone.

        Args:
            logits: float32 [1, V] of the last of them.
        """
        try:
            self._require_numbers(own, logits, own.position + count - 1)
            own.position += count
            if own.position == own.first:
                self._put(own, own.choose(np.array(logits), own.position - 1)[0])  # a copy: a sampler may keep it
        except BaseException as error:  # a sampler may raise SystemExit
            own.end(error)

    def _accept_decoded(self, own: _Sequence, logits: Array, decisions: Array, kept: Guessed) -> None:
        """Give a sequence the results of a decode step. What fails ends it alone.

        Args:
            logits: float32 [N, V] of its rows. decisions: bool [L, N]. kept: what rows behind the first overwrote.
        """
        try:
            self._require_numbers(own, logits[:1], own.position)
            read = own.known[None, own.position : own.position + len(logits)]
            tokens = own.choose.several(np.array(logits[None]), own.position, read)[0]
            count = own.accept(tokens)
            kept.accept(count)
            for k in range(count):
                own.forwards += 1
                own.replayed += (float(decisions[:, k].mean()) - own.replayed) / own.forwards
                own.position += 1
                self._put(own, tokens[k])
        except BaseException as error:
            own.end(error)

    def _require_numbers(self, own: _Sequence, logits: Array, position: int) -> None:
        """Raise InputError where logits are NaN."""
        if np.isnan(logits).any():
            self._clear(self.places.index(own))
            raise InputError(f"the logits at position {position} are NaN")

    def _put(self, own: _Sequence, token: Any) -> None:
        """Hand over a token that was chosen behind a sequence's position."""
        check_ids(np.array([token]), self._vocabulary)
        own.known[own.position] = token
        own.put(int(token))
        if own.position == len(own.known) - 1:
            own.end()

    def _clear(self, place: int) -> None:
        """Set a place's keys and values to zero: where a mask is a factor, NaN would reach the next sequence."""
        names, part = [s.name for s in self._stepper.states() if s.role in ATTENTION_ROLES], slice(place, place + 1)
        self._stepper.write((name, part, np.zeros_like(self._stepper.read(name, part))) for name in names)


class Batcher:
    """Decodes up to batch_size sequences together. They join and leave between decode steps.

    It owns a thread and a state; the memory of every sequence is reserved when it is made, so that none is refused
    later. A sequence that fails ends alone. Sequences that wait come in the order in which they were submitted. One
    whose tokens nobody reads pauses, and the others go on.

    Args:
        artifact: of a decoder with tokens that was compiled with `rows`; batch_size is the most sequences at a time.
        backend: name of the backend. threads: CPU threads; None: every core that the process may use.
        waiting: sequences that may wait for a place. unread: tokens of a sequence that may wait to be read.

    Raises:
        InputError: the decoder has one position for all rows, embeddings, or cross-attention. BackendError: the backend
            cannot run here.
    """

    def __init__(
        self,
        artifact: StoredArtifact,
        backend: str = "cpu",
        *,
        threads: int | None = None,
        waiting: int = 1024,
        unread: int = 256,
    ) -> None:
        check_kind("artifact", artifact, StoredArtifact, "an artifact, as fc.load returns it")
        config = artifact.manifest.decoder.config
        if config.rows is None:
            hint = "compile with rows=1, and batch_size for the sequences that are decoded together"
            raise InputError("all rows of this decoder share one position", where="Batcher", hint=hint)
        if config.takes_embeddings or config.context is not None:
            hint = "use a session for each video"
            raise InputError("a batcher has tokens alone: no embeddings and no cross-attention", hint=hint)
        self._config, self._waiting, unread = config, whole("waiting", waiting, 0), whole("unread", unread, 1)
        layers, self._submitting = artifact.manifest.layers, threading.RLock()
        self._limits = LayerThresholds(layers.thresholds, layers.gate)
        stored = artifact.manifest.thresholds
        self._in_use = self._limits.values if stored is None else self._limits.of(stored)
        stepper = opened(artifact, backend, threads)
        self._row_thresholds = stepper.row_thresholds
        self._decoding = _Decoding(stepper, config, self._in_use, unread)
        weakref.finalize(self, self._decoding.abandon)

    def submit(
        self,
        prompt: Any,
        num_tokens: int,
        sampling: Sampling | None = None,
        thresholds: float | Sequence[float | None] | Thresholds | None = None,
    ) -> TokenStream:
        """Let a sequence join; it starts as soon as a place is free.

        Args:
            prompt: int64 [P]. num_tokens: tokens to decode. sampling: None is greedy.
            thresholds: of this sequence, as `Session.set_threshold` takes them; None: the artifact's stored
                ones, else the compiled ones.

        Returns:
            Its tokens, as they are decoded.

        Raises:
            InputError: prompt, number or thresholds are not valid, the backend has one threshold for all rows, prompt
                and tokens do not fit the cache, too many sequences wait, or the batcher is closed. ArtifactError: the
                thresholds belong to another gate.
        """
        decoding = self._decoding
        decoding.require_process()
        ids, count = to_numpy(prompt), whole("num_tokens", num_tokens, 1)
        if ids.dtype != np.int64 or ids.ndim != 1 or not ids.size:
            raise InputError(f"the prompt is {ids.dtype} {list(ids.shape)}", hint="give int64 [P], of one sequence")
        if len(ids) + count - 1 > self._config.max_seq_len:
            given = f"{count_text(len(ids), 'prompt token')} and {count} new ones"
            raise InputError(f"{given} do not fit max_seq_len {self._config.max_seq_len}", hint="ask for fewer tokens")
        ids = np.array(ids)  # a copy: the caller may write into its own array
        check_ids(ids, self._config.token_ids or 0)
        if thresholds is not None and not self._row_thresholds:
            hint = "leave thresholds out, and store them in the artifact, or use the backend cpu"
            raise InputError("an accelerator has one threshold of a layer for all sequences", hint=hint)
        check_kind("sampling", sampling, (Sampling, type(None)), "Sampling(…), or None")
        limits = self._in_use if thresholds is None else self._limits.of(thresholds)
        sampler: Any = (sampling or Sampling(temperature=0)).start(ids[None].copy())
        if not isinstance(sampler, TokenChoice):
            sampler = sampler.__call__  # which is checked, whoever wrote it
        choose = chooser(sampler, ids, ids[None], decoding.draw)
        frame = self._config.tokens_per_frame
        stream = TokenStream(own := _Sequence(decoding, count, ids, choose, limits, frame))
        with self._submitting:  # never held by the decoding thread, nor by `close`
            wait = len(decoding.going) - self._config.batch_size
            if wait >= self._waiting:
                what = f"every place is taken, and {count_text(wait, 'sequence')} wait already"
                raise InputError(what, hint="try again later, or allow more with Batcher(waiting=…)")
            decoding.going[own] = None
        decoding.news.put(None)
        if decoding.error is not None:  # asked last: `close` ends what it finds
            own.end()
            raise InputError("the batcher is closed") from decoding.error
        return stream

    def close(self) -> None:
        """End every sequence and the thread; closing again does nothing."""
        self._decoding.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
