"""Token choice: a sampler takes logits [B, V] as numpy or torch and returns token ids int64 [B]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.exact import numerators
from fastcar_compile.runtime.inputs import like, to_numpy
from fastcar_compile.support import limits
from fastcar_compile.support.values import check_function, check_kind, checked, number, whole

Sampler = Callable[[Any], Any]
"""logits float32 [B, V] -> token ids int64 [B]."""

_LARGEST_SEED = (1 << 128) - 1
"""Bits that numpy's generator keeps."""

_LOG2_E = math.log2(math.e)

Scores = NDArray[np.float64]
Tokens = NDArray[np.int64]


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
        seed: seed of the draws. The same seed gives the same tokens.
        exact: draw with integer weights, so that equal logits give equal tokens on every machine
            (docs/reference/numerics.md); with temperature and top_k alone.

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
        if self.exact and (self.top_p is not None or self.repetition_penalty != 1 or self.guidance != 1):
            what = "exact draws are defined for temperature and top_k alone"
            raise InputError(what, hint="leave top_p, repetition_penalty and guidance out, or draw with exact=False")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            what = "top_k and top_p limit a draw, but at temperature 0 nothing is drawn"
            raise InputError(what, hint="give a temperature, or leave top_k and top_p out")

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
        # float64 keeps the rounding of later operations far below the rounding of the float32 logits.
        scores = bounded(np.asarray(logits, np.float64), position, "logits")
        if self.guidance != 1:
            scores = bounded(guided(scores, self.guidance), position)
        if self.repetition_penalty != 1:
            held = np.zeros(scores.shape, bool)
            np.put_along_axis(held, seen[: len(scores)], True, axis=-1)
            with np.errstate(over="ignore"):  # a score beyond float64 is infinite, which `bounded` takes
                penalised = np.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
            scores = bounded(np.where(held, penalised, scores), position)
        if self.temperature > 0:
            with np.errstate(over="ignore"):
                scores = bounded(scores / self.temperature, position)
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            # `partition` finds the k-th score without sorting the vocabulary. Scores equal to it all stay.
            least = np.partition(scores, -self.top_k, axis=-1)[:, -self.top_k, None]
            scores = np.where(scores < least, -np.inf, scores)
        return scores if self.top_p is None else self._nucleus(scores, self.top_p)

    def few(self, logits: NDArray[np.float32]) -> int | None:
        """Return top_k, where it alone decides which tokens of a single row may be drawn; else None."""
        alone = self.top_p is None and self.repetition_penalty == self.guidance == 1 and self.temperature > 0
        return self.top_k if alone and self.top_k is not None and self.top_k < logits.size == logits.shape[1] else None

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
    """Chooses the tokens of one video, one position after the other."""

    def __init__(self, sampling: Sampling, prompt: Tokens) -> None:
        self._sampling = sampling
        self._paired = sampling.guidance != 1
        if self._paired and len(prompt) % 2:
            what = f"guidance pairs row b with row b + B / 2, but there are {count_text(len(prompt), 'row')}"
            raise InputError(what, hint="compile with an even batch_size, and give the unconditional prompts last")
        self._seen = prompt[: len(prompt) // 2] if self._paired else prompt
        self._random = np.random.default_rng(sampling.seed)
        self._position = prompt.shape[1] - 1

    def __call__(self, logits: NDArray[np.float32], position: int | None = None) -> Tokens:
        """Return token ids int64 [B] for logits float32 [B, V].

        Args:
            position: of the logits, for errors; None: the prompt's last one, and one further with every call.

        Raises:
            InputError: a logit is NaN, or a row leaves all tokens out.
        """
        position, self._position = self._position if position is None else position, self._position + 1
        if (few := self._sampling.few(logits)) is not None:
            return self._drawn_among(few, bounded(np.asarray(logits, np.float64), position, "logits")[0])
        scores = self._sampling.scores(logits, self._seen, position)
        tokens = (scores.argmax(-1) if self._sampling.temperature == 0 else self._drawn(scores)).astype(np.int64)
        if self._sampling.repetition_penalty != 1:
            self._seen = np.concatenate([self._seen, tokens[:, None]], 1)
        return np.tile(tokens, 2) if self._paired else tokens

    def _drawn(self, scores: Scores) -> Tokens:
        """Return the first token of every row whose cumulated probability exceeds a uniform number."""
        weights = self._weights(scores - scores.max(-1, keepdims=True)).cumsum(-1)
        # Scaling the random number by the total costs one product. Normalising would divide every weight.
        reached = self._random.random((len(weights), 1)) * weights[:, -1:]
        return (weights > reached).argmax(-1)

    def _weights(self, differences: Scores) -> Scores:
        """Return e^differences of at most 0, so that no weight overflows; in units of 2^-24 where they are integers."""
        if not self._sampling.exact:
            return np.exp(differences)
        # No order of the sum, and no library's exp, changes an integer.
        return numerators(differences * _LOG2_E).astype(np.float64)

    def _drawn_among(self, few: int, logits: Scores) -> Tokens:
        """Return the result of `_drawn` for one row, in half the time: tokens that are left out add zero to the sum."""
        scores = logits / self._sampling.temperature
        # `kept` is in the order of the ids, as the weights of `_drawn` are: the same number draws the same token.
        kept = np.flatnonzero(scores >= np.partition(scores, -few)[-few])
        chosen = scores[kept]
        weights: Scores = self._weights(chosen - chosen.max()).cumsum()
        place = int(np.searchsorted(weights, float(self._random.random() * weights[-1]), "right"))
        return kept[place : place + 1].astype(np.int64)


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


def guided(scores: Scores, guidance: float) -> Scores:
    """Return scores [B / 2, V] of classifier-free guidance; -inf where one row of a pair has it. scores: `bounded`."""
    conditional, unconditional = np.split(_log_softmax(scores), 2)
    with np.errstate(over="ignore", invalid="ignore"):
        combined = unconditional + guidance * (conditional - unconditional)
    return np.where(np.minimum(conditional, unconditional) > -np.inf, combined, -np.inf)


def chooser(sample: Sampler | Sampling | None, prompt: Any, ids: Tokens) -> Callable[..., Tokens]:
    """Return a function from logits and, if it is known, their position to token ids int64 [B].

    A function of the caller's gets logits of the prompt's kind.
    """
    if sample is None or isinstance(sample, Sampling):
        return (sample or Sampling(temperature=0)).start(ids)
    check_function("sample", sample)

    def choose(logits: Any, _position: int | None = None) -> Tokens:
        return _chosen(sample(like(prompt, logits)), len(ids))

    return choose


def _chosen(tokens: Any, rows: int) -> Tokens:
    """Return the tokens that a caller's sampler chose, int64 [B]."""
    array = to_numpy(tokens)
    if not np.issubdtype(array.dtype, np.integer) or array.shape != (rows,):
        what = f"the sampler returned {array.dtype} {list(array.shape)}"
        raise InputError(what, hint=f"return one token id per row, int64 [{rows}]")
    return array.astype(np.int64)
