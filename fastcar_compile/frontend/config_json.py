"""The config.json of a Hugging Face folder, checked before Transformers reads it.

Transformers checks some fields, computes with others before it checks them, and takes the rest as they are. So sizes,
numbers and names that a decoder is built from are checked here; a field that is not there has Transformers' default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.activations import ACT2FN

from fastcar_compile import limits
from fastcar_compile.errors import CompileError
from fastcar_compile.strict_json import read_json

CONFIG = "config.json"

_HINT_FILE = 'config.json needs "architectures": ["…ForCausalLM"] and "model_type", as save_pretrained writes them'
_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tokens_per_frame", "num_labels"),
)
_MOST = {"num_hidden_layers": limits.LAYERS, "num_labels": 1 << 20}
_NUMBERS = ("rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "partial_rotary_factor")
_MOST_NUMBER = limits.SIZE * limits.SIZE
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_IMPLEMENTATIONS = (None, "eager", "sdpa")
_PARTS = ("text_config", "decoder")
"""Configs inside of the config that describe the decoder."""

_HINT_WEIGHTS = "give sizes whose weights fit memory"

_MOST_ELEMENTS = 1 << 34
"""Of one weight: 64 GiB in float32. The embedding of 256,000 tokens of 16,384 has a quarter of that."""


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the checked content of config.json.

    Raises:
        CompileError: there is no such file, it is no JSON object, or fields are not what a decoder can have, all at
            once.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise CompileError("the model folder has no config.json", where=str(folder), hint=_HINT_FILE)
    data = read_json(file, "model's config.json", CompileError, size=limits.CONFIG_BYTES, hint=_HINT_FILE)
    if not isinstance(data, dict):
        raise CompileError("config.json holds no JSON object", where=str(file), hint=_HINT_FILE)
    found = [CompileError(what, where=str(file), hint=hint) for what, hint in _problems(data)]
    if found:
        raise CompileError.collect(found)
    return data


def _problems(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return what is wrong, and how to correct it."""
    names = data.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        yield f"config.json names no architecture (architectures = {names!r:.80})", _HINT_FILE
    if "model_type" in data and not isinstance(data["model_type"], str):
        yield f"config.json says model_type = {data['model_type']!r:.80}", _HINT_FILE
    for prefix, part in _parts(data):
        yield from _field_problems(prefix, part)


def _parts(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", data
    yield from ((f"{name}.", data[name]) for name in _PARTS if isinstance(data.get(name), Mapping))


def _field_problems(prefix: str, part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value, hint in (*_size_problems(part), *_number_problems(part), *_name_problems(part)):
        yield f"config.json says {prefix}{name} = {value!r:.80}", hint
    yield from _weight_problems(part)


def _weight_problems(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return the weights that are too large; building the model would ask for their memory."""

    def size(name: str) -> int:
        value = part.get(name)
        return value if type(value) is int and value > 0 else 1

    hidden = size("hidden_size")
    heads = max(size("num_attention_heads"), size("num_key_value_heads")) * size("head_dim")
    for name, other in (
        ("intermediate_size", size("intermediate_size")),
        ("vocab_size", size("vocab_size")),
        ("num_attention_heads * head_dim", heads),
    ):
        if hidden * other > _MOST_ELEMENTS:
            yield f"config.json implies a weight of hidden_size {hidden} x {name} {other}", _HINT_WEIGHTS


def _size_problems(part: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name in _SIZES:
        value, most = part.get(name), _MOST.get(name, limits.SIZE)
        listed = value if isinstance(value, list) else [] if value is None else [value]  # some have one per layer
        if not all(type(each) is int and 1 <= each <= most for each in listed):
            yield name, value, f"give a whole number from 1 to {most}"


def _number_problems(part: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name in _NUMBERS:
        value = part.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST_NUMBER
        if value is not None and not number:
            yield name, value, "give a positive number"
    for name in ("rope_scaling", "rope_parameters"):
        if part.get(name) is not None and not isinstance(part[name], Mapping):
            yield name, part[name], "give an object, or leave it out"


def _name_problems(part: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name in part:
        if name.endswith("_implementation") and part[name] not in _IMPLEMENTATIONS:
            yield name, part[name], "leave it out: other implementations are code that Transformers would load"
    for name in _ACTIVATIONS:
        value = part.get(name)
        if value is not None and not (isinstance(value, str) and value in ACT2FN):
            yield name, value, "give the name of an activation that Transformers has, for example silu"
    for name in ("torch_dtype", "dtype"):
        value = part.get(name)
        if value is not None and not (isinstance(value, str) and value.removeprefix("torch.") in _DTYPES):
            yield name, value, f"give one of {', '.join(_DTYPES)}"
