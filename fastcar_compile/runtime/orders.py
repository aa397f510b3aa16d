"""The orders in which a session decodes: one by one, as a wavefront, or by Jacobi decoding."""

from collections.abc import Callable, Iterator
from typing import Any

from fastcar_compile.config.jacobi import Jacobi
from fastcar_compile.config.wavefront import Wavefront
from fastcar_compile.errors import InputError
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.runtime.backends.base import Array
from fastcar_compile.runtime.forwards import Forwards
from fastcar_compile.runtime.sampling import Choose
from fastcar_compile.runtime.windows import WindowChoice

Order = Wavefront | Jacobi | None
"""None: one token after the other, in raster order."""


def check_order(order: Order, config: DecoderConfig, *, ragged: bool, codes: bool) -> None:
    """Raise InputError where a decoder cannot decode in an order.

    Args:
        ragged: prompts have different lengths. codes: a position has several codes.
    """
    if order is None:
        return
    if isinstance(order, Jacobi):
        problems = order.problems(config.tokens_per_frame, config.rows)
        if codes and order.rows is not None:
            problems.append(InputError("Jacobi decoding guesses one code a token", hint="give jacobi=Jacobi(window=1)"))
    else:
        problems = order.problems(config.tokens_per_frame, config.rows, config.ring is not None)
        if order.rows > 1 and (ragged or codes):
            what = "a wavefront needs prompts of one length and one code a token"
            hint = "decode in raster order: Wavefront with as much lag as columns"
            problems.insert(0, InputError(what, hint=hint))
    for problem in problems:
        raise problem


class Asked(Choose):
    """A chooser of the caller's, whose tokens are checked: it may choose ids that the decoder does not have.

    Args:
        ask: calls a function of the caller's. known: returns tokens int64 [B], or raises InputError; None: any are.
    """

    def __init__(self, choose: Choose, ask: Callable[..., Any], known: Callable[[Array], Array] | None) -> None:
        self._choose, self._ask, self._known = choose, ask, known

    def __call__(self, logits: Array, position: int, part: int = 0) -> Array:
        """Return tokens int64 [B]; see Choose."""
        tokens: Array = self._ask(self._choose, logits, position, part)
        return tokens if self._known is None else self._known(tokens)

    def several(self, logits: Array, position: int, read: Array | None, part: int = 0) -> Array:
        """Return tokens int64 [B, N]; see Choose. Those behind an unknown one are left out."""
        tokens: Array = self._ask(self._choose.several, logits, position, read, part)
        while self._known is not None:
            try:
                return self._known(tokens)
            except InputError:
                if tokens.shape[1] == 1:
                    raise
                tokens = tokens[:, :-1]
        return tokens


def tokens_of(
    run: Forwards, config: DecoderConfig, order: Order, logits: Array, count: int, choose: Asked
) -> Iterator[Array]:
    """Return tokens in an order; see Forwards.generate."""
    if not isinstance(order, Jacobi) or order.rows is None:
        front = order if isinstance(order, Wavefront) and order.rows > 1 else None
        return run.generate(logits, count, choose, front)
    if order not in run.windows:
        run.windows[order] = WindowChoice(order, min(config.rows or 1, config.tokens_per_frame))
    return run.guess(logits, count, choose, run.windows[order])
