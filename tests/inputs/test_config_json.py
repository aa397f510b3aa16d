"""A model folder whose config.json is broken: a named error with the file and the field, at once."""

import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from decoders import SIZES

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.checkpoint import ConfigFolder, open_folder

from . import evil

BASE: dict[str, Any] = SIZES | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip
NO_SIZE = {"a text": "abc", "negative": -1, "zero": 0, "huge": 10**30, "true": True}
FIELDS: dict[str, tuple[str, Any]] = {
    **{f"{name} that is {what}": (name, value) for name in (*SIZES, "head_dim") for what, value in NO_SIZE.items()},
    "a billion layers": ("num_hidden_layers", 10**9),
    "a base that is a text": ("rope_theta", "abc"),
    "an epsilon that is a text": ("rms_norm_eps", "x"),
    "an unknown activation": ("hidden_act", "abc"),
    "an unknown type": ("torch_dtype", "os"),
    "no architecture": ("architectures", None),
    "an architecture of no model": ("architectures", ["__class__"]),
    "the architecture of all models": ("architectures", ["PreTrainedModel"]),
    "an unknown model": ("model_type", "nothing"),
    "an attention from the network": ("attn_implementation", "kernels-community/flash-attn"),
    "quantised weights": ("quantization_config", {"quant_method": "gptq", "bits": 4}),
}


def refusal(folder: Path) -> CompileError:
    started = time.perf_counter()
    with pytest.raises(CompileError) as caught:
        _ = ConfigFolder(folder).skeleton.shapes
    assert time.perf_counter() - started < 10
    return caught.value


@pytest.mark.parametrize("name", FIELDS)
def test_a_broken_field_is_named(name: str, tmp_path: Path) -> None:
    field, value = FIELDS[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**BASE, field: value}))
    error = refusal(tmp_path)
    for single in error.problems or (error,):
        assert (single.where, bool(single.hint)) == (str(file), True)
    if name not in ("an architecture of no model", "a method", "quantised weights that are a text"):
        words = {"architectures": "architecture", "model_type": "model", "quantization_config": "quantised"}
        assert words.get(field, field) in str(error)


WHOLE = json.dumps(BASE).encode()


@pytest.mark.parametrize(
    "name", ["num_key_value_heads", "head_dim", "rope_theta", "hidden_act", "max_position_embeddings"]
)
def test_a_field_that_is_left_out_has_the_default_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in BASE.items() if n != name}))
    assert ConfigFolder(tmp_path).skeleton.layers == 2


def test_no_code_of_a_folder_runs(tmp_path: Path) -> None:
    """Neither modules that the config names, nor pickled weights."""
    place = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "code.py").write_text(evil.source(place))
    (folder / "modeling_code.py").write_text(evil.source(place))
    maps = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "modeling_code.Model"}
    (folder / "config.json").write_text(json.dumps({**BASE, "auto_map": maps}))
    (folder / "pytorch_model.bin").write_bytes(evil.pickled(place))
    (folder / "model.pkl").write_bytes(pickle.dumps(evil.Trap(place)))
    with pytest.raises(CompileError, match="pickled weights are not read"):
        open_folder(folder)
    assert open_folder(folder, weights=False).skeleton.layers == 2
    (folder / "config.json").write_text(json.dumps({**BASE, "auto_map": maps, "model_type": "code"}))
    with pytest.raises(CompileError, match="transformers cannot read config"):
        open_folder(folder, weights=False)
    assert not place.exists()


INDEXES = {"a list": "[]", "no map": "{}", "a number": '{"weight_map": 7}', "a path": '{"weight_map": {"a": "../b"}}'}


@pytest.mark.parametrize("name", [*INDEXES, "deep"])
def test_a_broken_index_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(WHOLE)
    (tmp_path / "model.safetensors.index.json").write_text(INDEXES.get(name, "[" * 10**5))
    with pytest.raises(CompileError, match="index of the shards") as caught:
        open_folder(tmp_path)
    assert "model.safetensors.index.json" in str(caught.value)
