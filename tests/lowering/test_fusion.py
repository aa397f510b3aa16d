"""The fusions on real graphs: a fused segment computes the same bits in PyTorch, and the program stays as it is."""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, fx

from fastcar_compile.codegen.segment import segment
from fastcar_compile.codegen.tvm.converters import CONVERTERS
from fastcar_compile.codegen.tvm.fusion import QUANTIZED_LINEARS
from fastcar_compile.codegen.tvm.pipeline import fuse
from fastcar_compile.ir.query import output_nodes
from fastcar_compile.ir.rewrite import set_outputs

from .programs import Case, program

fastcar = torch.ops.fastcar


def _operators(module: fx.GraphModule) -> Counter[str]:
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    return Counter(str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_function")


def _layer(case: Case) -> fx.GraphModule:
    source = program(case)
    return segment(source.graph_module)[1].copy()


def _inputs(module: fx.GraphModule) -> list[Tensor]:
    """Random weights and activations; a place in the sequence where rows replay."""
    torch.manual_seed(0)
    values = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
    return [
        torch.randn(tuple(v.shape)) if v.dtype.is_floating_point else torch.full(tuple(v.shape), 9, dtype=v.dtype)
        for v in values
    ]


@pytest.mark.parametrize(
    "case", [Case(), Case(quant="w8a8"), Case(gate="input_delta", max_chain=9), Case(gate="input_delta", batch=1)]
)
def test_a_fused_layer_has_the_same_bits(case: Case) -> None:
    """Also in the branches of its `cond`: the scores decide that every row computes, or that every row replays."""
    plain, fused = _layer(case), fuse(_layer(case))
    for shift in (-1e9, 1e9):
        inputs = [v + shift if tuple(v.shape) == (1,) and v.is_floating_point() else v for v in _inputs(plain)]
        for expected, found in zip(plain(*inputs), fused(*inputs), strict=True):
            assert torch.equal(expected, found)


def test_a_layer_is_fused() -> None:
    """Both norms and the gated product join the quantisation of their rows; that of the attention stands alone."""
    found = _operators(fuse(_layer(Case(quant="w8a8"))))
    expected = {"rotary": 2, "gated_quantize": 1, "integer_linear": 7, "quantize_rows": 1, "rms_norm_quantize": 2}
    assert {name: found[f"fastcar.{name}.default"] for name in expected} == expected
    assert not any("linear_w8a8" in name or name == "fastcar.rms_norm.default" for name in found)


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ("tas", {"gate": 0, "gate_and_count": 1, "keep_frame": 0, "slot_read": 1, "slot_write": 1}),
        ("input_delta", {"gate": 0, "gate_and_count": 1, "keep_frame": 1, "slot_read": 2, "slot_write": 0}),
    ],
)
def test_what_a_layer_keeps_is_fused(gate: str, expected: dict[str, int]) -> None:
    """The counter joins the gate; the two caches of a gate that compares the MLP's input are written together."""
    found = _operators(fuse(_layer(Case(gate=gate))))
    assert {name: found[f"fastcar.{name}.default"] for name in expected} == expected


def test_a_counter_with_another_reader_stays_apart() -> None:
    graph = copy.deepcopy(_layer(Case()))
    chain = next(n for n in graph.graph.nodes if n.target is fastcar.gate.default).args[3]
    set_outputs(graph.graph, [*output_nodes(graph.graph), chain])
    found = _operators(fuse(graph))
    assert (found["fastcar.gate.default"], found["fastcar.gate_and_count.default"]) == (1, 0)


def test_the_program_keeps_its_operators() -> None:
    source = program(Case(quant="w8a8"))
    before = _operators(source.graph_module)
    for part in segment(source.graph_module):
        fuse(part.copy())
    assert _operators(source.graph_module) == before


def test_a_norm_with_other_readers_stays_beside_its_quantisation() -> None:
    graph = copy.deepcopy(_layer(Case(quant="w8a8")))
    rows = next(n for n in graph.graph.nodes if n.target is fastcar.linear_w8a8.default).args[0]
    set_outputs(graph.graph, [*output_nodes(graph.graph), rows])
    found = _operators(fuse(graph))
    assert found["fastcar.rms_norm_quantize.default"] >= 1
    assert found["fastcar.rms_norm.default"] >= 1


def test_every_operator_has_a_converter() -> None:
    """The package's own, and the fused ones. Those in `QUANTIZED_LINEARS` are split before the import."""
    names = [n.removeprefix("fastcar::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("fastcar::")]
    operators = {getattr(fastcar, name).default for name in names if "." not in name}
    assert len(operators) > 25
    assert operators - QUANTIZED_LINEARS - set(CONVERTERS) == set()
