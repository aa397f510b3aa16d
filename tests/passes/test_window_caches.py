"""window-caches: layers with a sliding window of their own keep what it still reads, and what a score reads."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.types import StateRole
from fastcar_compile.passes.caches import SparsifyAttention, WindowCaches
from fastcar_compile.passes.decode_rows import DecodeRows
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline

from .tiny import CHUNK, FRAME, ROWS, TinyBlock, Windowed, after, captured, decode, logits, prefill_logits

WINDOWS = (Windowed, TinyBlock)
REPLAY = InsertReplay((0.0, 0.0))


class Narrow(Windowed):
    """A window shorter than a frame."""

    def mask(self, position: Tensor) -> Tensor:
        return super().mask(position) & (torch.arange(ROWS)[None, :] > position[:, None] - 2)


class Long(TinyBlock):
    """A window that hides only the first position, and only from the last one."""

    def mask(self, position: Tensor) -> Tensor:
        return super().mask(position) & (torch.arange(ROWS)[None, :] > position[:, None] - (ROWS - 1))


def rows_of(program: DecoderProgram) -> list[int]:
    return [s.shape[2] for s in program.state if s.role is StateRole.KEY_CACHE]


@pytest.mark.parametrize(
    ("block", "gate", "rows"),
    [
        (Windowed, "tas", 4 + CHUNK - 1),
        (Narrow, "tas", FRAME + 1 + CHUNK - 1),
        (Narrow, "input_delta", 2 + CHUNK - 1),
        (Long, "tas", ROWS),
    ],
)
def test_a_cache_holds_what_is_read(block: type[TinyBlock], gate: str, rows: int) -> None:
    """The other layer keeps all positions, as its attention reads them."""
    replay = InsertReplay((0.0, 0.0), gate=gate)
    program = after(*analysis_pipeline(), replay, WindowCaches(), blocks=(block, TinyBlock))
    assert rows_of(program) == [rows, ROWS]
    kept = [s.sinks for s in program.state if s.role is StateRole.KEY_CACHE]
    assert kept == [0 if rows < ROWS else None, None], "only a ring has sinks"
    assert [site.attention.window for site in program.sites] == [{Windowed: 4, Narrow: 2, Long: ROWS - 1}[block], None]


@pytest.mark.parametrize("block", [Windowed, Narrow, Long])
def test_logits_are_those_of_the_mask(block: type[TinyBlock]) -> None:
    own, blocks = captured(block, TinyBlock), (block, TinyBlock)
    program = after(*analysis_pipeline(), WindowCaches(), blocks=blocks)
    np.testing.assert_allclose(logits(program), logits(own), atol=1e-6, rtol=0)
    np.testing.assert_allclose(prefill_logits(program), prefill_logits(own), atol=1e-6, rtol=0)


def test_rows_of_a_video_are_within_a_frame() -> None:
    """So the ring holds a frame behind the window."""
    program = after(*analysis_pipeline(), WindowCaches(2), DecodeRows(2), blocks=WINDOWS)
    assert rows_of(program) == [4 + max(CHUNK, FRAME) - 1, ROWS]


def test_replay_decides_as_with_full_caches() -> None:
    """The key of t - F is there after it left the window."""
    before = after(*analysis_pipeline(), REPLAY, blocks=(Narrow, TinyBlock))
    later = after(*analysis_pipeline(), REPLAY, WindowCaches(), blocks=(Narrow, TinyBlock))
    for a, b in zip(decode(before, 0.0), decode(later, 0.0), strict=True):
        assert (a.scores == b.scores).all()
        assert (a.decisions == b.decisions).all()
        np.testing.assert_allclose(a.logits, b.logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("window", "seen"), [(3, [(1, 3), (1, 3)]), (6, [(0, 4), (1, 6)])])
def test_of_two_windows_the_smaller_one_holds(window: int, seen: list[tuple[int, int]]) -> None:
    program = after(*analysis_pipeline(), SparsifyAttention(1, window), WindowCaches(), blocks=WINDOWS)
    assert [(s.attention.sinks, s.attention.window) for s in program.sites] == seen
    assert rows_of(program) == [sinks + own + CHUNK - 1 for sinks, own in seen]
    assert [s.sinks for s in program.state if s.role is StateRole.VALUE_CACHE] == [sinks for sinks, _ in seen]
