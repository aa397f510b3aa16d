"""Coupled Jacobi decoding: several positions in one decode step, on guesses that are checked (arXiv 2510.24211)."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import StrictInt

from fastcar_compile.errors import InputError
from fastcar_compile.support.values import checked, shown, whole

AUTO_ROWS = 8
"""Rows that a decoder of `window="auto"` has by default: eight rows of int8 weights take hardly longer than one."""


@checked()
@dataclass(frozen=True)
class Jacobi:
    """Decode several positions of a video in one decode step, with the tokens of sequential decoding.

    Each row reads what is guessed of the token before it. The draw of a position has noise of its own (`Sampling`), so
    rows whose guesses were right give the tokens of sequential decoding, and the others the next guesses.

    Args:
        window: positions of a decode step, at most the decoder's rows and a frame; 1 is sequential decoding. "auto":
            the session takes as many as give the most tokens a second, by what it measures.

    Raises:
        InputError: the window is no whole number from 1 on, nor "auto".
    """

    window: StrictInt | Literal["auto"] = 8

    def __post_init__(self) -> None:
        given: Any = self.window
        if not isinstance(given, str):
            object.__setattr__(self, "window", whole("the window", given, 1))
        elif given != "auto":
            hint = 'give a number of positions, or "auto"'
            raise InputError(f"the window is {shown(given)}", where="Jacobi", hint=hint)

    def __str__(self) -> str:
        return f"Jacobi, window {self.window}"

    @property
    def rows(self) -> int | None:
        """Rows of each video that a decoder gets by default; None: one at a position that all videos share."""
        rows = AUTO_ROWS if isinstance(self.window, str) else self.window
        return None if rows == 1 else rows

    def problems(self, frame: int, rows: int | None) -> list[InputError]:
        """Return why a decoder cannot decode so; frame: its tokens per frame. rows: its rows of each video."""
        if isinstance(self.window, str):
            return []
        found: list[InputError] = []
        if self.window > (rows or 1):
            what = f"a window of {self.window} needs as many rows of each video, the decoder has {rows or 1}"
            found.append(InputError(what, where="Jacobi", hint=f"compile with rows={self.window}"))
        if self.window > frame:
            what = f"the window of {self.window} is longer than a frame of {frame} tokens"
            found.append(InputError(what, where="Jacobi", hint=f"give at most {frame}"))
        return found
