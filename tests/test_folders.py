"""Folders whose tensors have other names than the model's parameters, and folders whose config.json is broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as hf
from conftest import first_often
from decoders import SIZES, llama
from torch.fx.node import map_arg
from transformers.core_model_loading import Chunk, WeightConverter

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend import skeleton as stored_names
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.checkpoint import Checkpoint
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.passes.repeat_layers import RepeatLayers

Make = Callable[[], hf.PreTrainedModel]
LAYERS = 3
_TEXT: dict[str, Any] = SIZES | {"num_hidden_layers": LAYERS, "vocab_size": 64}
_VQ: dict[str, Any] = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8}


def janus() -> hf.PreTrainedModel:
    """Its config has no layers of its own, and its vision tower has as many as the decoder."""
    vision = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "image_size": 32}
    return hf.JanusForConditionalGeneration(
        hf.JanusConfig(
            text_config=_TEXT | {"model_type": "llama"},
            vision_config=vision | {"patch_size": 16, "projection_dim": 32, "mlp_ratio": 2.0},
            vq_config=_VQ | {"embed_dim": 8, "num_embeddings": 32, "projection_dim": 32, "image_token_embed_dim": 32},
            image_token_id=63,
        )
    )


def longrope() -> hf.PreTrainedModel:
    """Its rotary frequencies depend on the compiled length, which is beyond the original one."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)]}
    lengths: dict[str, Any] = {"max_position_embeddings": 65, "original_max_position_embeddings": 16, "pad_token_id": 0}
    return hf.Phi3ForCausalLM(hf.Phi3Config(**_TEXT | lengths, rope_parameters=rope | factors))


def analysed(model: hf.PreTrainedModel | Checkpoint) -> DecoderProgram:
    program = capture(model, batch_size=1, max_seq_len=33, tokens_per_frame=8, prefill_chunk=4)
    passes = list(analysis_pipeline())
    if isinstance(model, Checkpoint):
        skeleton = model.skeleton
        passes.append(RepeatLayers(str(skeleton.layers_path), skeleton.layers, skeleton.period))
    return run_pipeline(program, passes)


def structure(program: DecoderProgram) -> list[object]:
    """Every operator of both graphs with what it reads: parameters and state by name, operators by number."""
    numbers: dict[torch.fx.Node, Any] = {}
    found: list[object] = []
    for node in (node for module in program.graphs() for node in module.graph.nodes):
        numbers[node] = len(found) if node.op in ("call_function", "output") else str(node.target)
        if node.op == "call_function":
            found.append((node.target, str(map_arg((node.args, dict(node.kwargs)), lambda n: numbers[n]))))
    return found


def check_folder(checkpoint: Checkpoint, model: hf.PreTrainedModel) -> None:
    """Graphs, parameters, state and layers are those of the model in memory."""
    lazy, whole = analysed(checkpoint), analysed(model)
    assert structure(lazy) == structure(whole)
    assert (lazy.state, lazy.config, lazy.outputs) == (whole.state, whole.config, whole.outputs)
    assert set(lazy.params) == set(whole.params)
    for parameter in whole.params:
        assert torch.equal(lazy.params[parameter], whole.params[parameter]), parameter
    sites = [[(s.layer, s.module_path, s.mlp.weights, s.mlp.intermediate) for s in p.sites] for p in (lazy, whole)]
    assert sites[0] == sites[1]
    assert [s.entry for s in lazy.sites[1:]] == [s.exit for s in lazy.sites[:-1]]


@pytest.mark.parametrize(
    ("make", "name"),
    first_often([(longrope, "model.layers.0.mlp.gate_up_proj.weight"), (janus, "model.language_model.norm.weight")]),
)
@pytest.mark.filterwarnings("ignore:longrope RoPE has the frequencies of")
def test_a_folder_is_the_decoder_of_its_model(make: Make, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert name in checkpoint.tensors
    check_folder(checkpoint, model)


def every_second_without_rope() -> hf.PreTrainedModel:
    kinds: dict[str, Any] = {"no_rope_layers": [1, 0, 1, 0, 1, 0, 1], "num_hidden_layers": 7, "pad_token_id": 0}
    return hf.SmolLM3ForCausalLM(hf.SmolLM3Config(**_TEXT | kinds))


def every_second_with_a_window() -> hf.PreTrainedModel:
    kinds: dict[str, Any] = {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 9}
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**_TEXT | kinds))


@pytest.mark.parametrize("make", first_often([every_second_without_rope, every_second_with_a_window]))
def test_layers_of_two_kinds_in_turn_are_captured_twice_and_repeated(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert (checkpoint.skeleton.captured_layers, checkpoint.skeleton.period) == (5, 2)
    check_folder(checkpoint, model)


def test_a_backbone_is_found_in_the_weights_of_the_whole_model(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=LAYERS)
    model.save_pretrained(tmp_path)
    model.model.config.architectures = ["LlamaModel"]
    model.model.config.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names["layers.0.mlp.up_proj.weight"] == "model.layers.0.mlp.up_proj.weight"
    assert isinstance(checkpoint.model(), hf.LlamaModel)


def test_a_tensor_that_transformers_computes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    parts = [tensors.pop(f"model.layers.0.mlp.{part}_proj.weight") for part in ("gate", "up")]
    safetensors.torch.save_file(
        tensors | {"model.layers.0.mlp.both.weight": torch.cat(parts)}, tmp_path / "model.safetensors"
    )
    rule = WeightConverter("mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    monkeypatch.setattr(stored_names, "get_model_conversion_mapping", lambda model: [rule])
    with pytest.raises(CompileError) as error:
        Checkpoint(tmp_path)
    assert len(error.value.problems) == 2
    assert "transformers computes model.layers.0.mlp.up_proj.weight out of model.layers.0.mlp.both.weight" in str(
        error.value
    )
    assert "load it with from_pretrained, and compile the module" in str(error.value)
