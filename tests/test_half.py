"""quant="bf16" and "fp16": the weights of every linear in 16 bits, float32 sums, on every backend that takes floats."""

from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from agreement import decode
from decoders import PlainDecoder, llama
from torch import nn

import fastcar_compile as fc
from fastcar_compile.codegen.hls.model.shapes import load_shape
from fastcar_compile.codegen.hls.model.system import Workload, estimate
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import CompileError, InputError

FRAME, LENGTH = 8, 33
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUANTS = ["bf16", pytest.param("fp16", marks=pytest.mark.thorough)]


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


@pytest.mark.thorough
@pytest.mark.parametrize("quant", QUANTS)
def test_a_board_without_kernels_is_warned_of(tmp_path: Path, quant: str) -> None:
    text = f"target zcu102 gets no accelerator kernels: the kernels are int8, and quant is '{quant}'"
    with pytest.warns(UserWarning, match=text):
        build(PlainDecoder(layers=1), quant, tmp_path / "artifact", target="zcu102")


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    """65519 still rounds to 65504; from 65520 on a weight would be infinite."""
    model = PlainDecoder(layers=1)
    with torch.no_grad():
        weight = next(m for m in model.modules() if isinstance(m, nn.Linear)).weight
        weight[0, 0] = 65519.0
        build(model, "fp16", tmp_path / "artifact")
        weight[0, 0] = -65520.0
        with pytest.raises(CompileError, match=r"(?s)magnitude 65520, and float16 ends at 65504.*bf16"):
            build(model, "fp16", tmp_path / "other")


def test_no_estimate_for_an_engine_that_does_not_exist() -> None:
    with pytest.raises(InputError, match=r'quant = "bf16" \(the engine is int8: w8a8 or w4a8\)'):
        estimate(Workload(load_shape("vila-u-7b"), "bf16", 1024), load_target("u280"))
