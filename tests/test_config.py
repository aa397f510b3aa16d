"""ReplayConfig and CompileConfig: defaults, JSON round trips, and the text of every refusal."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.config.formats import KV_TYPES, QUANT_FORMATS, kv_type, quant_format
from fastcar_compile.errors import CompileError, InputError
from fastcar_compile.ir.ops.linear import quantize_weight, quantize_weight_int4
from fastcar_compile.ir.ops.operator import stored

BASE: dict[str, Any] = {"target": "zcu102", "tokens_per_frame": 256, "max_seq_len": 2049}


def test_thresholds_one_number_none_and_list() -> None:
    assert ReplayConfig(threshold=1.5).thresholds(3) == (1.5, 1.5, 1.5)
    assert ReplayConfig(threshold=None).thresholds(2) == (None, None)
    assert ReplayConfig(threshold=[1, None, "-inf"]).thresholds(3) == (1.0, None, -math.inf)


@given(st.one_of(st.none(), st.floats(allow_nan=False), st.lists(st.none() | st.floats(allow_nan=False), max_size=6)))
def test_replay_config_survives_json(threshold: Any) -> None:
    config = ReplayConfig(threshold=threshold)
    assert ReplayConfig.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False))) == config


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"gate": "cosine"}, ["unknown gate 'cosine'; known gates: tas"]),
        ({"threshold": math.nan}, ["threshold: a threshold cannot be NaN"]),
        ({"threshold": "high"}, ["threshold: a threshold is a number, 'inf', '-inf' or '>' and a number, not 'high'"]),
        ({"threshold": [1.0, "x"]}, ["not 'x'"]),
        ({"max_chain": 0}, ["max_chain: Input should be greater than or equal to 1 (given: 0)"]),
        ({"couple_cfg": "yes"}, ["couple_cfg: Input should be a valid boolean"]),
        ({"treshold": 1.0}, ["treshold: Extra inputs are not permitted"]),
        ({"gate": "x", "max_chain": -1}, ["unknown gate 'x'", "max_chain:", "correct the fields named"]),
    ],
)
def test_bad_replay_config(fields: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(CompileError) as caught:
        ReplayConfig(**fields)
    assert str(caught.value).startswith("ReplayConfig is not valid: ")
    assert caught.value.where.startswith("ReplayConfig.")
    for text in texts:
        assert text in str(caught.value)


def test_frame_not_smaller_than_sequence() -> None:
    with pytest.raises(CompileError) as caught:
        CompileConfig(**{**BASE, "tokens_per_frame": 2049})
    assert "tokens_per_frame (2049) is not smaller than max_seq_len (2049)" in str(caught.value)
    assert "at least two frames (4098)" in caught.value.hint


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"quant": "w2a8"}, "quant: unknown quantisation 'w2a8'; known: none, bf16, fp16, w8a8, w4a8"),
        ({"kv": "float8"}, "kv: unknown KV type 'float8'; known: float32, float16, bfloat16, int8"),
        ({"batch_size": 33}, "batch_size: Input should be less than or equal to 32 (given: 33)"),
        ({"max_seq_len": 12.5}, "max_seq_len: Input should be a valid integer"),
        ({"engine": "vhdl"}, "engine: Input should be 'hls' or 'rtl' (given: 'vhdl')"),
        ({"offload": "head"}, "offload: Input should be 'mlp', 'linears' or 'all' (given: 'head')"),
    ],
)
def test_bad_compile_config(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(CompileError) as caught:
        CompileConfig(**{**BASE, **fields})
    assert text in str(caught.value)


def test_coupled_rows_need_an_even_batch() -> None:
    with pytest.raises(CompileError, match="batch_size is 3"):
        CompileConfig(**BASE, batch_size=3, replay=ReplayConfig(couple_cfg=True))


def test_missing_fields_are_listed_together() -> None:
    with pytest.raises(CompileError, match=r"tokens_per_frame: Field required; max_seq_len: Field required"):
        CompileConfig(target="cpu")


# The registry of KV types and quantisation formats against the operators that define them.


@pytest.mark.parametrize("name", KV_TYPES)
@given(dim=st.integers(1, 200))
def test_row_is_what_the_operator_stores(name: str, dim: int) -> None:
    kind = KV_TYPES[name]
    row = stored(torch.ones(2, dim), getattr(torch, kind.dtype))
    assert row.shape[1] == kind.row_size(dim)
    assert row[0].nbytes == kind.row_bytes(dim)
    assert kv_type(row.dtype) is kind


@pytest.mark.parametrize(("name", "quantise"), [("w8a8", quantize_weight), ("w4a8", quantize_weight_int4)])
def test_linear_bytes_are_those_of_the_stored_weight(name, quantise) -> None:
    values, scales = quantise(torch.randn(24, 384))
    assert QUANT_FORMATS[name].linear_bytes(24, 384) == values.nbytes + scales.nbytes


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        InputError, match="no KV cache has the type 'int4'\n  hint:  use one of: float32, float16, bfloat16, int8"
    ):
        kv_type("int4")
    with pytest.raises(
        InputError, match="unknown quantisation 'w2a8'\n  hint:  use one of: none, bf16, fp16, w8a8, w4a8"
    ):
        quant_format("w2a8")
