"""The registry of KV types and quantisation formats against the operators that define them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcar_compile.config.formats import KV_TYPES, QUANT_FORMATS, kv_type, quant_format
from fastcar_compile.errors import InputError
from fastcar_compile.ir.ops.linear import quantize_weight, quantize_weight_int4
from fastcar_compile.ir.ops.operator import stored


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
