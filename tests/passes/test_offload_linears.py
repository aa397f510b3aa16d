"""offload-linears: q, k and v become one call, o and the head one each; what stays on the host says why."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastcar_compile.ir.ops.offload import bound
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.offload import OffloadLinears, linear_calls
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW4A8, QuantizeW8A8

from .laws import check_left_alone
from .tiny import BATCH, WIDTH, TinyBlock, after, logits

fastcar = torch.ops.fastcar
W8A8 = (*analysis_pipeline(), QuantizeW8A8())
W4A8 = (*analysis_pipeline(), QuantizeW4A8())
REPLAY = (*W8A8, InsertReplay((1.5,)))


class SplitBlock(TinyBlock):
    """q, k and v as three linears, two of them with a bias; one more linear sees a weight that the graph computes."""

    def __init__(self, batch: int = BATCH) -> None:
        super().__init__(batch)
        self.qkv = Split()


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x) + nn.functional.linear(x, self.mix.neg())
        return torch.cat([q, self.k(x), self.v(x)], -1)


class Accelerator:
    """Every call from the stored weights; keeps the names of the calls."""

    def __init__(self, program: DecoderProgram) -> None:
        self.calls = {c.name: c for c in linear_calls(program)[0]}
        self.params, self.names = program.params, []

    def __call__(self, name: str, x: Tensor) -> Tensor:
        self.names.append(name)
        call = self.calls[name]
        return torch.cat([self.linear(x, *names) for names in zip(call.weights, call.biases, strict=True)], -1)

    def linear(self, x: Tensor, weight: str, bias: str | None) -> Tensor:
        own = None if bias is None else self.params[bias]
        if f"{weight}_int4" in self.params:
            return fastcar.linear_w4a8(x, self.params[f"{weight}_int4"], self.params[f"{weight}_scale"], own)
        return fastcar.linear_w8a8(x, self.params[f"{weight}_int8"], self.params[f"{weight}_scale"], own)


def test_linears_of_one_input_are_one_call_where_biases_agree() -> None:
    program = after(*W8A8, blocks=(SplitBlock,))
    calls, kept = linear_calls(program)
    assert [(c.name, c.channels, c.biased) for c in calls] == [
        ("layer_0.qkv", (8,), False), ("layer_0.qkv+1", (4, 4), True), ("layer_0.o", (8,), False), ("head", (5,), False)
    ]  # fmt: skip
    assert calls[1].paths == ("blocks.0.qkv.k", "blocks.0.qkv.v")
    assert [(k.path, k.layer, k.reason) for k in kept] == [("blocks.0.qkv", 0, "its weights are not quantised")]


def test_float_linears_stay_on_the_host_and_say_why() -> None:
    program = after(*analysis_pipeline())
    check_left_alone(program, OffloadLinears())
    _, kept = linear_calls(program)
    assert [k.path for k in kept] == ["blocks.0.qkv", "blocks.0.out", "head"]
    assert {k.reason for k in kept} == {"its weights are not quantised"}


def test_linears_of_other_rows_than_the_batch_stay_on_the_host() -> None:
    """As in a prefill chunk, whose linears have a row for every token."""
    program = after(*W8A8)
    program.graph_module, program.prefill = program.prefill, program.graph_module  # pyright: ignore[reportAttributeAccessIssue]
    calls, kept = linear_calls(program)
    assert calls == []
    assert {k.reason for k in kept} == {"it has 4 row(s), and a call has one for each of the 2 batch row(s)"}


@pytest.mark.parametrize(("passes", "blocks"), [(REPLAY, ()), (REPLAY, (SplitBlock,)), (W4A8, (SplitBlock,))])
def test_outputs_stay_the_same_bit_for_bit(passes: tuple, blocks: tuple) -> None:
    expected = logits(after(*passes, blocks=blocks), 0.0)
    program = after(*passes, blocks=blocks)
    accelerator = Accelerator(program)
    OffloadLinears().apply(program)
    program.graph_module.recompile()
    with bound("linear", accelerator):
        np.testing.assert_array_equal(logits(program, 0.0), expected)
    assert accelerator.names == [name for _ in expected for name in accelerator.calls]
