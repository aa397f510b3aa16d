"""Token choice: a sampler takes logits [B, V] as numpy or torch and returns token ids int64 [B].

The draw of a position depends on the seed, the sequence and the position alone, not on what was drawn before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.draws import LOG2_E, Noise
from fastcar_compile.runtime.inputs import like, to_numpy
from fastcar_compile.support import limits
from fastcar_compile.support.values import check_function, check_kind, checked, number, whole

Sampler = Callable[..., Any]
"""logits float32 [B, V], and their position where it has a parameter `position` -> token ids int64 [B]."""

_LARGEST_SEED = (1 << 64) - 1
"""Bits of a key of Philox."""

_noise = lru_cache(8)(Noise)
"""Kept, because what one frame computes ahead serves the next one."""

Scores = NDArray[np.float64]
Tokens = NDArray[np.int64]


@runtime_checkable
class Choose(Protocol):
    """Chooses tokens; see TokenChoice."""

    def __call__(self, logits: Any, position: int, part: int = 0) -> Tokens:
        """Return token ids int64 [B] of logits float32 [B, V] and their position."""
        ...

    def several(self, logits: Any, position: int, read: Tokens | None, part: int = 0) -> Tokens:
        """Return token ids int64 [B, N] of logits float32 [B, N, V], or those of the first rows alone."""
        ...


class Asked(Choose):
    """A chooser of the caller's, whose tokens are checked: it may choose ids that the decoder does not have.

    Args:
        ask: calls a function of the caller's. known: returns tokens int64 [B], or raises InputError; None: any are.
    """

    def __init__(self, choose: Choose, ask: Callable[..., Any], known: Callable[[Tokens], Tokens] | None) -> None:
        self._choose, self._ask, self._known = choose, ask, known

    def __call__(self, logits: Tokens, position: int, part: int = 0) -> Tokens:
        """Return tokens int64 [B]; see Choose."""
        tokens: Tokens = self._ask(self._choose, logits, position, part)
        return tokens if self._known is None else self._known(tokens)

    def several(self, logits: Tokens, position: int, read: Tokens | None, part: int = 0) -> Tokens:
        """Return tokens int64 [B, N]; see Choose. Those behind an unknown one are left out."""
        tokens: Tokens = self._ask(self._choose.several, logits, position, read, part)
        while self._known is not None:
            try:
                return self._known(tokens)
            except InputError:
                if tokens.shape[1] == 1:
                    raise
                tokens = tokens[:, :-1]
        return tokens


@checked()
@dataclass(frozen=True)
class Sampling:
    """Options of token choice, with the meaning and in the order of Transformers' `generate`.

    Attributes:
        temperature: the logits' divisor; 0 takes the most probable token.
        top_k: number of most probable tokens that are drawn from; None: all tokens.
        top_p: only the most probable tokens whose probabilities reach this sum; None: all tokens.
        repetition_penalty: logits of tokens that the row holds already are divided by it where they are positive, and
            multiplied where they are negative.
        guidance: classifier-free guidance. Rows b and b + B / 2 are a pair, the second one with the unconditional
            prompt. log p = unconditional + guidance * (conditional - unconditional), and both rows get the same token.
            1: rows are independent.
        seed: seed of the draws, below 2^64. Seed, row and position give the noise of a draw, by Gumbel-max.
        exact: refuse what needs exp: top_p, and a penalty of guided scores. With everything else equal logits give
            equal tokens on every machine (docs/reference/numerics.md).

    Raises:
        InputError: a value is out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    guidance: float = 1.0
    seed: int = 0
    exact: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "repetition_penalty", "guidance"):
            object.__setattr__(self, name, number(f"the {name}", getattr(self, name)))
        object.__setattr__(self, "seed", whole("the seed", self.seed, 0, _LARGEST_SEED))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", whole("the top_k", self.top_k, 1))
        if self.top_p is not None:
            object.__setattr__(self, "top_p", number("the top_p", self.top_p))
        least = limits.LEAST_TEMPERATURE
        drawn = least <= self.temperature < math.inf
        problems = [
            (self.temperature != 0 and not drawn, "temperature", f"0 (greedy), or a number from {least:g} on"),
            (self.top_p is not None and not 0 < self.top_p <= 1, "top_p", "a share between 0 and 1"),
            (not 0 < self.repetition_penalty < math.inf, "repetition_penalty", "a positive number; 1 has no effect"),
            (not math.isfinite(self.guidance), "guidance", "a number; 1 has no effect"),
        ]
        for wrong, name, expected in problems:
            if wrong:
                raise InputError(f"the {name} is {getattr(self, name)}", hint=f"give {expected}")
        check_kind("exact", self.exact, bool, "True or False")
        if self.exact and (self.top_p is not None or self._penalises_guided):
            what = "exact draws have neither top_p nor a repetition_penalty beside guidance"
            raise InputError(what, hint="leave them out, or draw with exact=False")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            what = "top_k and top_p limit a draw, but at temperature 0 nothing is drawn"
            raise InputError(what, hint="give a temperature, or leave top_k and top_p out")

    @property
    def _penalises_guided(self) -> bool:
        """Whether the sign of guided scores counts, which therefore have to be log probabilities."""
        return self.guidance != 1 and self.repetition_penalty != 1

    def start(self, prompt: Tokens) -> TokenChoice:
        """Return the chooser of the tokens of one video; prompt: int64 [B, P] of all rows.

        Raises:
            InputError: guidance with an odd number of rows.
        """
        return TokenChoice(self, prompt)

    def scores(self, logits: NDArray[np.float32], seen: Tokens, position: int | None = None) -> Scores:
        """Return the processed scores [B, V], or [B / 2, V] with guidance; -inf where a token is left out.

        A token whose logit is -inf, in one row of a pair too, stays left out. Where logits are +inf, their tokens are
        equally probable, and all others are left out.

        Args:
            logits: float32 [B, V]. seen: token ids [B, T] that each row of the result holds already. position: of the
                logits, for errors.

        Raises:
            InputError: a logit is NaN, or a row leaves all tokens out.
        """
        return self.limited(self.processed(logits, seen, position))

    def processed(self, logits: NDArray[np.float32], seen: Tokens, position: int | None = None) -> Scores:
        """Return `scores` in which neither top_k nor top_p leaves a token out."""
        # float64 keeps the rounding of later operations far below the rounding of the float32 logits.
        scores = bounded(np.asarray(logits, np.float64), position, "logits")
        if self.guidance != 1:
            # A constant of a row moves no draw, and without one nothing is rounded but products and sums.
            scores = bounded(guided(scores, self.guidance, normalised=self._penalises_guided), position)
        if self.repetition_penalty != 1:
            held = np.zeros(scores.shape, bool)
            np.put_along_axis(held, seen[: len(scores)], True, axis=-1)
            with np.errstate(over="ignore"):  # a score beyond float64 is infinite, which `bounded` takes
                penalised = np.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
            scores = bounded(np.where(held, penalised, scores), position)
        if self.temperature not in (0, 1):
            with np.errstate(over="ignore"):
                scores = bounded(scores / self.temperature, position)
        return scores

    def limited(self, scores: Scores) -> Scores:
        """Return processed scores with -inf where top_k or top_p leaves a token out."""
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            # `partition` finds the k-th score without sorting the vocabulary. Scores equal to it all stay.
            least = np.partition(scores, -self.top_k, axis=-1)[:, -self.top_k, None]
            scores = np.where(scores < least, -np.inf, scores)
        return scores if self.top_p is None else self._nucleus(scores, self.top_p)

    @staticmethod
    def _nucleus(scores: Scores, share: float) -> Scores:
        """Return scores without the least probable tokens of sum 1 - share at most; the most probable token stays."""
        order = scores.argsort(-1, kind="stable")
        probabilities = np.exp(_log_softmax(np.take_along_axis(scores, order, -1)))
        # Scores are in rising order here, so the sum begins with the least probable tokens.
        drop = probabilities.cumsum(-1) <= 1 - share
        drop[:, -1] = False
        dropped = np.empty_like(drop)
        np.put_along_axis(dropped, order, drop, -1)
        return np.where(dropped, -np.inf, scores)


