"""The rows of a launch: the list at the beginning of the kernel's input (docs/reference/drs_table.md, "Rows")."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.codegen.hls.step_program.cache_layout import Sizes

Array = NDArray[Any]

ALL_ROWS = 0xFFFFFFFF
NO_STEP = 0xFFFFFFFF
"""Number of a forward that is no decode forward; -1 in 32 bits."""

ACTIVE_BIT = 16


@dataclass(frozen=True)
class Rows:
    """What a launch knows of its rows.

    Args:
        videos: that they belong to; row b is one of video b // (B / videos).
        position: int64 [B], of the token. step: int64 [B], number of the decode forward; -1: of a prompt.
        active: bool [B]; the kernel neither computes nor writes anything of another row.
        before: int32 [B]. Of short programs: replays in a row at this slot. Where a video has several rows: 1 + `step` of
            the row in the last launch, of which what it staged for replay is committed; 0: nothing is.
        spans: int64 [B, B / videos, 2], ranges of positions that each row sees. Unused where a video has one row.
    """

    videos: int
    position: Array
    step: Array
    active: Array
    before: Array
    spans: Array = field(repr=False)

    @classmethod
    def at(cls, sizes: Sizes, position: int = 0, step: int = -1, active: int = ALL_ROWS, count: int = 1) -> Rows:
        """Return the first `count` rows of each video at consecutive positions; each sees all up to its own.

        Args:
            active: bit b is 1: row b is there, if it is one of the first.
        """
        own, rows = sizes.rows // sizes.videos, np.arange(sizes.rows)
        positions, spans = position + rows % own, np.zeros((sizes.rows, own, 2), np.int64)
        spans[:, 0, 1] = positions + 1
        here = (rows % own < count) & (active >> rows & 1 == 1)
        return cls(sizes.videos, positions, np.full(len(rows), step), here, np.zeros(len(rows), np.int32), spans)

    @property
    def video(self) -> Array:
        """The video of each row, int64 [B]."""
        return np.arange(len(self.position)) // (len(self.position) // self.videos)

    @property
    def deciding(self) -> Array:
        """The active rows of a decode forward, bool [B]."""
        return self.active & (self.step >= 0)

    def words(self) -> NDArray[np.uint32]:
        """Return the list as memory words, uint32 [row_list_words, 4]."""
        lanes = (self.position, self.step, self.video | self.active.astype(np.int64) << ACTIVE_BIT, self.before)
        words = (np.stack(lanes, 1) & 0xFFFFFFFF).astype(np.uint32)
        own = self.spans.shape[1]
        if own == 1:
            return words
        # Two ranges to a word; an empty one fills the last.
        ranges = np.pad(self.spans, [(0, 0), (0, own % 2), (0, 0)]).astype(np.uint32)
        return np.concatenate([words, ranges.reshape(-1, 4)])
