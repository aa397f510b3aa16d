"""Types of weights: every linear, activation and embedding, with the weights of numerics.md."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fastcar_compile.ir.ops.linear import GROUP, group_count, unpack_int4
from fastcar_compile.ir.pass_manager import Pass, run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import get_attribute, is_op
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import Bfloat16Embedding, Bfloat16Weights, QuantizeW4A8, QuantizeW8A8

from .laws import nodes_of
from .tiny import TinyBlock, after, logits, prefill_logits

# quantize-w8a8, -w4a8 and bfloat16-weights: every linear and activation, with the weights of numerics.md.


aten, fastcar = torch.ops.aten, torch.ops.fastcar


PASSES = [QuantizeW8A8(), QuantizeW4A8()]


def quantized(item: Pass = PASSES[0]) -> DecoderProgram:
    return after(*analysis_pipeline(), item)


def test_weights_are_symmetric_per_output_channel() -> None:
    weight = after(*analysis_pipeline()).params["blocks.0.qkv.weight"].numpy()
    params = quantized().params
    stored, scale = (params[f"blocks.0.qkv.weight_{k}"].numpy() for k in ("int8", "scale"))
    expected_scale = np.abs(weight).max(1) / np.float32(127)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(stored, np.rint(weight / expected_scale[:, None]).astype(np.int8))
    assert (np.abs(stored.astype(int)).max(1) == 127).all()


def test_int4_weights_are_symmetric_in_padded_groups() -> None:
    weight = after(*analysis_pipeline()).params["blocks.0.mlp.down.weight"].numpy()
    params = quantized(QuantizeW4A8()).params
    packed, scale = (params[f"blocks.0.mlp.down.weight_{k}"] for k in ("int4", "scale"))
    channels, inputs = weight.shape
    assert packed.dtype == torch.uint8
    assert packed.shape == (channels, GROUP // 2)
    expected_scale = (np.abs(weight).max(1, keepdims=True) / np.float32(7)).astype(np.float16)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    stored = unpack_int4(packed).numpy()
    np.testing.assert_array_equal(stored[:, :inputs], np.rint(weight / expected_scale.astype(np.float32)))
    assert not stored[:, inputs:].any()


@pytest.mark.parametrize("item", PASSES, ids=lambda p: p.name)
def test_every_group_of_a_wide_weight_has_its_scale(item: Pass) -> None:
    """The error of a weight is at most half a step, and a group or channel of zeros stays zero."""
    weight = torch.randn(3, 300, generator=torch.Generator().manual_seed(1))
    weight[1, :] = 0
    weight[2, 128:256] *= 1e-3
    if isinstance(item, QuantizeW4A8):
        packed, scale = QuantizeW4A8.quantize(weight)
        stored = unpack_int4(packed).float().reshape(3, group_count(300), GROUP) * scale.float()[..., None]
        restored, step = stored.reshape(3, -1)[:, :300], scale.float().repeat_interleave(GROUP, 1)[:, :300]
    else:
        quantized_weight, scale = QuantizeW8A8.quantize(weight)
        restored, step = quantized_weight.float() * scale[:, None], scale[:, None].expand(3, 300)
    # Rounding a scale to float16 may cut the largest weight by 7 * 2**-11 of a step more.
    assert ((restored - weight).abs() <= step * (0.5 + 7 * 2.0**-11)).all()
    assert (restored[1] == 0).all()


class GeluBlock(TinyBlock):
    """linear -> GELU by tanh -> linear with a bias."""

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp.down(F.gelu(self.mlp.up(x), approximate="tanh"))


@pytest.mark.parametrize(("block", "activation"), [(TinyBlock, "silu"), (GeluBlock, "gelu_tanh")])
@pytest.mark.parametrize("item", PASSES, ids=lambda p: p.name)
def test_an_activation_goes_through_its_own_table(item: Pass, block: type[TinyBlock], activation: str) -> None:
    program = after(*analysis_pipeline(), item, blocks=(block,))
    factors = [n for n in program.graph_module.graph.nodes if is_op(n, fastcar.activation_factor)]
    assert [n.args[1] for n in factors] == [activation]
    assert not [n for n in nodes_of(program) if is_op(n, aten.gelu, aten.silu)]
    expected = logits(after(*analysis_pipeline(), blocks=(block,)))
    error = np.abs(logits(program) - expected).max()
    assert 0 < error < (0.05 if item.name == "quantize-w8a8" else 0.5) * np.abs(expected).max()


def test_a_computed_weight_stays_as_it_is() -> None:
    program = after(*analysis_pipeline())
    graph = program.graph_module.graph
    head = next(n for n in graph.nodes if is_op(n, aten.linear) and n.args[1].target == "head.weight")
    with graph.inserting_before(head):
        computed = graph.call_function(aten.neg.default, (head.args[1],))
        computed.meta = dict(head.args[1].meta)
    head.replace_input_with(head.args[1], computed)
    QuantizeW8A8().apply(program)
    assert [n.args[1] for n in graph.nodes if is_op(n, aten.linear)] == [computed]


def test_bfloat16_weights_are_rounded_once_and_activations_stay_float() -> None:
    plain, program = after(*analysis_pipeline()), after(*analysis_pipeline(), Bfloat16Weights())
    assert not [n for n in nodes_of(program) if is_op(n, aten.linear, fastcar.activation_factor)]
    names = {n.name for n in program.graph_module.graph.nodes}
    assert all(set(site.mlp.linears) <= names for site in program.sites)
    weight = plain.params["blocks.0.qkv.weight"]
    assert torch.equal(program.params["blocks.0.qkv.weight_bf16"], weight.to(torch.bfloat16))
    difference = np.abs(logits(program) - logits(plain)).max()
    assert 0 < difference < 0.05 * np.abs(logits(plain)).max()


# Embedding tables of bfloat16 values: stored as such where that changes nothing.


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