class TokenChoice:
    """Chooses the tokens of one video, in any order of the positions."""

    def __init__(self, sampling: Sampling, prompt: Tokens) -> None:
        self._sampling = sampling
        self._compiled: Callable[..., Tokens | None] | None = None
        self._paired = sampling.guidance != 1
        if self._paired and len(prompt) % 2:
            what = f"guidance pairs row b with row b + B / 2, but there are {count_text(len(prompt), 'row')}"
            raise InputError(what, hint="compile with an even batch_size, and give the unconditional prompts last")
        self._seen = prompt[: len(prompt) // 2] if self._paired else prompt
        self._position = prompt.shape[1] - 1
        self._begin: int | None = None
        self._noise: Noise | None = None

    def by(self, draw: Callable[..., Tokens | None]) -> TokenChoice:
        """Have `Stepper.draw` of a backend draw where it may; return this choice."""
        sampling = self._sampling
        warm = limits.LEAST_TEMPERATURE <= sampling.temperature <= 1 / limits.LEAST_TEMPERATURE
        if warm and sampling.top_p is None and sampling.guidance == sampling.repetition_penalty == 1:
            numbers = {"seed": sampling.seed, "top_k": sampling.top_k or 0}
            self._compiled = partial(draw, temperature=sampling.temperature, **numbers)
        return self

    def __call__(self, logits: NDArray[np.float32], position: int | None = None, part: int = 0) -> Tokens:
        """Return token ids int64 [B] for logits float32 [B, V].

        Args:
            position: of the logits; None: the prompt's last one, and one further with every call. part: number of the
                code, where a position has several.

        Raises:
            InputError: a logit is NaN, or a row leaves all tokens out.
        """
        place, self._position = self._position if position is None else position, self._position + 1
        tokens = self.several(logits[:, None], place, None, part)
        if self._sampling.repetition_penalty != 1:
            self._seen = np.concatenate([self._seen, tokens[: len(self._seen)]], 1)
        return tokens[:, 0]

    def several(self, logits: NDArray[np.float32], position: int, read: Tokens | None, part: int = 0) -> Tokens:
        """Return token ids int64 [B, N] of successive positions, for logits float32 [B, N, V].

        Args:
            position: of the first logits. read: the tokens int64 [B, N] that were read there; None: of one position,
                whose token is the last one that was chosen.

        Raises:
            InputError: a logit of the first position is NaN, or a row leaves all tokens out there. Where that is so at
                others, the first one's token is returned alone.
        """
        if self._compiled is not None:
            found = self._compiled(logits, position=position, code=part)
            if found is not None and found.min() >= 0:
                return found
        try:
            tokens = self._drawn(logits, position, read, part)
        except InputError:
            if logits.shape[1] == 1:
                raise
            return self.several(logits[:, :1], position, None if read is None else read[:, :1], part)
        return np.tile(tokens, (2, 1)) if self._paired else tokens

    def _drawn(self, logits: NDArray[np.float32], position: int, read: Tokens | None, part: int) -> Tokens:
        sampling, count = self._sampling, logits.shape[1]
        seen = self._seen if read is None or sampling.repetition_penalty == 1 else self._held(position, read)
        scores = sampling.processed(logits.reshape(-1, logits.shape[-1]), seen, position)
        if sampling.temperature == 0:
            return scores.argmax(-1).reshape(-1, count)
        if self._noise is None:
            self._noise = _noise(sampling.seed, len(scores) // count, scores.shape[1])
        noise = self._noise(position, count, part).reshape(scores.shape)
        with np.errstate(over="ignore"):
            sums = sampling.limited(scores) * LOG2_E + noise
        return sums.argmax(-1).reshape(-1, count)

    def _held(self, position: int, read: Tokens) -> Tokens:
        """Return the tokens int64 [B * N, T] that each row holds once it has read those at its position."""
        rows, count = len(self._seen), read.shape[1]
        begin = position - self._seen.shape[1] + 1 if self._begin is None else self._begin
        self._begin, self._seen = begin, np.concatenate([self._seen[:, : position - begin], read[:rows]], 1)
        held = np.repeat(self._seen[:, None], count, 1)
        for k in range(count - 1):  # what follows a row is not there yet; its first token is
            held[:, k, held.shape[2] - count + k + 1 :] = held[:, k, :1]
        return held.reshape(rows * count, -1)


def _log_softmax(scores: Scores) -> Scores:
    shifted = scores - scores.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def bounded(scores: Scores, position: int | None, what: str = "scores") -> Scores:
    """Return scores [B, V] whose largest ones are finite: of a row that holds +inf, 0 there and -inf elsewhere.

    Raises:
        InputError: a score is NaN, or all of a row are -inf.
    """
    top = scores.max(-1, keepdims=True)
    if np.isfinite(top).all():
        return scores
    for row in np.flatnonzero(~(top > -np.inf))[:1].tolist():
        place = f"row {row}" if position is None else f"row {row}, position {position}"
        if (unknown := np.flatnonzero(np.isnan(scores[row]))).size:
            hint = "the model's weights or inputs are not finite there, or overflow: check them, or compile to float32"
            raise InputError(f"{place}: the logit of token {unknown[0]} is NaN", hint=hint)
        hint = "the model, one row of a pair of guidance, or a penalty leaves every token out: leave it one"
        raise InputError(f"{place}: the {what} of all tokens are -inf", hint=hint)
    return np.where(top < np.inf, scores, np.where(scores == np.inf, 0.0, -np.inf))


def guided(scores: Scores, guidance: float, *, normalised: bool = True) -> Scores:
    """Return scores [B / 2, V] of classifier-free guidance; -inf where one row of a pair has it. scores: `bounded`.

    normalised: of log probabilities; else of the scores, which differ by a constant of each row.
    """
    conditional, unconditional = np.split(_log_softmax(scores) if normalised else scores, 2)
    with np.errstate(over="ignore", invalid="ignore"):
        combined = unconditional + guidance * (conditional - unconditional)
    return np.where(np.minimum(conditional, unconditional) > -np.inf, combined, -np.inf)


class _Function:
    """A caller's sampler. keyed: it takes the position too, so that a draw may be repeated."""

    def __init__(self, sample: Callable[..., Any], prompt: Any, rows: int) -> None:
        self._sample, self._prompt, self._rows = sample, prompt, rows
        try:
            self.keyed = "position" in signature(sample).parameters
        except ValueError:  # a function of C may have no signature
            self.keyed = False

    def __call__(self, logits: Any, position: int | None = None, part: int = 0) -> Tokens:
        """Return token ids int64 [B] of logits [B, V]."""
        given = like(self._prompt, logits)
        return _chosen(self._sample(given, position) if self.keyed else self._sample(given), self._rows)

    def several(self, logits: Any, position: int, read: Tokens | None, part: int = 0) -> Tokens:
        """Return token ids int64 [B, N]; see TokenChoice.several. Fewer where the function raises behind the first."""
        found = [self(np.array(logits[:, 0]), position)]
        with suppress(Exception):
            found.extend(self(np.array(logits[:, k]), position + k) for k in range(1, logits.shape[1]))
        return np.stack(found, 1)


def chooser(
    sample: Sampler | Sampling | None, prompt: Any, ids: Tokens, draw: Callable[..., Tokens | None] | None = None
) -> Choose:
    """Return what chooses tokens by logits and their position; draw: `Stepper.draw` of the backend.

    A function of the caller's gets logits of the prompt's kind, and their position if it has a parameter of that name.
    """
    if sample is None or isinstance(sample, Sampling):
        sample = (sample or Sampling(temperature=0)).start(ids)
    if isinstance(sample, TokenChoice) and draw is not None:
        return sample.by(draw)
    if isinstance(sample, Choose):
        return sample
    check_function("sample", sample)
    return _Function(sample, prompt, len(ids))


def _chosen(tokens: Any, rows: int) -> Tokens:
    """Return the tokens that a caller's sampler chose, int64 [B]."""
    array = to_numpy(tokens)
    if not np.issubdtype(array.dtype, np.integer) or array.shape != (rows,):
        what = f"the sampler returned {array.dtype} {list(array.shape)}"
        raise InputError(what, hint=f"return one token id per row, int64 [{rows}]")
    return array.astype(np.int64)
