"""quant="bf16": the weights of every linear in bfloat16, float32 sums, on every backend that takes floats."""

from pathlib import Path

import pytest
import safetensors
import torch
from agreement import decode
from decoders import llama
from test_checkpoint import save

import fastcar_compile as fc
from fastcar_compile.codegen.hls.model.shapes import load_shape
from fastcar_compile.codegen.hls.model.system import Workload, estimate
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import InputError

FRAME, LENGTH = 8, 33


def build(model: object, folder: Path, target: str = "cpu", quant: str = "bf16") -> fc.Artifact:
    return fc.compile(
        model,  # pyright: ignore[reportArgumentType]
        target=target,
        tokens_per_frame=FRAME,
        max_seq_len=LENGTH,
        quant=quant,
        replay=fc.ReplayConfig(threshold=0.0),
        prefill_chunk=12,
        output=folder,
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    return build(llama(), tmp_path_factory.mktemp("bf16") / "artifact")


def tokens() -> torch.Tensor:
    return torch.randint(0, 17, (1, LENGTH), generator=torch.Generator().manual_seed(3))


def test_backends_agree_and_follow_the_model_with_rounded_weights(artifact: fc.Artifact) -> None:
    model, ids = llama(), tokens()
    with torch.inference_mode():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(module.weight.bfloat16())
        expected = model(ids).logits[:, 13:]
    for name in ("eager", "cpu", "onnxruntime"):
        session = artifact.session(name)
        session.set_threshold(float("inf"))
        torch.testing.assert_close(
            decode(session, ids, 14), expected, atol=1e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_replay_decisions_agree(artifact: fc.Artifact) -> None:
    ids = tokens()
    eager, cpu, ort = (artifact.session(b, record=True) for b in ("eager", "cpu", "onnxruntime"))
    expected = decode(eager, ids, 14)
    assert 0.0 < eager.stats.replay_ratio < 0.8
    for session in (cpu, ort):
        torch.testing.assert_close(decode(session, ids, 14), expected, atol=1e-4, rtol=0)
        assert (session.stats.decisions == eager.stats.decisions).all()


def test_linears_are_stored_in_two_bytes(artifact: fc.Artifact) -> None:
    """Every matrix but the embedding table, whatever the report says of it."""
    (weights,) = (artifact.path / "weights").glob("*.safetensors")
    with safetensors.safe_open(weights, framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    matrices = {n: k for n, k in kinds.items() if "_proj" in n or "lm_head" in n}
    assert len(matrices) == 2 * 7 + 1
    assert set(matrices.values()) == {"BF16"}
    assert "linear_bf16" in (artifact.path / "graph/after.txt").read_text("utf-8")


def test_a_bfloat16_checkpoint_keeps_its_bits(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    stored = {}
    for shard in folder.glob("*.safetensors"):
        with safetensors.safe_open(shard, framework="pt") as file:
            stored |= {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    params = build(folder, tmp_path / "artifact").params
    name = "model.layers.2.mlp.down_proj.weight"
    kept = [n for n in params if n.endswith((f"{name}_bf16", f"{name.removeprefix('model.')}_bf16"))]
    assert len(kept) == 1
    assert params[kept[0]].dtype == torch.bfloat16
    assert torch.equal(params[kept[0]].view(torch.int16), stored[name].view(torch.int16))


def test_a_board_without_kernels_is_warned_of(tmp_path: Path) -> None:
    text = "target zcu102 gets no accelerator kernels: the kernels are int8, and quant is 'bf16'"
    with pytest.warns(UserWarning, match=text):
        build(llama(), tmp_path / "artifact", target="zcu102")


def test_no_estimate_for_an_engine_that_does_not_exist() -> None:
    with pytest.raises(InputError, match=r'quant = "bf16" \(the engine is int8: w8a8 or w4a8\)'):
        estimate(Workload(load_shape("vila-u-7b"), "bf16", 1024), load_target("u280"))
