"""quant="bf16" and "fp16": the weights of every linear in 16 bits, float32 sums, on every backend that takes floats."""

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from agreement import decode
from conftest import first_often
from decoders import llama
from torch import nn

import fastcar_compile as fc

FRAME, LENGTH = 8, 33
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUANTS = first_often(["bf16", "fp16"])


def build(model: nn.Module, quant: str, folder: Path, target: str = "cpu", chunk: int = 1) -> fc.Artifact:
    return fc.compile(
        model, target=target, tokens_per_frame=FRAME, max_seq_len=LENGTH, quant=quant,
        replay=fc.ReplayConfig(threshold=0.0), prefill_chunk=chunk, output=folder,
    )  # fmt: skip


@pytest.fixture(scope="module", params=QUANTS)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    return build(llama(), request.param, tmp_path_factory.mktemp("half") / "artifact", chunk=12)


def tokens() -> torch.Tensor:
    return torch.randint(0, 17, (1, LENGTH), generator=torch.Generator().manual_seed(3))


ATOL = {"bf16": 2e-3, "fp16": 1e-4}
"""A CPU that multiplies bfloat16 rounds the inputs of a prompt's linears to it."""


def test_backends_decide_alike_and_follow_the_model_with_rounded_weights(artifact: fc.Artifact) -> None:
    model, ids, quant = llama(), tokens(), artifact.manifest.options.quant
    with torch.inference_mode():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(module.weight.to(DTYPES[quant]))
        expected = model(ids).logits[:, 13:]
    replayed: list[tuple[torch.Tensor, Any]] = []
    for name in ("eager", "cpu", "onnxruntime"):
        session = artifact.session(name, record=True)
        session.set_threshold(float("inf"))
        atol = ATOL[quant] if name == "cpu" else 1e-4
        torch.testing.assert_close(decode(session, ids, 14), expected, atol=atol, rtol=0)
        session.set_threshold(0.0)
        replayed.append((decode(session, ids, 14), session.stats.decisions))
    for logits, decisions in replayed:
        torch.testing.assert_close(logits, replayed[0][0], atol=ATOL[quant], rtol=0)
        assert 0.0 < decisions.mean() < 0.8
        assert (decisions == replayed[0][1]).all()


def test_linears_are_stored_in_two_bytes(artifact: fc.Artifact) -> None:
    """Every matrix but the embedding table, whatever the report says of it."""
    (weights,) = (artifact.path / "weights").glob("*.safetensors")
    with safetensors.safe_open(weights, framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    matrices = {n: k for n, k in kinds.items() if "_proj" in n or "lm_head" in n}
    assert len(matrices) == 2 * 7 + 1
    assert set(matrices.values()) == {artifact.manifest.options.quant.upper().replace("FP", "F")}
    assert "linear_half" in (artifact.path / "graph/after.txt").read_text("utf-8")
