"""offload-gate, -mlp and -linears: what becomes a call to the accelerator, and what stays on the host. Results stay the
same bit for bit where C simulation runs whole decoders: gates/test_hls.py, tests/sparse and tests/exact."""

import pytest
import torch
from gates import foreign
from torch import Tensor, nn

from fastcar_compile.errors import BackendError
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.query import is_op
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.offload import OffloadGate, OffloadLinears, OffloadMlp, linear_calls
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8

from .laws import check_left_alone, nodes_of
from .tiny import BATCH, WIDTH, TinyBlock, after, decode

fastcar = torch.ops.fastcar
W8A8 = (*analysis_pipeline(), QuantizeW8A8())


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


@pytest.mark.parametrize("gate", ["", "tas", "foreign", "random"])
@pytest.mark.parametrize("item", [OffloadGate(), OffloadMlp(), OffloadLinears()], ids=lambda item: item.name)
def test_what_no_unit_computes_stays_on_the_host(item: Pass, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float linears and MLPs; no gate at all, and a gate of another package even where its score is an operator that
    the controller has."""
    foreign.register(monkeypatch)
    program = after(*analysis_pipeline(), *([InsertReplay((1.5,), gate=gate)] if gate else []))
    if (item, gate) == (OffloadGate(), "tas"):
        assert item.apply(program) is True
    else:
        check_left_alone(program, item)


def test_every_layer_has_its_own_gate() -> None:
    passes = (*analysis_pipeline(), InsertReplay((1.5, None, 0.5)), OffloadGate())
    program = after(*passes, blocks=(TinyBlock,) * 3)
    calls = [n for n in nodes_of(program) if is_op(n, fastcar.offloaded_gate)]
    assert [n.args[8] for n in calls] == [0, 2]
    assert not [n for n in nodes_of(program) if is_op(n, fastcar.tas, fastcar.gate)]


def test_linears_of_one_input_are_one_call_where_biases_agree() -> None:
    program = after(*W8A8, blocks=(SplitBlock,))
    calls, kept = linear_calls(program)
    assert [(c.name, c.channels, c.biased) for c in calls] == [
        ("layer_0.qkv", (8,), False), ("layer_0.qkv+1", (4, 4), True), ("layer_0.o", (8,), False), ("head", (5,), False)
    ]  # fmt: skip
    assert calls[1].paths == ("blocks.0.qkv.k", "blocks.0.qkv.v")
    assert [(k.path, k.layer, k.reason) for k in kept] == [("blocks.0.qkv", 0, "its weights are not quantised")]


def test_linears_of_other_rows_than_the_batch_stay_on_the_host() -> None:
    """As in a prefill chunk, whose linears have a row for every token."""
    program = after(*W8A8)
    program.graph_module, program.prefill = program.prefill, program.graph_module  # pyright: ignore[reportAttributeAccessIssue]
    calls, kept = linear_calls(program)
    assert calls == []
    assert {k.reason for k in kept} == {"it has 4 row(s), and a call has one for each of the 2 batch row(s)"}


@pytest.mark.parametrize(
    ("item", "what"), [(OffloadMlp(), "MLP"), (OffloadGate(), "gate"), (OffloadLinears(), "linear")]
)
def test_without_an_accelerator_the_error_says_so(item: Pass, what: str) -> None:
    with pytest.raises(BackendError, match=f"an offloaded {what} was reached, but no accelerator is bound"):
        decode(after(*W8A8, InsertReplay((1.5,)), item))
