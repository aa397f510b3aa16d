"""Decoders with other MLPs than SwiGLU, quantised, from the model to a decode on the CPU and in HLS C simulation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import agreement
import pytest
import torch
from conftest import check_module, check_tool, first_often
from decoders import PlainBlock, PlainDecoder
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM

import fastcar_compile as fc
from fastcar_compile.errors import CompileError
from fastcar_compile.runtime.session import Session

FRAME, LENGTH, VOCAB = 4, 33, 11


def plain() -> nn.Module:
    """GELU by erf between two linears with biases."""
    return PlainDecoder(rows=LENGTH, batch=2)


def gemma() -> nn.Module:
    """GeGLU by tanh without biases."""
    torch.manual_seed(0)
    config = GemmaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=150, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=1,
        pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    return GemmaForCausalLM(config).eval()


def decode(session: Session) -> Tensor:
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    return agreement.decode(session, ids, 1)


@pytest.mark.parametrize(
    ("model", "quant", "offload", "kind"),
    first_often([(plain, "w4a8", "linears", "w4a8 plain gelu"), (gemma, "w8a8", "mlp", "w8a8 GeGLU")]),
)
def test_cpu_and_hls_simulation_are_equal_and_others_close(
    model: Callable[[], nn.Module], quant: str, offload: str, kind: str, tmp_path: Path
) -> None:
    """With biases everywhere, one linear for q, k and v, and every linear on the engine; and with MLPs alone there."""
    check_tool("g++")
    check_module("hls4ml")
    options: dict[str, Any] = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH, "batch_size": 2, "prefill_chunk": 1}
    options |= {"offload": offload, "replay": fc.ReplayConfig(threshold=0.0)}
    artifact = fc.compile(model(), "zcu102", quant=quant, output=tmp_path / "built", **options)
    assert kind in (artifact.path / "hls" / "fastcar_step.cpp").read_text().splitlines()[0]
    section = artifact.manifest.accelerator
    assert section is not None
    assert {linear.bits for linear in section.design.linears.values()} == ({4} if offload == "linears" else set())
    cpu, hls = (artifact.session(backend, record=True) for backend in ("cpu", "hls-csim"))
    expected = decode(cpu)
    assert 0.0 < cpu.stats.replay_ratio < 1.0
    assert torch.equal(decode(hls), expected)
    assert (cpu.stats.decisions == hls.stats.decisions).all()
    if quant == "w4a8":  # attention may differ in the last bit, and so an activation by one int8 step
        for backend in ("eager", "onnxruntime"):
            torch.testing.assert_close(decode(artifact.session(backend)), expected, atol=1e-1, rtol=0)


class TanhBlock(PlainBlock):
    """An activation that no kernel has."""

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class ReluBlock(PlainBlock):
    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class TanhDecoder(PlainDecoder):
    block = TanhBlock


class MixedDecoder(PlainDecoder):
    """The second layer has another activation than the first."""

    def __init__(self, rows: int, batch: int) -> None:
        super().__init__(rows, batch)
        self.blocks[1] = ReluBlock(32, rows, batch)


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (TanhDecoder, "(?s)no HLS kernel for a plain w8a8 MLP with activation 'tanh'.*silu, gelu, gelu_tanh, relu"),
        (MixedDecoder, "one MLP kernel, but the layers differ: layer 0: plain gelu, 32 / 64; layer 1: plain relu"),
    ],
)
def test_what_has_no_kernel_is_an_error(decoder: type[PlainDecoder], text: str, tmp_path: Path) -> None:
    model = decoder(rows=LENGTH, batch=1)
    with pytest.raises(CompileError, match=text):
        fc.compile(model, "zcu102", offload="mlp", tokens_per_frame=FRAME, max_seq_len=LENGTH, output=tmp_path / "none")
    assert not (tmp_path / "none").exists()
