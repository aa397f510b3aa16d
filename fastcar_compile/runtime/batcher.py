"""Continuous batching: sequences of many callers share decode steps, each of which reads the weights once."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.thresholds import LayerThresholds, Thresholds
from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.types import INACTIVE, PROMPT
from fastcar_compile.runtime.backends.base import opened, spans_of
from fastcar_compile.runtime.inputs import check_ids, to_numpy
from fastcar_compile.runtime.sampling import Sampling
from fastcar_compile.support.values import check_kind, whole

Array = NDArray[Any]


class _Sequence:
    """What a batcher knows of one sequence. Its thread decodes, and any other thread reads the tokens.

    Attributes:
        position: of the next token. token: the id that is read there. forwards: decoded so far, `replayed` of their
            (token, layer) pairs.
        tokens: ids that nobody has read yet. ended: there are no more; `error` says what ended it early.
    """

    def __init__(self, prompt: Array, count: int, sampling: Sampling, unread: int, thresholds: Array) -> None:
        self.prompt, self.count, self.unread, self.thresholds = prompt, count, unread, thresholds
        self.choose = sampling.start(prompt[None])
        self.position = self.token = self.forwards = 0
        self.replayed = 0.0
        self.changed, self.wakers = threading.Condition(), list[Callable[[], object]]()
        self.tokens = deque[int]()
        self.error: BaseException | None = None
        self.ended = self.cancelled = False

    @property
    def paused(self) -> bool:
        """Whether it has no next decode step, or not before somebody reads."""
        return self.cancelled or len(self.tokens) >= self.unread

    def row(self, ahead: int) -> tuple[int, int, int] | None:
        """Return token, position and forward number of row number `ahead` of its next decode step; None: it has none.

        Tokens of a prompt are read side by side, those that follow one after the other.
        """
        at, length = self.position + ahead, len(self.prompt)
        if at < length:
            return int(self.prompt[at]), at, PROMPT
        return None if ahead else (self.token, at, at - length)

    def take(self, logits: Array, count: int, decisions: Array | None) -> bool:
        """Take the results of a decode step, or of a chunk of the prompt; return whether the sequence goes on.

        Args:
            logits: float32 [1, V] of the last of `count` tokens. decisions: bool [L] of that token; None: of a chunk.
        """
        if not np.isfinite(logits).all():
            raise InputError(f"the logits at position {self.position} are not finite")
        self.position += count
        if self.position < len(self.prompt):
            return True
        if decisions is not None and self.position > len(self.prompt):
            self.forwards += 1
            self.replayed += (float(decisions.mean()) - self.replayed) / self.forwards
        self.token = int(self.choose(logits)[0])
        self.put(self.token)
        return self.position - len(self.prompt) + 1 < self.count

    def put(self, token: int | None, error: BaseException | None = None) -> None:
        """Give a token, or None at the end, to whoever waits."""
        with self.changed:
            if token is None:
                self.ended, self.error = True, error
            else:
                self.tokens.append(token)
            wakers, self.wakers = self.wakers, []
            self.changed.notify_all()
        for wake in wakers:
            wake()


class TokenStream:
    """The tokens of one sequence, as they are decoded: `async for token in stream`, or `stream.result()`."""

    def __init__(self, sequence: _Sequence) -> None:
        self._sequence = sequence

    @property
    def replay_ratio(self) -> float:
        """Share of (token, layer) that replayed so far."""
        return self._sequence.replayed

    def cancel(self) -> None:
        """End the sequence; its place goes to the next one. Tokens that were decoded can still be read."""
        self._sequence.cancelled = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """Return the next token id.

        Raises:
            StopAsyncIteration: the sequence has ended.
            InputError: the batcher was closed; or what else ended the sequence early, such as its sampler's error.
        """
        own, loop = self._sequence, asyncio.get_running_loop()
        while True:
            ready = asyncio.Event()
            with own.changed:
                if own.tokens:
                    return own.tokens.popleft()
                if own.ended:
                    raise StopAsyncIteration if own.error is None else own.error
                own.wakers.append(partial(loop.call_soon_threadsafe, ready.set))
            await ready.wait()

    def result(self) -> list[int]:
        """Wait for the end, and return all token ids that were not read yet.

        Raises:
            InputError: the batcher was closed; or what else ended the sequence early, such as its sampler's error.
        """
        own = self._sequence
        with own.changed:
            own.unread = own.count  # whoever waits for all of them takes them all
            while not own.ended:
                own.changed.wait()
            if own.error is not None:
                raise own.error
            found, own.tokens = list(own.tokens), deque()
        return found


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
        self._config, self._rows = config, config.rows
        self._waiting, self._unread = whole("waiting", waiting, 0), whole("unread", unread, 1)
        layers = artifact.manifest.layers
        self._limits = LayerThresholds(layers.thresholds, layers.gate)
        self._stepper = opened(artifact, backend, threads)
        # Fewer tokens are read sooner by decode steps, which the others have in any case.
        self._chunk, self._few = self._stepper.video_chunk, max(self._stepper.single_tokens, config.rows)
        self._turn, self._queue = 0, deque[_Sequence]()
        self._places: list[_Sequence | None] = [None] * config.batch_size
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, name="fastcar-batcher", daemon=True)
        self._thread.start()

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
            thresholds: of this sequence, as `Session.set_threshold` takes them; None: the compiled ones.

        Returns:
            Its tokens, as they are decoded.

        Raises:
            InputError: prompt, number or thresholds are not valid, the backend has one threshold for all rows, prompt
                and tokens do not fit the cache, too many sequences wait, or the batcher is closed. ArtifactError: the
                thresholds belong to another gate.
        """
        ids, count = to_numpy(prompt), whole("num_tokens", num_tokens, 1)
        if ids.dtype != np.int64 or ids.ndim != 1 or not ids.size:
            raise InputError(f"the prompt is {ids.dtype} {list(ids.shape)}", hint="give int64 [P], of one sequence")
        check_ids(ids, self._config.token_ids or 0)
        if len(ids) + count - 1 > self._config.max_seq_len:
            given = f"{count_text(len(ids), 'prompt token')} and {count} new ones"
            raise InputError(f"{given} do not fit max_seq_len {self._config.max_seq_len}", hint="ask for fewer tokens")
        if thresholds is not None and not self._stepper.row_thresholds:
            hint = "leave thresholds out, and store them in the artifact, or use the backend cpu"
            raise InputError("an accelerator has one threshold of a layer for all sequences", hint=hint)
        check_kind("sampling", sampling, (Sampling, type(None)), "Sampling(…), or None")
        with self._changed:
            if self._closed:
                raise InputError("the batcher is closed")
            limits = self._limits.values if thresholds is None else self._limits.of(thresholds)
            own = _Sequence(np.array(ids), count, sampling or Sampling(temperature=0), self._unread, limits)
            if len(self._queue) >= self._waiting and None not in self._places:
                hint = "try again later, or allow more with Batcher(waiting=…)"
                raise InputError(f"{count_text(len(self._queue), 'sequence')} wait already", hint=hint)
            self._queue.append(own)
            self._changed.notify_all()
        return TokenStream(own)

    def close(self) -> None:
        """End every sequence and the thread; closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        """Decode until the batcher is closed. What fails here ends every sequence with its error."""
        ended: BaseException | None = InputError("the batcher was closed")
        try:
            while self._admit():
                self._read_chunk()
                self._decode()
        except BaseException as error:
            ended = error
        with self._changed:
            self._closed, left = True, [*filter(None, self._places), *self._queue]
            self._places[:], self._queue = [None] * len(self._places), deque[_Sequence]()
        for own in left:
            own.put(None, ended)

    def _admit(self) -> bool:
        """Fill free places, and wait for a sequence that can go on; return False once the batcher is closed."""
        with self._changed:
            while not self._closed:
                for place, own in enumerate(self._places):
                    if own is not None and own.cancelled:
                        self._leave(place)
                while self._queue and None in self._places:
                    self._places[self._places.index(None)] = self._queue.popleft()
                if any(own is not None and not own.paused for own in self._places):
                    return True
                # A reader takes tokens, and cancels, without telling: a pause ends within this time.
                self._changed.wait(0.005 if any(self._places) else None)
        return False

    def _leave(self, place: int, error: BaseException | None = None) -> None:
        own, self._places[place] = self._places[place], None
        if own is not None:
            own.put(None, error)

    def _chunked(self, own: _Sequence) -> bool:
        """Whether what is left of a prompt is read in chunks."""
        return self._chunk > 0 and len(own.prompt) - own.position > self._few

    def _read_chunk(self) -> None:
        """Read a chunk of one prompt, by turns where several are long. A prompt holds the others up for no longer."""
        for place in [*range(self._turn, len(self._places)), *range(self._turn)]:
            own = self._places[place]
            if own is not None and not own.paused and self._chunked(own):
                ids = own.prompt[own.position : own.position + self._chunk]
                padded = np.pad(ids, (0, self._chunk - len(ids)))[None]
                logits = self._stepper.prefill_video(padded, own.position, place)[:, len(ids) - 1]
                self._turn = place + 1
                self._take(place, own, logits, len(ids))
                return

    def _decode(self) -> None:
        """Run one decode step of the sequences that can go on. What fails for one of them ends it alone."""
        count = len(self._places) * self._rows
        inputs, places, steps = np.zeros((count, 1), np.int64), np.full(count, -1), np.full(count, INACTIVE)
        limits = np.repeat(self._limits.values[:, None], count, 1)
        going: list[tuple[int, _Sequence, int]] = []
        for place, own in enumerate(self._places):
            if own is None or own.paused or self._chunked(own):
                continue
            rows = [row for k in range(self._rows) if (row := own.row(k)) is not None]
            for at, row in enumerate(rows, place * self._rows):
                inputs[at], places[at], steps[at] = row
            limits[:, place * self._rows : (place + 1) * self._rows] = own.thresholds[:, None]
            going.append((place, own, len(rows)))
        if not going:
            return
        given = {"inputs": inputs, "position": places, "step": steps} | spans_of(self._config, places)
        result = self._stepper.decode(**given, thresholds=limits)
        for place, own, rows in going:
            last = place * self._rows + rows - 1
            self._take(place, own, result.logits[last], rows, result.decisions[:, last])

    def _take(self, place: int, own: _Sequence, logits: Array, count: int, decisions: Array | None = None) -> None:
        """Give a sequence what came of its tokens; see `_Sequence.take`. What fails for it ends it alone."""
        try:
            # The chooser keeps nothing of the logits, which are a view of memory that the next forward writes.
            if not own.take(logits, count, decisions):
                self._leave(place)
        except Exception as error:
            self._leave(place, error)
