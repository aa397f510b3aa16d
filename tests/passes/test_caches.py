"""Rings and types of the caches: sparse-attention, window-caches and quantize-kv-cache."""

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import argument_names, is_op
from fastcar_compile.ir.types import Ring, StateRole
from fastcar_compile.passes.caches import QuantizeKvCache, SparsifyAttention, WindowCaches
from fastcar_compile.passes.decode_rows import DecodeRows
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.offload import OffloadGate
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.repeat_layers import RepeatLayers

from .laws import everything
from .tiny import BATCH, CHUNK, FRAME, ROWS, TinyBlock, Windowed, after, captured, decode, logits, prefill_logits

# sparse-attention: ring caches and window attention in both graphs, and the one key that a score still reads.


fastcar = torch.ops.fastcar
SPARSE, REPLAY = SparsifyAttention(sinks=1, window=2), InsertReplay((0.0,))


def sparse(*before: object, item: SparsifyAttention = SPARSE) -> DecoderProgram:
    return after(*analysis_pipeline(), *before, item)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("gate", "rows"), [("tas", FRAME + CHUNK), ("input_delta", CHUNK + 1)])
def test_the_ring_holds_what_is_read(gate: str, rows: int) -> None:
    """A gate that reads no key needs none beyond the window; the chunk's other tokens come on top."""
    program = sparse(InsertReplay((0.0,), gate=gate))
    assert program.config.ring == Ring(1, 2, rows)
    caches = [s for s in program.state if s.role in (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)]
    assert [s.shape for s in caches] == [(BATCH, 1, 1 + rows, 4)] * 2
    for graph in program.graphs():
        shapes = {str(n.target): tuple(n.meta["val"].shape) for n in graph.graph.nodes if n.op == "placeholder"}
        assert all(shapes[s.name] == s.shape for s in caches)
    assert sparse().config.ring == Ring(1, 2, 2 + CHUNK - 1)


def test_both_orders_with_replay_decide_and_compute_alike() -> None:
    wide = SparsifyAttention(sinks=1, window=FRAME + 1)
    first, second = sparse(REPLAY, item=wide), after(*analysis_pipeline(), wide, REPLAY)
    assert first.config.ring == second.config.ring
    for a, b in zip(decode(first, 0.0), decode(second, 0.0), strict=True):
        assert (a.decisions == b.decisions).all()
        assert (a.scores == b.scores).all()
        assert (a.logits == b.logits).all()


def test_replay_after_a_ring_that_drops_its_key_is_refused() -> None:
    with pytest.raises(
        CompileError, match=r"gate tas reads the key of 3 tokens ago.*ring of 5 rows.*one of 3"
    ) as caught:
        after(*analysis_pipeline(), SPARSE, REPLAY)
    assert caught.value.hint == "name insert-replay before sparse-attention and window-caches in the pipeline"
    after(*analysis_pipeline(), SPARSE, InsertReplay((0.0,), gate="input_delta"))


def test_scores_are_those_of_the_full_cache_in_the_first_layer() -> None:
    """Queries and keys of one layer, which no window has touched: the key of t - F is there after the window left."""
    full = decode(after(*analysis_pipeline(), REPLAY), 0.0)
    ring = decode(sparse(REPLAY), 0.0)
    assert len(full) > FRAME + 2
    for a, b in zip(full, ring, strict=True):
        assert (a.scores == b.scores).all()
        assert (a.decisions == b.decisions).all()


def test_offloaded_gate_gets_the_row() -> None:
    """Before and after offload-gate, the unit is given the same row of the ring."""
    before = sparse(REPLAY, OffloadGate())
    later = run_pipeline(sparse(REPLAY), [OffloadGate()])
    for program in (before, later):
        (call,) = [n for n in program.graph_module.graph.nodes if is_op(n, fastcar.offloaded_gate)]
        (row,) = [n for n in program.graph_module.graph.nodes if is_op(n, fastcar.ring_row)]
        names = argument_names(call)
        assert call.args[names.index("position")] is row
        assert call.args[names.index("stride")] == 0
        assert row.args[1:] == (FRAME, 1, FRAME + CHUNK)


@pytest.mark.parametrize(
    ("program", "item", "text"),
    [
        (lambda: captured(), SPARSE, "finds no attention sites"),
        (lambda: sparse(), SparsifyAttention(2, 2), "sparse-attention ran already, as Ring"),
        (lambda: after(*analysis_pipeline()), SparsifyAttention(1, 0), "a window of 0 and 1 sinks"),
        (lambda: after(*analysis_pipeline()), SparsifyAttention(1, 2, cast("Any", "none")), "positions are 'none'"),
        (lambda: after(*analysis_pipeline()), SparsifyAttention(1, 2, "cache"), "needs rotary embeddings"),
        (lambda: after(*analysis_pipeline()), SparsifyAttention(2, ROWS - 2), f"sees all of the {ROWS} positions"),
    ],
)
def test_refusals(program: object, item: SparsifyAttention, text: str) -> None:
    given = copy.deepcopy(program())  # pyright: ignore[reportCallIssue]
    before = everything(given)
    with pytest.raises(CompileError, match=text) as caught:
        item.apply(given)
    assert caught.value.hint
    if item.positions != "cache":
        assert everything(given) == before


def test_layers_are_repeated_before() -> None:
    with pytest.raises(CompileError, match="repeat-layers does not copy the ring caches") as caught:
        RepeatLayers("blocks", 4).apply(sparse())
    assert caught.value.hint == "name repeat-layers before sparse-attention in the pipeline"


# window-caches: layers with a sliding window of their own keep what it still reads, and what a score reads.


WINDOWS = (Windowed, TinyBlock)
BOTH = InsertReplay((0.0, 0.0))


