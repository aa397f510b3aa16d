"""Embedding tables of bfloat16 values: stored as such where that changes nothing."""

import copy

import numpy as np
import pytest
import torch
from torch import fx

from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import get_attribute, is_op
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import Bfloat16Embedding, QuantizeW8A8

from .tiny import after, logits, prefill_logits

TABLE = "embed.weight"


def with_table(change: float = 0.0) -> DecoderProgram:
    """The tiny decoder, its table rounded to bfloat16, and one value moved by `change`."""
    program = after(*analysis_pipeline())
    tables = {id(t): t for t in (get_attribute(module, TABLE) for module in program.graphs())}
    for table in tables.values():
        assert isinstance(table, torch.Tensor)
        table.data.copy_(table.bfloat16().float())
        table.data[-1, -1] += change
    return program


def narrowed(program: DecoderProgram) -> DecoderProgram:
    return run_pipeline(copy.deepcopy(program), [Bfloat16Embedding()])


def test_a_table_of_bfloat16_values_is_halved_and_no_logit_changes() -> None:
    before = with_table()
    program = narrowed(before)
    assert program.params[f"{TABLE}_bf16"].dtype == torch.bfloat16
    assert TABLE not in program.params
    assert program.params.nbytes() == before.params.nbytes() - before.params[TABLE].nbytes // 2
    np.testing.assert_array_equal(logits(program), logits(before))
    np.testing.assert_array_equal(prefill_logits(program), prefill_logits(before))
    assert program.sites[0].entry in {n.name for n in program.graph_module.graph.nodes}


def test_one_value_that_is_no_bfloat16_keeps_the_table() -> None:
    program = narrowed(with_table(change=2.0**-20))
    assert program.params[TABLE].dtype == torch.float32
    assert f"{TABLE}_bf16" not in program.params


@pytest.mark.parametrize("quantise", [False, True])
def test_a_table_that_is_the_head_too_is_kept_until_the_head_is_quantised(quantise: bool) -> None:
    program = with_table()
    nodes: dict[str, fx.Node] = {}
    for module in program.graphs():
        nodes = {str(n.target): n for n in module.graph.nodes if n.op == "get_attr"}
        nodes["head.weight"].replace_all_uses_with(nodes[TABLE])
        module.graph.erase_node(nodes["head.weight"])
    assert any(is_op(user, torch.ops.aten.linear) for user in nodes[TABLE].users)
    if quantise:
        run_pipeline(program, [QuantizeW8A8()])
    assert (f"{TABLE}_bf16" in narrowed(program).params) == quantise
