"""quantize-w8a8: every linear and the SiLU, in both graphs, with the weights of docs/architecture.md."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from fastcar_compile.ir import DecoderProgram, get_attribute
from fastcar_compile.passes.edit import is_op
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8

from .golden import check_golden, check_origins, check_truthful, nodes_of, program_text
from .tiny import after, logits

aten, fastcar = torch.ops.aten, torch.ops.fastcar


def quantized() -> DecoderProgram:
    return after(*analysis_pipeline(), QuantizeW8A8())


def test_golden() -> None:
    program = after(*analysis_pipeline())
    before = program_text(program)
    QuantizeW8A8().apply(program)
    check_golden("quantize-w8a8", before, program_text(program))


def test_second_application_changes_nothing() -> None:
    check_truthful(after(*analysis_pipeline()), QuantizeW8A8())


def test_inserted_nodes_keep_their_source() -> None:
    assert check_origins(quantized(), "quantize-w8a8") == 2 * (6 + 2)  # per graph: six linears, sigmoid and product


def test_no_float_linear_or_silu_is_left_in_either_graph() -> None:
    program = quantized()
    assert not [n for n in nodes_of(program) if is_op(n, aten.linear, aten.silu)]
    assert not [p for p in program.params if p.endswith(("qkv.weight", "gate.weight", "down.weight"))]
    assert len([n for n in nodes_of(program) if is_op(n, fastcar.linear_w8a8)]) == 2 * 6


def test_weights_are_symmetric_per_output_channel() -> None:
    weight = after(*analysis_pipeline()).params["blocks.0.qkv.weight"].numpy()
    params = quantized().params
    stored, scale = (params[f"blocks.0.qkv.weight_{k}"].numpy() for k in ("int8", "scale"))
    expected_scale = np.abs(weight).max(1) / np.float32(127)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(stored, np.rint(weight / expected_scale[:, None]).astype(np.int8))
    assert (np.abs(stored.astype(int)).max(1) == 127).all()


def test_sites_follow_the_new_names() -> None:
    before, program = after(*analysis_pipeline()).sites[0], quantized()
    (site,) = program.sites
    nodes = {n.name: n for n in program.graph_module.graph.nodes}
    assert all(is_op(nodes[n], fastcar.linear_w8a8) for n in site.linears)
    assert (site.mlp_output, site.region_output) == (site.linears[-1], site.linears[-1])
    same = {"linears": before.linears, "mlp_output": before.mlp_output, "region_output": before.region_output}
    assert dataclasses.replace(site, **same) == before


def test_bias_stays_float_and_logits_stay_close() -> None:
    program = quantized()
    module = program.graph_module
    down = next(n for n in module.graph.nodes if n.name == program.sites[0].mlp_output)
    bias = get_attribute(module, str(down.args[3].target))
    assert isinstance(bias, torch.Tensor)
    assert bias.dtype == torch.float32
    expected, actual = logits(after(*analysis_pipeline())), logits(program)
    error = np.abs(actual - expected).max()
    assert 0 < error < 0.05 * np.abs(expected).max()


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
