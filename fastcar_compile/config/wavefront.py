"""Wavefront decoding: several image rows of a frame at once, each `lag` columns behind the one above it.

The order is that of DiagD (arXiv 2503.14070) and of MineWorld (arXiv 2504.08388, "parallel decoding"). A token sees
every token that comes before it in raster order and is known by then.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, cast

from pydantic import StrictInt

from fastcar_compile.config.listing import Listing, Needs
from fastcar_compile.errors import InputError
from fastcar_compile.support.values import checked, shown, whole


@dataclass(frozen=True)
class WaveRow:
    """One row of a launch: the forward of one token of a frame's grid.

    Attributes:
        token: place of the input token in the grid, in raster order.
        place: place whose position the forward has; another one than `token` for the query that predicts the first
            column of an image row, whose raster predecessor is not known yet.
        predicts: place of the token that its logits give; the number of the grid's tokens: the token behind the frame.
            None: that token is known.
        spans: ranges of places that it sees, begin and end; the first one begins at the start of the sequence.
    """

    token: int
    place: int
    predicts: int | None
    spans: tuple[tuple[int, int], ...]

    @property
    def extra(self) -> bool:
        """Whether it is the query for a first column: it keeps nothing of replay, as its token is at another place."""
        return self.token != self.place


@checked()
@dataclass(frozen=True)
class Wavefront:
    """The order in which the tokens of a frame are decoded.

    Args:
        grid: image rows and columns of a frame, such as 8x8, of which several rows are decoded at once.
        lag: columns that an image row is behind the one above it. As many as there are columns is raster order.
        lead: tokens of a frame in front of its grid, such as an action. They are decoded one by one.
        prefix: tokens in front of the first frame, such as a text.

    Raises:
        InputError: a number is not whole, or is out of range.
    """

    grid: tuple[StrictInt, StrictInt]
    lag: Annotated[StrictInt, Needs("grid")] = 2
    lead: Annotated[StrictInt, Needs("grid"), Listing(expert=True)] = 0
    prefix: Annotated[StrictInt, Needs("grid"), Listing(expert=True)] = 0

    def __post_init__(self) -> None:
        grid = cast("list[Any]", self.grid)
        if not isinstance(cast("Any", grid), tuple | list) or len(grid) != 2:
            raise InputError(f"the grid is {shown(grid)}", where="Wavefront", hint="give (rows, columns)")
        sides = zip(("the grid's rows", "the grid's columns"), grid, strict=True)
        object.__setattr__(self, "grid", tuple(whole(name, side, 1) for name, side in sides))
        for name, least in (("lag", 1), ("lead", 0), ("prefix", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        if self.lag > self.grid[1]:
            hint = f"give at most {self.grid[1]}, the columns of the grid, which is raster order"
            raise InputError(f"lag is {self.lag}", where="Wavefront", hint=hint)

    def __str__(self) -> str:
        height, width = self.grid
        steps, raster = len(self.launches) + self.lead, self.frame
        return f"{height} x {width} tokens, lag {self.lag}: {steps} decode steps a frame, {raster} in raster order"

    @property
    def size(self) -> int:
        """Tokens of the grid."""
        return self.grid[0] * self.grid[1]

    @property
    def frame(self) -> int:
        """Tokens of a frame."""
        return self.lead + self.size

    def begins(self, position: int) -> bool:
        """Whether the token at a position is the first one of a frame's grid."""
        return position >= self.prefix and (position - self.prefix) % self.frame == self.lead

    @cached_property
    def launches(self) -> tuple[tuple[WaveRow, ...], ...]:
        """The decode steps of a frame's grid, its rows by place: lag * (rows - 1) + columns of them."""
        return tuple(tuple(self._rows(n)) for n in range(self.lag * (self.grid[0] - 1) + self.grid[1]))

    @property
    def rows(self) -> int:
        """Rows of each video that a decoder has to have: `compile(rows=…)` takes at least so many."""
        return max(len(rows) for rows in self.launches)

    def _rows(self, n: int) -> Iterator[WaveRow]:
        """Yield the rows of decode step n: image row y reads column n - lag * y."""
        height, width = self.grid
        for y in range(height):
            x = n - self.lag * y
            if 0 <= x < width:
                place = y * width + x
                # The last column's successor begins the next image row, which an extra query has predicted long ago.
                known = x == width - 1 and self.lag < width and y < height - 1
                yield WaveRow(place, place, None if known else place + 1, self._seen(n, y, place))
            if n == self.lag * (y + 1) - 1 and self.lag < width and y < height - 1:
                # The last known token of row y, at the position of its last one, predicts the first one of row y + 1.
                place = (y + 1) * width - 1
                yield WaveRow(y * width + x, place, place + 1, self._seen(n, y, place))

    def _seen(self, n: int, y: int, place: int) -> tuple[tuple[int, int], ...]:
        """Return what a token at `place`, in row y, sees in decode step n: what it follows, and itself."""
        width = self.grid[1]
        counts = [min(max(n - self.lag * above + 1, 0), width) for above in range(y + 1)]
        found = [(above * width, above * width + count) for above, count in enumerate(counts)]
        found.append((place, place + 1))
        spans = [(0, 0)]  # what comes before the grid
        for begin, end in found:
            if begin <= spans[-1][1] and end > begin:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            elif end > begin:
                spans.append((begin, end))
        return tuple(spans)

    def problems(self, frame: int, rows: int | None, sparse: bool) -> list[InputError]:
        """Return why a decoder cannot decode in this order.

        Args:
            frame: its tokens per frame. rows: its rows of each video. sparse: whether its caches are rings.
        """
        found: list[InputError] = []
        if self.frame != frame:
            what = f"a frame of {self.grid[0]} x {self.grid[1]} tokens and {self.lead} in front has {self.frame}"
            found.append(InputError(f"{what}, the decoder's has {frame}", hint="give another grid, or lead"))
        if self.rows > (rows or 1):
            what = f"lag {self.lag} needs {self.rows} rows of each video, the decoder has {rows or 1}"
            found.append(InputError(what, hint=f"compile with rows={self.rows}"))
        if self.rows > 1 and sparse:
            what = "a wavefront needs every position in the cache"
            found.append(InputError(what, hint="compile without sparse attention"))
        return found
