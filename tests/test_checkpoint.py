"""Decoders from a folder: what is refused, equality with the model in memory, memory, bytes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import safetensors.torch
import torch
from conftest import first_often
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.artifact import layout
from fastcar_compile.codegen import emit
from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.checkpoint import Checkpoint
from fastcar_compile.frontend.skeleton import Skeleton
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import QUANTIZE, analysis_pipeline
from fastcar_compile.passes.quantize import Bfloat16Embedding
from fastcar_compile.passes.repeat_layers import RepeatLayers

LAYERS, FRAME = 4, 8
SHARDS = 3


def save(folder: Path, *, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Path:
    """A Llama of four layers in shards, without save_pretrained's choice of where to cut."""
    model = llama(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    torch.nn.Module.to(model, dtype)
    folder.mkdir()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    tensors = {n: t.clone() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    names = list(tensors)
    files = {n: f"model-{i * SHARDS // len(names) + 1:05d}-of-{SHARDS:05d}.safetensors" for i, n in enumerate(names)}
    for file in sorted(set(files.values())):
        safetensors.torch.save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture
def damaged(folder: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], shard: int = 1) -> None:
    file = folder / f"model-{shard:05d}-of-{SHARDS:05d}.safetensors"
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file)


def set_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    data = {k: v for k, v in (json.loads(file.read_text()) | changes).items() if v is not None}
    file.write_text(json.dumps(data))


def problems(folder: Path) -> str:
    with pytest.raises(CompileError) as error:
        Checkpoint(folder)
    return str(error.value)


def test_all_problems_of_the_weights_are_listed_at_once(damaged: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 95)
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64, dtype=torch.int8)

    rewrite(damaged, spoil)
    (damaged / "model-00002-of-00003.safetensors").unlink()
    (damaged / "model-00003-of-00003.safetensors").write_bytes(b"nothing")
    text = problems(damaged)
    assert "5 problems were found" in text
    assert (
        "shard model-00002-of-00003.safetensors is missing; model.safetensors.index.json puts 13 tensors there" in text
    )
    assert "model-00003-of-00003.safetensors is damaged, or not a safetensors file" in text
    assert "tensor model.layers.0.mlp.up_proj.weight is missing" in text
    assert "model.layers.0.mlp.down_proj.weight has shape [64, 95], but config.json implies [64, 96]" in text
    assert "model.layers.0.self_attn.q_proj.weight holds I8" in text
    assert text.count("hint:") == 5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": LAYERS + 1}, "tensor model.layers.4.mlp.down_proj.weight is missing"),
        ({"hidden_size": 33}, "not a multiple of the number of attention heads"),
        ({"num_hidden_layers": 0, "intermediate_size": 0}, "2 problems were found"),
        ({"tokens_per_frame": "x"}, "config.json says tokens_per_frame = 'x'"),
        ({"vocab_size": 18}, "lm_head.weight has shape [17, 64], but config.json implies [18, 64]"),
    ],
)
def test_a_config_that_does_not_fit(damaged: Path, changes: dict[str, object], text: str) -> None:
    set_config(damaged, **changes)
    assert text in problems(damaged)


