"""bfloat16-weights: every linear of both graphs, sites that follow, weights that are what rounding makes of them."""

from __future__ import annotations

import numpy as np
import torch

from fastcar_compile.ir.query import is_op
from fastcar_compile.passes.bfloat16_weights import Bfloat16Weights
from fastcar_compile.passes.pipeline import analysis_pipeline

from .laws import check_origins, check_truthful, nodes_of
from .tiny import after, logits

aten, fastcar = torch.ops.aten, torch.ops.fastcar


def test_second_application_changes_nothing() -> None:
    check_truthful(after(*analysis_pipeline()), Bfloat16Weights())


def test_every_linear_is_replaced_and_keeps_its_source() -> None:
    program = after(*analysis_pipeline(), Bfloat16Weights())
    assert not [n for n in nodes_of(program) if is_op(n, aten.linear)]
    assert check_origins(program, Bfloat16Weights.name) == 2 * 6
    names = {n.name for n in program.graph_module.graph.nodes}
    assert all(set(site.mlp.linears) <= names for site in program.sites)


def test_weights_are_rounded_once_and_activations_stay_float() -> None:
    plain, program = after(*analysis_pipeline()), after(*analysis_pipeline(), Bfloat16Weights())
    weight = plain.params["blocks.0.qkv.weight"]
    assert torch.equal(program.params["blocks.0.qkv.weight_bf16"], weight.to(torch.bfloat16))
    assert not [n for n in nodes_of(program) if is_op(n, fastcar.activation_factor)]
    difference = np.abs(logits(program) - logits(plain)).max()
    assert 0 < difference < 0.05 * np.abs(logits(plain)).max()
