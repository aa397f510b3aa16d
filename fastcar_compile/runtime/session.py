"""A decoding session: prompt in, tokens out, with replay decided at run time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np

from fastcar_compile.artifact.explain import Described, Description, gate_text
from fastcar_compile.artifact.thresholds import LayerThresholds, Thresholds
from fastcar_compile.config.models import Jacobi
from fastcar_compile.errors import ArtifactError, InputError, count_text
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.runtime.backends.base import Array, Stepper
from fastcar_compile.runtime.depth import DepthHead
from fastcar_compile.runtime.forwards import Forwards
from fastcar_compile.runtime.guard import Guard
from fastcar_compile.runtime.inputs import Inputs, checked_context, first_of, like, to_numpy
from fastcar_compile.runtime.progress import Stats
from fastcar_compile.runtime.sampling import Asked, Choose, Sampler, Sampling, chooser
from fastcar_compile.runtime.saved import SavedSession, read_session, write_session
from fastcar_compile.support.values import check_function, check_kind, path_of, whole

T = TypeVar("T")


class Session(Described):
    """One video at a time, on one backend. Sessions share weights, never state.

    Inputs are numpy arrays, torch tensors, or anything that speaks DLPack. Torch tensors in give torch tensors out;
    other inputs give numpy arrays.

    A sequence belongs to one thread: the thread that last called `reset` or `generate`, after opening the first thread
    that calls anything. Calls of another thread, calls from within a call, and calls in a child process after a fork
    raise an InputError. docs/reference/threads.md describes the rules.

    A session is a context manager that closes itself.

    Attributes:
        origin: backend and artifact, as printing shows them.
    """

    def __init__(
        self,
        stepper: Stepper,
        config: DecoderConfig,
        thresholds: Sequence[float | None],
        *,
        record: bool = False,
        gate: str | None = None,
        keep: int = 0,
        origin: Mapping[str, str] | None = None,
        depth: DepthHead | None = None,
        jacobi: Jacobi | None = None,
    ) -> None:
        self._config, self._jacobi, self.origin = config, jacobi, origin or {}
        self._inputs, self._guard, self._limits = Inputs(config), Guard(), LayerThresholds(thresholds, gate)
        self._has_context = False
        self._run = Forwards(stepper, config, self._limits.values.copy(), record, keep, depth)
        if keep:
            stepper.states()  # a backend that cannot keep what tokens overwrite says so now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        hint = "send the artifact's path and open a session there"
        raise InputError("a session cannot be copied, nor sent to another process", hint=hint)

    def _description(self) -> Description:
        replayed = f"{self.stats.replay_ratio:.1%} of the MLPs replayed"
        position = f"{self.position} of {self._config.max_seq_len} positions, {replayed}"
        closed = "" if hasattr(self._run, "stepper") else ", closed"
        gates = gate_text(self._limits.gates, self._limits.given(self.thresholds))
        return f"Session{closed}", {**self.origin, "gate": gates, "state": position}

    def close(self) -> None:
        """Give back the session's state, libraries, threads and device now; closing again does nothing.

        Raises:
            InputError: a call is running, in another thread or around this one.
        """
        if self._guard.close():
            self._run.close()

    def reset(self) -> None:
        """Clear everything: caches, chains, position and statistics. Thresholds and the context stay.

        The session belongs to the calling thread from then on.

        Raises:
            InputError: a call is running, the session is closed, or it was opened before a fork.
        """
        with self._guard.begun():
            self._run.reset()

    @property
    def thresholds(self) -> Array:
        """Thresholds, float32 [L]; where the layer never replays, the value that no score passes (inf for TAS)."""
        return self._run.thresholds

    @property
    def stats(self) -> Stats:
        """Replay statistics since the last reset."""
        return self._run.at.stats

    def rewind(self, count: int) -> None:
        """Take the last tokens back, whether read or decoded: the session is as it was before them.

        Args:
            count: tokens, at most those that `session(keep=…)` reserves room for.

        Raises:
            InputError: `count` is no whole number, or more tokens than can be taken back; or the session belongs to
                another thread.
        """
        with self._guard:
            at, kept = self._run.at, self._run.keep
            room = min(kept, at.position - at.journal.start)
            if whole("the number of tokens", count, 0) > room:
                hint = f"the session keeps {kept}; open it with session(keep=…) for as many as you take back"
                raise InputError(f"{count_text(count, 'token')} cannot be taken back, only {room}", hint=hint)
            self._run.stepper.write(at.back(count))

    def fork(self) -> Session:
        """Return a session that goes on from here on its own. It shares the weights, and has copies of the states.

        Raises:
            BackendError: the backend takes one session, as a board does.
            InputError: the session belongs to another thread.
        """
        with self._guard:
            other, run = object.__new__(Session), self._run.fork()
            vars(other).update(vars(self), _run=run, _guard=Guard())
        return other

    def save(self, path: str | Path) -> None:
        """Write the session to a file: every state that its tokens have written, thresholds and statistics.

        A session of the same artifact goes on from there with `load`, in another process and on another backend too.
        What `rewind` would need is not saved. An old file is replaced once the new one is whole, and keeps its mode; of
        a symbolic link the file that it names is replaced.

        Raises:
            BackendError: the backend does not read its states.
            InputError: the session belongs to another thread. UserError: the file cannot be written, or is not a plain
                file.
        """
        file = path_of("the file", path)
        with self._guard:
            at, stepper, digest = self._run.at, self._run.stepper, self.origin.get("digest", "")
            parts = at.filled(stepper.states())
            tensors = {f"state.{name}": stepper.read(name, part) for name, part in parts.items()}
            counts, arrays = at.saved()
            about = SavedSession(digest=digest, context=self._has_context, **counts)
            write_session(file, about, tensors | arrays | {"thresholds": self.thresholds})

    def load(self, path: str | Path) -> None:
        """Go on where a saved session of the same artifact stood. What this session held is lost.

        The session belongs to the calling thread from then on. A file that is refused changes nothing.

        Raises:
            ArtifactError: the file is no session, or of another artifact, or says what no session of it can be.
            BackendError: the backend does not write its states.
            InputError: the file cannot be read, its rows stand at different positions and this session keeps tokens, a
                call is running, or the session is closed.
        """
        file, run = path_of("the file", path), self._run
        with self._guard.begun(owned=False):
            at, states = run.begun(), run.stepper.states()
            about, tensors = read_session(file, self.origin.get("digest", ""), self._config, states, at)
            self._require_level(at.behind)
            try:
                thresholds = self._limits.of(self._limits.given(tensors["thresholds"]))
            except InputError as error:
                raise ArtifactError(f"the session is malformed: {error.what}", where=str(file)) from error
        with self._guard.begun():
            run.reset()
            run.at, run.thresholds, self._has_context = at, thresholds, about.context
            parts = at.filled(states)
            run.stepper.write((name, part, tensors[f"state.{name}"]) for name, part in parts.items())

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the decoder."""
        return self._config

    @property
    def position(self) -> int:
        """Tokens seen since the last reset."""
        return self._run.at.position

    def set_threshold(self, threshold: float | Sequence[float | None] | Thresholds | None) -> None:
        """Set one threshold for every layer that may replay, one per layer, or calibrated thresholds.

        The thresholds hold from the next decode step on. With None no layer replays, with any gate.

        Raises:
            InputError: the length is wrong, a threshold is NaN, or a layer was compiled without replay.
            ArtifactError: the calibrated thresholds belong to another gate or number of layers.
        """
        self._run.thresholds = self._limits.of(threshold)

    def set_context(self, context: Any, mask: Any = None) -> None:
        """Set the context of cross-attention, from the next prompt on. Its keys and values are computed here, once.

        Args:
            context: float32 [B, L, C], such as text embeddings; each row of the batch has its own context. A decoder
                with a context mask takes fewer than L tokens too: the other tokens are hidden.
            mask: bool [B, L], True where a token of the context is seen; None: all tokens are seen.

        Raises:
            InputError: the decoder has no cross-attention, dtype or shape are wrong, a row has no token to see, or the
                session already holds tokens or belongs to another thread.
        """
        with self._guard:
            if self.position:
                raise InputError("the session already holds tokens", hint="call reset() before the next context")
            given = checked_context(self._config, to_numpy(context), None if mask is None else to_numpy(mask))
            self._run.stepper.set_context(*given)
            self._has_context = True

    def prefill(self, inputs: Any) -> Any:
        """Read a prompt. Prefill never replays.

        Padding would be read as a part of the prompt. A decoder with rows (`compile(rows=1)`) takes prompts of
        different lengths as a list, and every row counts its own positions from then on.

        Args:
            inputs: int64 [B, P], or embeddings float32 [B, P, H] of a headless decoder; or a list of a prompt for each
                row, int64 [P] or float32 [P, H].

        Returns:
            Logits of the last token, float32 [B, V] (or hidden states [B, H]).

        Raises:
            InputError: dtype or shape are wrong, the prompt is longer than the cache, prompts of different lengths are
                given to rows that share a position or to `session(keep=…)`, or the session already holds tokens or
                belongs to another thread.
        """
        with self._guard:
            if self.position:
                hint = "call reset() before the next prompt, or extend() to go on with known tokens"
                raise InputError("the session already holds tokens", hint=hint)
            return self._extend(inputs)

    def extend(self, inputs: Any) -> Any:
        """Read known tokens at the session's position, for example true frames or actions within a video.

        They are read as a prompt is: nothing replays, and they are not counted. A place that was read and not decoded
        computes in the next frame. On an empty session this is `prefill`.

        Args:
            inputs: int64 [B, n], or embeddings float32 [B, n, H] of a headless decoder.

        Returns:
            Logits of the last token, float32 [B, V] (or hidden states [B, H]).

        Raises:
            InputError: dtype or shape are wrong, the tokens do not fit the cache, or the session belongs to another
                thread.
        """
        with self._guard:
            return self._extend(inputs)

    def _extend(self, inputs: Any) -> Any:
        run = self._run
        if isinstance(inputs, list | tuple) and not self.position:
            kind, prompts = first_of(inputs), self._checked(self._inputs.prompts, inputs)
            longest = max(map(len, prompts))
            behind = np.array([longest - len(prompt) for prompt in prompts])
            if behind.any():
                self._require_level(behind)
                run.at.behind = behind
                return like(kind, run.read_rows(prompts))
            inputs = like(kind, np.stack(prompts))
        array, begin = self._checked(self._inputs.tokens, inputs), self.position
        self._inputs.require_room(begin, array.shape[1], f"after {count_text(begin, 'token')} the extension adds")
        return like(inputs, run.read(array))

    def _require_level(self, behind: Array) -> None:
        """Raise InputError where rows are behind others, int64 [B], and the session keeps tokens."""
        if self._run.keep and behind.any():
            what = "prompts of different lengths put rows at different positions, whose tokens stay"
            raise InputError(what, hint="open the session without keep, or give prompts of one length")

    def step(self, inputs: Any) -> Any:
        """Run one decode forward and return its logits.

        Args:
            inputs: int64 [B], or embeddings float32 [B, H].

        Returns:
            Logits float32 [B, V] (or hidden states [B, H]).

        Raises:
            InputError: dtype or shape are wrong, the cache is full, or the session belongs to another thread.
        """
        with self._guard:
            array, position = self._checked(self._inputs.token, inputs), self.position
            if position >= self._config.max_seq_len:
                self._inputs.require_room(position, 1, f"after {count_text(position, 'token')} the step adds")
            return like(inputs, self._run.decode(array))

    def generate(
        self,
        prompt: Any,
        num_tokens: int,
        sample: Sampler | Sampling | None = None,
        progress: bool = False,
        on_token: Callable[[Any], object] | None = None,
        reset: bool = True,
        jacobi: Jacobi | None = None,
        decode: bool = False,
    ) -> Any:
        """Reset, read the prompt, sample one token from it and decode the other tokens: num_tokens - 1 decode forwards.

        With a depth head (`Artifact.session(depth=…)`) a token is D codes. They are sampled one after the other.

        Args:
            prompt: int64 [B, P]; with a depth head float32 [B, P, W - D], without the columns of codes; or a list of
                prompts, as `prefill` takes it. With guidance, the unconditional prompts are its second half.
            num_tokens: tokens to generate.
            sample: `Sampling(temperature, top_k, top_p, repetition_penalty, guidance, seed)`, or a function of
                logits of the prompt's kind, numpy or torch, and their position if it has a parameter `position`; None
                is greedy.
            progress: show a progress bar.
            on_token: called with the token ids of each position, int64 [B], as soon as they are chosen. The function
                and a sampler may read the session and set thresholds; other calls of this session raise an InputError.
            reset: whether to begin a new video. False: the prompt extends what the session holds. It begins with the
                last token of the call before, which that call chose and did not read.
            jacobi: decode several positions at once on guesses, with the tokens of sequential decoding; default: as the
                decoder was compiled to; `Jacobi(1)` is sequential. `on_token` is called when a decode step has ended,
                so a threshold that it sets holds from the next decode step on.
            decode: with `reset=False`, decode the prompt's tokens one by one, as `step` does, and not as `extend` reads
                them: their MLPs may replay.

        Returns:
            int64 [B, num_tokens], or [B, num_tokens, D] with a depth head.

        Raises:
            InputError: the decoder is headless and has no depth head, prompt and tokens do not fit the cache, guidance
                has no pairs, the decoder has no such frames or rows, a logit is NaN, or all of a row are -inf, or a
                function that knows no position samples with `jacobi`.
        """
        num_tokens, depth = whole("num_tokens", num_tokens, 1), self._run.depth
        check_function("on_token", on_token)
        check_kind("jacobi", jacobi, (Jacobi, type(None)), "Jacobi(window=8)")
        jacobi = jacobi or self._jacobi
        check_kind("decode", decode, bool, "True or False")
        self._check_generation(reset, decode)
        kind = first_of(prompt)
        ids, prompt = self._prompt(prompt)
        held = 0 if reset else self.position
        if held + ids.shape[1] + num_tokens - 1 > self._config.max_seq_len:
            given = f"{count_text(ids.shape[1], 'prompt token')} and {num_tokens} new ones"
            given += f" after {held}" if held else ""
            hint = "ask for fewer tokens, or compile with a larger max_seq_len"
            raise InputError(f"{given} do not fit max_seq_len {self._config.max_seq_len}", hint=hint)
        if decode and isinstance(prompt, list):
            raise InputError("prompts of different lengths are not decoded", where="decode", hint="leave it out")
        # No prompt holds codes.
        choose = chooser(sample, kind, ids if depth is None else np.zeros((len(ids), 0), np.int64), self._run.draw)
        self._check_jacobi(jacobi, choose)
        tokens = list[Array]()
        with self._guard.begun() if reset else self._guard:
            if reset:
                self._run.reset()
            logits = self._decoded(ids) if decode else to_numpy(self._extend(prompt))
            # The codes of a depth head are not ids that the decoder reads.
            known = None if self._config.takes_embeddings else self._inputs.known
            source = self._run.generate(logits, num_tokens, Asked(choose, self._ask, known), jacobi)
            if progress:
                from rich.progress import track

                source = track(source, "decoding", num_tokens)
            for token in source:
                tokens.append(token)
                if on_token is not None:
                    self._ask(on_token, like(kind, token))
        return like(kind, np.stack(tokens, 1))

    def _decoded(self, ids: Array) -> Array:
        """Decode tokens int64 [B, P]; return the logits of the last ones."""
        return [self._run.decode(token[:, None]) for token in ids.T][-1]

    def _check_generation(self, reset: bool, decode: bool) -> None:
        """Raise InputError unless the decoder has tokens to sample, and a video that goes on has one code a token."""
        if decode and reset:
            raise InputError("the prompt of a new video is not decoded", where="decode", hint="give reset=False too")
        if self._config.takes_embeddings and self._run.depth is None:
            hint = "use prefill() and step() with embeddings, or open the session with a depth head"
            raise InputError("a headless decoder has no tokens to sample", hint=hint)
        if self._run.depth is not None and not reset:
            hint = "generate the whole video in one call: a prompt has no columns for the codes of the call before"
            raise InputError("a video with a depth head is not continued", where="reset=False", hint=hint)

    def _check_jacobi(self, jacobi: Jacobi | None, choose: Choose) -> None:
        """Raise InputError unless the decoder can decode several positions at once, and the draws follow from them."""
        if jacobi is None:
            return
        if jacobi.rows is not None and self._run.depth is not None:
            raise InputError("Jacobi decoding guesses one code a token", hint="give jacobi=Jacobi(window=1)")
        for problem in jacobi.problems(self._config.tokens_per_frame, self._config.rows):
            raise problem
        if jacobi.rows is not None and not getattr(choose, "keyed", True):
            what = "the sampler takes logits alone, and Jacobi decoding draws a position again and again"
            raise InputError(what, where="sample", hint="give it a parameter `position` that its draws follow from")

    def _prompt(self, given: Any) -> tuple[Array, Any]:
        """Return prompts as an array int64 [B, P], and what `_extend` takes: itself, or prompts of different lengths.

        The array pads a shorter prompt on the left with its first token, which it holds in any case.
        """
        if self._run.depth is not None:
            given = self._run.depth.prompt(given)
        if not isinstance(given, list | tuple):
            ids = self._checked(self._inputs.tokens, given)
            return ids, ids
        prompts = self._checked(self._inputs.prompts, given)
        longest = max(map(len, prompts))
        if all(len(ids) == longest for ids in prompts):
            return np.stack(prompts), np.stack(prompts)
        return np.stack([np.concatenate([ids[:1].repeat(longest - len(ids), 0), ids]) for ids in prompts]), prompts

    def _ask(self, function: Callable[..., Any], *values: Any) -> Any:
        """Call a function of the caller's. The guard refuses calls of this session while it runs."""
        self._guard.calling = True
        try:
            return function(*values)
        finally:
            self._guard.calling = False

    def _checked(self, check: Callable[[Any], T], inputs: Any) -> T:
        """Return what the caller gives as arrays, checked."""
        context = self._config.context
        if context is not None and not self._has_context:
            shape = f"[{self._config.batch_size}, {context.length}, {context.size}]"
            hint = f"call set_context(context) with float32 {shape} before the prompt; "
            hint += "fastcar run takes it as --context FILE"
            raise InputError("the decoder has cross-attention, and its context is not set", hint=hint)
        return check(inputs)
