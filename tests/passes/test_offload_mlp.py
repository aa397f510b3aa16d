"""offload-mlp: a w8a8 MLP becomes one call to the accelerator, with the row mask."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fastcar_compile.errors import BackendError
from fastcar_compile.ir.ops.offload import bound
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.offload import OffloadGate, OffloadLinears, OffloadMlp
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8

from .laws import check_left_alone
from .tiny import BATCH, FRAME, ROWS, after, decode, logits

fastcar = torch.ops.fastcar
INF = float("inf")
W8A8 = (*analysis_pipeline(), QuantizeW8A8())
REPLAY = (*W8A8, InsertReplay((1.5,)))


class Accelerator:
    """The MLP from the stored weights; keeps the masks it was called with."""

    def __init__(self, program: DecoderProgram) -> None:
        self.params, self.masks = program.params, []

    def __call__(self, layer: int, x: Tensor, replay: Tensor, cached: Tensor) -> Tensor:
        assert layer == 0
        self.masks.append(replay.clone())
        gate, up = self.linear("gate", x), self.linear("up", x)
        y = self.linear("down", gate * fastcar.activation_factor(gate, "silu") * up)
        return torch.where(replay[:, None], cached, y)

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, scale = (self.params[f"blocks.0.mlp.{name}.weight_{k}"] for k in ("int8", "scale"))
        return fastcar.linear_w8a8(x, weight, scale, self.params.get(f"blocks.0.mlp.{name}.bias"))


def test_float_mlps_stay_on_the_host() -> None:
    program = after(*analysis_pipeline(), InsertReplay((1.5,)))
    check_left_alone(program, OffloadMlp())


@pytest.mark.parametrize(("passes", "threshold"), [(REPLAY, INF), (REPLAY, 0.0), (REPLAY, -INF), (W8A8, INF)])
def test_outputs_stay_the_same_bit_for_bit(passes: tuple, threshold: float) -> None:
    expected = logits(after(*passes), threshold)
    program = after(*passes)
    accelerator = Accelerator(program)
    OffloadMlp().apply(program)
    program.graph_module.recompile()
    with bound("MLP", accelerator):
        np.testing.assert_array_equal(logits(program, threshold), expected)
    calls = FRAME if threshold == -INF else ROWS
    assert len(accelerator.masks) <= calls
    assert not any(m.all() for m in accelerator.masks)


def test_the_accelerator_gets_the_decisions_and_is_not_called_when_all_rows_replay() -> None:
    host = after(*REPLAY, OffloadMlp())
    accelerator = Accelerator(after(*REPLAY))
    with bound("MLP", accelerator):
        scores = np.stack([r.scores[0] for r in decode(host, INF)])[FRAME:]
    threshold = float(np.median(scores))
    accelerator.masks.clear()
    with bound("MLP", accelerator):
        decisions = np.stack([r.decisions[0] for r in decode(host, threshold)])
    expected = [d for d in decisions if not d.all()]
    assert 0 < decisions.sum() < (ROWS - FRAME) * BATCH
    np.testing.assert_array_equal(torch.stack(accelerator.masks).numpy(), np.stack(expected))


@pytest.mark.parametrize(
    ("item", "what"), [(OffloadMlp(), "MLP"), (OffloadGate(), "gate"), (OffloadLinears(), "linear")]
)
def test_without_an_accelerator_the_error_says_so(item: Pass, what: str) -> None:
    with pytest.raises(BackendError, match=f"an offloaded {what} was reached, but no accelerator is bound"):
        decode(after(*REPLAY, item))