def test_adapters_are_not_left_out_silently(damaged: Path) -> None:
    """Beside the weights, and alone as peft saves them."""
    (damaged / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "the folder has adapters (adapter_config.json)" in problems(damaged)
    (damaged / "config.json").unlink()
    assert "no config.json" not in problems(damaged)


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_weights_is_not_waited_for(damaged: Path) -> None:
    for file in damaged.glob("*.safetensors*"):
        file.unlink()
    os.mkfifo(damaged / "model.safetensors")
    assert "it is a pipe, not a plain file" in problems(damaged)


def test_a_file_that_vanishes_later_is_named(damaged: Path) -> None:
    checkpoint = Checkpoint(damaged)
    (damaged / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(CompileError, match=r"model\.embed_tokens\.weight cannot be read"):
        checkpoint.read("model.embed_tokens.weight")


def analysed(model: object, repeat: bool, quant: str = "none", chunk: int = 0) -> DecoderProgram:
    program = capture(model, batch_size=1, max_seq_len=33, tokens_per_frame=FRAME, prefill_chunk=chunk)  # pyright: ignore[reportArgumentType]
    passes = [*analysis_pipeline(), *([RepeatLayers("model.layers", LAYERS)] if repeat else [])]
    return run_pipeline(program, [*passes, *([] if quant == "none" else [QUANTIZE[quant], Bfloat16Embedding()])])


def loaded(folder: Path) -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize(
    ("tied", "quant"),
    first_often([(True, "w8a8"), (False, "w4a8"), *((False, quant) for quant in ("none", "bf16", "fp16", "w8a8"))]),
)
def test_parameters_equal_those_of_the_loaded_model(tmp_path: Path, tied: bool, quant: str) -> None:
    place = save(tmp_path / "m", tied=tied)
    lazy, whole = analysed(Checkpoint(place), True, quant), analysed(loaded(place), False, quant)
    assert set(lazy.params) == set(whole.params)
    for name in whole.params:
        assert torch.equal(lazy.params[name], whole.params[name]), name
    tables = [n for n, t in lazy.params.items() if t.dtype == torch.bfloat16]
    assert len(tables) == {"none": 0, "bf16": 7 * LAYERS + 2}.get(quant, 1)
    assert lazy.params.nbytes() == whole.params.nbytes()


def test_layers_that_differ_are_not_repeated(folder: Path) -> None:
    program = capture(Checkpoint(folder), batch_size=1, max_seq_len=33, tokens_per_frame=FRAME, prefill_chunk=0)
    run_pipeline(program, analysis_pipeline())
    silu = [n for n in program.graph_module.graph.nodes if n.target is torch.ops.aten.silu.default]
    silu[-1].target = torch.ops.aten.relu.default
    with pytest.raises(CompileError) as error:
        RepeatLayers("model.layers", LAYERS).apply(program)
    assert "layers 0 and 1 differ" in str(error.value)
    assert "aten.silu.default" in str(error.value)
    assert "where: model.layers.1.mlp.act_fn" in str(error.value)
    with pytest.raises(CompileError, match="repeat-layers cannot make 1 layers out of 2"):
        RepeatLayers("model.layers", 1).apply(program)


@pytest.mark.parametrize(("kinds", "captured"), [("ffff", 2), ("sfff", 3), ("fsfs", 4), ("ffss", 4)])
def test_only_layers_of_one_kind_stand_for_each_other(kinds: str, captured: int) -> None:
    from transformers import Qwen3Config

    names = {"f": "full_attention", "s": "sliding_attention"}
    config = Qwen3Config(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, vocab_size=8, layer_types=[names[k] for k in kinds], sliding_window=4, use_sliding_window=True,
    )  # fmt: skip
    skeleton = Skeleton(config, "Qwen3ForCausalLM", "here")
    assert skeleton.captured_layers == captured
    assert len(skeleton.model(captured).model.layers) == captured


def artifact(model: object, path: Path, chunk: int) -> fc.Artifact:
    return fc.compile(model, "cpu", tokens_per_frame=FRAME, quant="w8a8", output=path, prefill_chunk=chunk)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("chunk", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_artifact_of_a_folder_equals_that_of_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Bit for bit, also with the weights read in blocks and kept in several files, and the ONNX model reading those."""
    whole = artifact(loaded(folder), tmp_path / "whole", chunk)
    monkeypatch.setattr("fastcar_compile.ir.weights.BLOCK_ELEMENTS", 1000)
    monkeypatch.setattr(emit, "SHARD_BYTES", 100_000)
    lazy = artifact(folder, tmp_path / "lazy", chunk)
    files = set(lazy.manifest.files)
    assert {"weights/model-00001.safetensors", "weights/model-00002.safetensors", layout.ONNX} <= files
    assert not [name for name in files if name.startswith("graph/") and name.endswith(".onnx")]
    for stored in (whole, lazy):
        assert stored.manifest.files[layout.ONNX].size < 200_000, "the weights are stored once"
        onnxruntime.InferenceSession(stored.path / layout.ONNX)  # as anybody opens the file
    assert 'repeat-layers{"count": 4, "path": "model.layers", "period": 1}' in lazy.manifest.pipeline.passes
    ids = torch.randint(0, 17, (1, 40), generator=torch.Generator().manual_seed(0))
    for backend in ("cpu", "onnxruntime"):
        sessions = [a.session(backend, record=True) for a in (whole, lazy)]
        for session in sessions:
            session.set_threshold(0.0)
        expected, actual = ([s.prefill(ids[:, :3]), *(s.step(ids[:, i]) for i in range(3, 40))] for s in sessions)
        assert torch.equal(torch.stack(actual), torch.stack(expected))
        assert (sessions[0].stats.decisions == sessions[1].stats.decisions).all()
        assert 0 < sessions[0].stats.replay_ratio < 1


MEASURE = """
import resource, sys
from pathlib import Path
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.checkpoint import Checkpoint
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.quantize import QuantizeW8A8
from fastcar_compile.passes.repeat_layers import RepeatLayers
from fastcar_compile.ir.tensor_files import write_pieces

place = Path(sys.argv[1])
program = capture(Checkpoint(place / "model"), batch_size=1, max_seq_len=64, tokens_per_frame=8, prefill_chunk=0)
run_pipeline(program, [*analysis_pipeline(), RepeatLayers("model.layers", 8), QuantizeW8A8()])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_pieces(place, "out.safetensors", program.params.specs(), program.params.pieces(program.params))
print(program.params.nbytes(), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.thorough
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """57 M parameters, 114 MB of bfloat16 in, 57 MB of int8 out; in memory: one weight and its blocks."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=6,
        vocab_size=32, max_position_embeddings=64, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    folder = tmp_path / "model"
    folder.mkdir()
    config.save_pretrained(folder)
    shapes = Skeleton(config, "LlamaForCausalLM", "here").shapes
    tensors = {n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    size = sum(t.nbytes for t in tensors.values())
    del tensors
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    written, growth = map(int, run.stdout.split())
    assert size > 110e6
    assert written > 55e6
    assert growth < size / 2
