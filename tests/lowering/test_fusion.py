"""Fusions: their kernels are exact against the operators that they stand for, and they are found in real graphs."""

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, fx

import fastcar_compile.ir.ops  # noqa: F401  (registers the operators)
from fastcar_compile.codegen.segment import segment
from fastcar_compile.codegen.tvm.converters import CONVERTERS
from fastcar_compile.codegen.tvm.fusion import QUANTIZED_LINEARS, gated_product
from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.kernels.linear.activations import PARALLEL_ROW_ELEMENTS, activate_quantize
from fastcar_compile.codegen.tvm.kernels.norm import (
    layer_norm,
    layer_norm_quantize,
    rms_norm,
    rms_norm_quantize,
    rotary,
)
from fastcar_compile.codegen.tvm.pipeline import fuse
from fastcar_compile.ir.ops.linear import FACTORS, factor_table
from fastcar_compile.ir.query import output_nodes
from fastcar_compile.ir.rewrite import set_outputs
from fastcar_compile.passes.patterns.norms import rotary as rotary_of

from .kernel_runs import few, run, same_rows
from .programs import Case, program

# Kernels that stand for several operators: exact against those, and found in real graphs.


fastcar = torch.ops.fastcar
ISA = host_instruction_set()


@few
@example(33, 1001, "silu", 3.0, ISA, 0)  # in parallel
@given(
    st.integers(1, 3),
    st.integers(1, 200),
    st.sampled_from(sorted(FACTORS)),
    st.sampled_from([0.0, 1e-35, 0.1, 4.0, 30.0]),
    st.sampled_from([PORTABLE, ISA]),
    st.integers(0, 99),
)
def test_activate_quantize_is_exact(
    m: int, k: int, activation: str, size: float, isa: InstructionSet, seed: int
) -> None:
    torch.manual_seed(seed)
    assert PARALLEL_ROW_ELEMENTS <= 33 * 1001
    gate, up = torch.randn(m, k) * size, torch.randn(m, k)
    gate[1:2], up[1:2] = 0.0, -0.0  # an inactive row
    outputs = torch.zeros(m, k, dtype=torch.int8), torch.zeros(m)
    found = run(activate_quantize(m, k, activation, isa), gate, up, factor_table(activation), *outputs)
    same_rows(found, gate * fastcar.activation_factor(gate, activation) * up)


@few
@example(33, 1001, 1.0, 0)  # in parallel
@given(st.integers(1, 3), st.integers(1, 200), st.sampled_from([0.0, 1e-3, 1.0, 300.0]), st.integers(0, 99))
def test_rms_norm_quantize_is_exactly_the_norm_quantised(m: int, k: int, size: float, seed: int) -> None:
    """An accelerator's host gets float rows, the CPU quantised ones: they must be the same numbers."""
    torch.manual_seed(seed)
    x, w = torch.randn(m, k) * size, torch.rand(k) + 0.5
    y = run(rms_norm(m, k, 1e-6), x, w, torch.zeros(m, k))[-1]
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
    torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    same_rows(run(rms_norm_quantize(m, k, 1e-6), x, w, torch.zeros(m, k, dtype=torch.int8), torch.zeros(m)), y)


