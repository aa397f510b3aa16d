"""quantize-kv-cache: types and row sizes of the caches, and nothing else."""

import copy

import pytest
import torch

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.passes.caches import QuantizeKvCache, SparsifyAttention
from fastcar_compile.passes.pipeline import analysis_pipeline

from .tiny import after

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