class Narrow(Windowed):
    """A window shorter than a frame."""

    def mask(self, position: Tensor) -> Tensor:
        return super().mask(position) & (torch.arange(ROWS)[None, :] > position[:, None] - 2)


class Long(TinyBlock):
    """A window that hides only the first position, and only from the last one."""

    def mask(self, position: Tensor) -> Tensor:
        return super().mask(position) & (torch.arange(ROWS)[None, :] > position[:, None] - (ROWS - 1))


def key_rows(program: DecoderProgram) -> list[int]:
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
    assert key_rows(program) == [rows, ROWS]
    kept = [s.sinks for s in program.state if s.role is StateRole.KEY_CACHE]
    assert kept == [0 if rows < ROWS else None, None], "only a ring has sinks"
    assert [site.attention.window for site in program.sites] == [{Windowed: 4, Narrow: 2, Long: ROWS - 1}[block], None]


@pytest.mark.parametrize("block", [Windowed, Narrow, Long])
def test_logits_are_those_of_the_mask(block: type[TinyBlock]) -> None:
    own, blocks = captured(block, TinyBlock), (block, TinyBlock)
    program = after(*analysis_pipeline(), WindowCaches(), blocks=blocks)
    np.testing.assert_allclose(logits(program), logits(own), atol=1e-6, rtol=0)
    np.testing.assert_allclose(prefill_logits(program), prefill_logits(own), atol=1e-6, rtol=0)


def test_a_ring_holds_what_rows_of_a_video_write_together() -> None:
    """A frame behind the window, in which guesses are; of a prompt, as many tokens as there are rows."""
    program = after(*analysis_pipeline(), WindowCaches(2), DecodeRows(2), blocks=WINDOWS)
    assert key_rows(program) == [4 + max(CHUNK, FRAME) - 1, ROWS]
    more = max(CHUNK, FRAME) + 1
    assert key_rows(after(*analysis_pipeline(), WindowCaches(more), blocks=WINDOWS))[0] == 4 + more - 1


def test_replay_decides_as_with_full_caches() -> None:
    """The key of t - F is there after it left the window."""
    before = after(*analysis_pipeline(), BOTH, blocks=(Narrow, TinyBlock))
    later = after(*analysis_pipeline(), BOTH, WindowCaches(), blocks=(Narrow, TinyBlock))
    for a, b in zip(decode(before, 0.0), decode(later, 0.0), strict=True):
        assert (a.scores == b.scores).all()
        assert (a.decisions == b.decisions).all()
        np.testing.assert_allclose(a.logits, b.logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("window", "seen"), [(3, [(1, 3), (1, 3)]), (6, [(0, 4), (1, 6)])])
def test_of_two_windows_the_smaller_one_holds(window: int, seen: list[tuple[int, int]]) -> None:
    program = after(*analysis_pipeline(), SparsifyAttention(1, window), WindowCaches(), blocks=WINDOWS)
    assert [(s.attention.sinks, s.attention.window) for s in program.sites] == seen
    assert key_rows(program) == [sinks + own + CHUNK - 1 for sinks, own in seen]
    assert [s.sinks for s in program.state if s.role is StateRole.VALUE_CACHE] == [sinks for sinks, _ in seen]


# quantize-kv-cache: types and row sizes of the caches, and nothing else.


fastcar = torch.ops.fastcar
HEAD_DIM = 4


ROW_BYTES = {"float16": 2 * HEAD_DIM, "bfloat16": 2 * HEAD_DIM, "int8": HEAD_DIM + 1}


@pytest.mark.parametrize(("dtype", "row_bytes"), ROW_BYTES.items())
def test_types_change_and_nothing_else(dtype: str, row_bytes: int) -> None:
    before = after(*analysis_pipeline())
    narrow = run_pipeline(copy.deepcopy(before), [QuantizeKvCache(dtype)])
    assert narrow.log[-1] == f'quantize-kv-cache{{"dtype": "{dtype}"}}: modified'
    for old, new in zip(before.graphs(), narrow.graphs(), strict=True):
        for one, other in zip(old.graph.nodes, new.graph.nodes, strict=True):
            assert (one.name, one.target, str(one.args)) == (other.name, other.target, str(other.args))
        types = [str(getattr(n.meta.get("val"), "dtype", "")) for n in new.graph.nodes]
        assert types.count(f"torch.{dtype}") == 2 * len(before.state)  # placeholder and write of every cache
    wide = 4 * HEAD_DIM
    assert [s.nbytes * wide for s in narrow.state] == [s.nbytes * row_bytes for s in before.state]


def test_order_of_window_and_type_does_not_matter() -> None:
    window, narrow = SparsifyAttention(2, 6), QuantizeKvCache("int8")
    assert after(*analysis_pipeline(), window, narrow).state == after(*analysis_pipeline(), narrow, window).state


def test_a_cache_that_something_else_reads_is_refused() -> None:
    taken = after(*analysis_pipeline())
    graph = taken.graph_module.graph
    write = next(n for n in graph.nodes if n.target is fastcar.cache_write.default)
    with graph.inserting_after(write):
        node = graph.call_function(torch.ops.aten.neg.default, (write,))
    node.meta["val"] = write.meta["val"]
    with pytest.raises(CompileError, match=f"int8 caches: aten.neg.default reads {write.name} itself") as found:
        QuantizeKvCache("int8").apply(taken)
    assert found.value.hint == 'use kv="float32", or run quantize-kv-cache after normalize-state'


def test_a_type_that_no_cache_has() -> None:
    with pytest.raises(CompileError, match="no cache has the type 'int4'") as found:
        after(*analysis_pipeline(), QuantizeKvCache("int4"))
    assert found.value.hint == "use one of: bfloat16, float16, int8"
