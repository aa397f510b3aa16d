"""Weights that are no numbers are refused by name; weights that a number format loses are warned of by name."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import first_often
from decoders import PlainDecoder, llama
from torch import Tensor, nn

import fastcar_compile as fc
from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.checkpoint import Checkpoint
from fastcar_compile.ir.ops.linear import quantize_weight, quantize_weight_int4
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.weight_checks import lost, require_numbers
from fastcar_compile.passes.pipeline import QUANTIZE, analysis_pipeline
from fastcar_compile.passes.quantize import to_bfloat16, to_float16

UP = "model.layers.0.mlp.up_proj.weight"
SIZES: dict[str, Any] = {"batch_size": 1, "max_seq_len": 16, "tokens_per_frame": 4, "prefill_chunk": 1}


def checked(model: nn.Module | Checkpoint, quant: str = "none") -> Any:
    """The program of a decoder after the phases of a build that look at its weights."""
    program = run_pipeline(capture(model, **SIZES), analysis_pipeline())
    require_numbers(program)
    return program if quant == "none" else run_pipeline(program, [QUANTIZE[quant]])


def changed(name: str, change: Callable[[Tensor], object]) -> nn.Module:
    model = llama(attention_bias=True, num_hidden_layers=1)
    with torch.no_grad():
        change(dict([*model.named_parameters(), *model.named_buffers()])[name])
    return model


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        (UP, (3, 5), math.nan), ("model.layers.0.self_attn.q_proj.bias", (1,), -math.inf),
        ("model.rotary_emb.inv_freq", (4,), math.inf),
    ],
)  # fmt: skip
def test_a_weight_that_is_no_number_is_refused(name: str, place: tuple[int, ...], value: float) -> None:
    with pytest.raises(CompileError) as caught:
        checked(changed(name, lambda tensor: tensor.__setitem__(place, value)))
    kind = "values that are no numbers" if math.isnan(value) else "infinite values"
    assert f"{name} holds {kind}" in str(caught.value)


def test_all_of_them_are_named_before_anything_is_written(tmp_path: Path) -> None:
    model = changed(UP, lambda tensor: tensor[0].fill_(math.nan))
    model.get_parameter("model.norm.weight").data[0] = math.inf
    with pytest.raises(CompileError, match=f"(?s)2 problems.*{UP} holds .*NaN.*norm.weight holds infinite"):
        fc.compile(model, "cpu", tokens_per_frame=4, quant="w8a8", replay=None, output=tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_folder_is_refused_while_its_weights_are_written(tmp_path: Path) -> None:
    changed(UP, lambda tensor: tensor[9].fill_(-math.inf)).save_pretrained(tmp_path / "model")  # pyright: ignore[reportCallIssue]
    with pytest.raises(CompileError, match=f"{UP} holds infinite values"):
        fc.compile(tmp_path / "model", "cpu", tokens_per_frame=4, quant="w8a8", replay=None, output=tmp_path / "made")
    assert not (tmp_path / "made").exists()


class Forbidding(PlainDecoder):
    """A decoder with a mask of infinities over its logits: in a buffer, in a constant and in the bias of its head."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(rows=16, layers=1)
        self.register_buffer("mask", torch.zeros(4, 11))
        self.mask[:, 3] = -math.inf
        with torch.no_grad():
            self.head.bias[4] = -math.inf

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        logits = super().forward(input_ids, cache_position) + self.mask[cache_position % 4]
        return torch.where(torch.arange(11) == 5, torch.tensor(-math.inf), logits)


def test_infinities_may_forbid_tokens() -> None:
    model = Forbidding()
    checked(model)
    model.mask[1, 1] = math.nan
    with pytest.raises(CompileError, match="mask holds values that are no numbers"):
        checked(model)


@pytest.mark.parametrize(
    ("make", "largest"),
    [(quantize_weight_int4, 3e-5), (quantize_weight, 1e-38), (to_float16, 2.9e-8), (to_bfloat16, 4.5e-41)],
)
def test_what_a_format_has_no_number_for_is_counted(
    make: Callable[[Tensor], tuple[Tensor, ...]], largest: float
) -> None:
    """Half of the rows are too small; zeros are nothing to lose, and rounding within the range is no loss."""
    weight = torch.randn(8, 160, generator=torch.Generator().manual_seed(0))
    assert lost("w", weight, make(weight)) == 0
    weight[:4] *= largest / weight[:4].abs().max()
    weight[:, :10] = 0
    assert lost("w", weight, make(weight)) == 4 * 150
    assert lost("w", torch.zeros(8, 160), make(torch.zeros(8, 160))) == 0


@pytest.mark.parametrize(
    ("make", "kept", "value"),
    [(quantize_weight_int4, 4e5, 5e5), (to_bfloat16, 3.38e38, 3.4e38), (to_float16, 65519.0, 65520.0)],
)
def test_weights_beyond_a_format_are_refused(
    make: Callable[[Tensor], tuple[Tensor, ...]], kept: float, value: float
) -> None:
    """As 65519 is rounded to float16's largest number, 65504, and 65520 to infinity."""
    weight = torch.ones(2, 128)
    weight[0, 0] = kept
    lost("w", weight, make(weight))
    weight[1, 7] = -value
    with pytest.raises(CompileError, match=r"(?s)w has a weight of magnitude .*ends at.*choose quant"):
        lost("w", weight, make(weight))


@pytest.mark.parametrize(("quant", "factor"), first_often([("w4a8", 1e-7), ("fp16", 1e-10)]))
def test_a_folder_and_its_module_lose_alike(tmp_path: Path, quant: str, factor: float) -> None:
    model = changed(UP, lambda tensor: tensor[:48].mul_(factor))
    model.save_pretrained(tmp_path)  # pyright: ignore[reportCallIssue]
    lazy = checked(Checkpoint(tmp_path), quant)
    for _ in range(2):  # a second reading counts nothing twice
        list(lazy.params.blocks(lazy.params))
    assert lazy.lazy.losses() == checked(model, quant).losses == {UP: 0.5}


def test_a_dry_run_warns_of_a_module() -> None:
    model = changed(UP, lambda tensor: tensor.mul_(1e-7))
    with pytest.warns(UserWarning, match=rf"makes weights 0.*{UP} \(100.00%\)"):
        fc.compile(model, "cpu", tokens_per_frame=4, quant="w4a8", replay=None, dry_run=True)


@pytest.mark.parametrize("dtype", first_often([torch.bfloat16, torch.float64]))
def test_a_folder_does_not_depend_on_the_callers_defaults(tmp_path: Path, dtype: torch.dtype) -> None:
    llama(num_hidden_layers=1).save_pretrained(tmp_path)

    def plan() -> object:
        found = fc.compile(tmp_path, "cpu", tokens_per_frame=4, quant="w8a8", replay=None, dry_run=True)
        return found.to_json()

    expected = plan()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            actual = plan()
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert actual == expected


def test_a_constant_that_is_no_number_is_refused() -> None:
    model: Any = llama(num_hidden_layers=1)
    model.model.layers[0].self_attn.scaling = math.nan
    with pytest.raises(CompileError, match="reads a constant that is no number"):
        checked(model)


def test_the_factor_of_a_nan_is_a_number() -> None:
    """So that x times it is NaN, and no place of the table is beside it."""
    factor = torch.ops.fastcar.activation_factor(torch.tensor([math.nan, 0.0]), "silu")
    assert factor.isfinite().all()
