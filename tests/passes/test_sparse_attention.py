"""sparse-attention: ring caches and window attention in both graphs, and the one key that a score still reads."""

import copy
from typing import Any, cast

import pytest
import torch

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import argument_names, is_op
from fastcar_compile.ir.types import Ring, StateRole
from fastcar_compile.passes.caches import SparsifyAttention
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.offload import OffloadGate
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import everything
from .tiny import BATCH, CHUNK, FRAME, ROWS, after, captured, decode

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