@few
@example(33, 1001, 1.0, 0.0, 0)  # in parallel
@given(
    st.integers(1, 3),
    st.integers(2, 200),
    st.sampled_from([1.0, 300.0]),
    st.sampled_from([0.0, 10.0]),
    st.integers(0, 99),
)
def test_layer_norm_quantize_is_exactly_the_norm_quantised(
    m: int, k: int, size: float, offset: float, seed: int
) -> None:
    torch.manual_seed(seed)
    x, w, b = torch.randn(m, k) * size + offset, torch.rand(k) + 0.5, torch.randn(k)
    y = run(layer_norm(m, k, 1e-5), x, w, b, torch.zeros(m, k))[-1]
    expected = torch.nn.functional.layer_norm(x.double(), (k,), w.double(), b.double(), 1e-5)
    torch.testing.assert_close(y.double(), expected, atol=2e-5 * (1 + abs(offset)), rtol=1e-4)
    same_rows(run(layer_norm_quantize(m, k, 1e-5), x, w, b, torch.zeros(m, k, dtype=torch.int8), torch.zeros(m)), y)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@few
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([2, 6, 12, 32, 80, 128]),
    st.booleans(),
    st.integers(0, 99),
)
def test_rotary(b: int, h: int, t: int, d: int, own: bool, seed: int) -> None:
    """With one table for all rows of the batch, and with one for each."""
    torch.manual_seed(seed)
    x, angle = torch.randn(b, h, t, d), torch.randn(b if own else 1, 1, t, d)
    cos, sin = angle.cos(), angle.sin()
    y = run(rotary((b, h, t, d), len(cos)), x, cos, sin, torch.zeros(b, h, t, d))[-1]
    torch.testing.assert_close(y, _rotated(x, cos, sin), atol=1e-6, rtol=1e-6)


def _traced(function: Callable[..., Tensor], *inputs: Tensor) -> fx.Node:
    """The operator that makes the result."""
    exported = torch.export.export(_Module(function), inputs)
    return output_nodes(exported.graph)[0]


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._function(*inputs)


def test_patterns_are_found_in_either_order() -> None:
    x, table = torch.randn(2, 3, 4, 8), torch.randn(1, 1, 4, 8)
    for function in (_rotated, lambda a, c, s: torch.cat([-a[..., 4:], a[..., :4]], -1) * s + c * a):
        found = rotary_of(_traced(function, x, table, table + 1))
        assert found is not None
        assert [n.name for n in found[1:]] in (["args_1", "args_2"], ["inputs_1", "inputs_2"])
    g = torch.randn(2, 8)
    for function in (
        lambda a, u: a * fastcar.activation_factor(a, "silu") * u,
        lambda a, u: u * (fastcar.activation_factor(a, "silu") * a),
    ):
        found_product = gated_product(_traced(function, g, g + 1))
        assert found_product is not None
        assert found_product[2] == "silu"


@pytest.mark.parametrize(
    "function",
    [
        lambda a, c, s: a * c + torch.cat([a[..., 4:], a[..., :4]], -1) * s,  # no minus
        lambda a, c, s: a * c + torch.cat([-a[..., 5:], a[..., :5]], -1) * s,  # not the halves
        lambda a, c, s: a * c + torch.cat([a[..., :4], -a[..., 4:]], -1) * s,  # not turned
        lambda a, c, s: a * c - torch.cat([-a[..., 4:], a[..., :4]], -1) * s,
        lambda a, c, s: torch.add(a * c, torch.cat([-a[..., 4:], a[..., :4]], -1) * s, alpha=2),
        lambda a, c, s: a * c + torch.cat([-c.expand(2, 3, 4, 8)[..., 4:], a[..., :4]], -1) * s,  # of something else
    ],
)
def test_what_only_resembles_a_rotary_embedding_is_left_alone(function: Callable[..., Tensor]) -> None:
    x, table = torch.randn(2, 3, 4, 8), torch.randn(1, 1, 4, 8)
    assert rotary_of(_traced(function, x, table, table + 1)) is None


def test_what_only_resembles_a_gated_product_is_left_alone() -> None:
    g = torch.randn(2, 8)
    assert gated_product(_traced(lambda a, u: u * fastcar.activation_factor(a, "silu") * u, g, g + 1)) is None
    assert gated_product(_traced(lambda a, u: a * fastcar.activation_factor(a, "silu") + u, g, g + 1)) is None
    one_row = g[:1].clone()
    assert gated_product(_traced(lambda a, u: a * fastcar.activation_factor(a, "silu") * u, g, one_row)) is None


# The fusions on real graphs: a fused segment computes the same bits in PyTorch, and the program stays as it is.


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


@pytest.mark.parametrize("case", [Case(quant="w8a8"), Case(gate="input_delta", max_chain=9)])
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
