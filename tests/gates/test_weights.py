"""The weights of gate `learned`: the file, what is refused, and where they are needed."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.gates import GATES, GateWeights, gate_named
from fastcar_compile.ir.pass_manager import pipeline_from_string, pipeline_to_string
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import PASSES
from fastcar_compile.tune.evaluate import Case, load_cases, save_cases

from .networks import networks

METADATA = {"format": "fastcar-gate", "version": "1"}


def test_file_round_trip_keeps_the_rounded_values(tmp_path: Path) -> None:
    weights = networks(8, 3, 2)
    weights.save(tmp_path / "a.safetensors")
    again = GateWeights.load(tmp_path / "a.safetensors")
    assert again == weights
    assert again.layer(1).units == 2
    stored = load_file(tmp_path / "a.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    assert torch.equal(stored["layer.0.w1"], weights.layer(0).w1.float())
    again.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_other_values_have_another_digest() -> None:
    assert networks(8, 3) != networks(8, 3, seed=6)
    assert networks(8, 3, 2) != networks(8, 3)
    assert len({networks(8, 3), networks(8, 3)}) == 1


def tensors(**changes: Tensor | None) -> dict[str, Tensor]:
    """A file of one layer of hidden size 4 and three units, with some tensors replaced or (None) left out."""
    whole = {"w1": torch.ones(3, 8), "b1": torch.ones(3), "w2": torch.ones(3), "b2": torch.ones(1)}
    named = {f"layer.0.{name}": t for name, t in whole.items()}
    changed = {name.replace("__", "."): t for name, t in changes.items()}
    return {name: t for name, t in (named | changed).items() if t is not None}


def refusal(path: Path, stored: dict[str, Tensor], metadata: dict[str, str] | None = None) -> str:
    save_file(stored, path, METADATA if metadata is None else metadata)
    with pytest.raises(CompileError) as raised:
        GateWeights.load(path)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_everything_wrong_with_a_file_is_said_at_once(tmp_path: Path) -> None:
    text = refusal(
        tmp_path / "gate.safetensors",
        tensors(
            layer__0__b1=torch.ones(2),
            layer__0__w2=torch.tensor([1.0, float("nan"), 0.0]),
            layer__0__b2=None,
            layer__0__b3=torch.ones(1),
            layer__1__w1=torch.ones(3, 7),
            other=torch.ones(1),
        ),
    )
    for problem in (
        "unknown tensor 'other'",
        "layer.0.b2 is missing",
        "unknown tensor 'layer.0.b3'",
        "layer.0.w2 has values that are not finite",
        "layer.0.b1 has shape [2], expected [3] as w1 is [3, 8]",
        "layer.1.b1 is missing",
        "layer.1.w1 has shape [3, 7], expected [units, 2 H]",
    ):
        assert problem in text
    assert "layer.l.w1 [units, 2 H]" in text


def test_wrong_dtype_format_and_version(tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    assert "layer.0.b1 is torch.int64, expected float32" in refusal(path, tensors(layer__0__b1=torch.ones(3).long()))
    expected = "expected 'fastcar-gate' version '1'"
    assert f"format None version None, {expected}" in refusal(path, tensors(), {})
    assert f"format 'fastcar-gate' version '2', {expected}" in refusal(path, tensors(), METADATA | {"version": "2"})
    assert "there is no layer" in refusal(path, {})


def test_weights_must_fit_the_decoder() -> None:
    weights = networks(8, 3, 2)
    weights.check([8, 8])
    with pytest.raises(CompileError) as raised:
        weights.check([8, 6, 8])
    assert "layer 1: w1 is [2, 16], but the decoder's hidden size is 6: it must be [units, 12]" in str(raised.value)
    assert "the gate's weights have no layer 2; they have 0, 1" in str(raised.value)
    with pytest.raises(CompileError, match="the gate's weights have a layer 1, but the decoder has 1 layer"):
        weights.check([8])
    with pytest.raises(CompileError, match="the gate's weights have no layer 5; they have 0, 1"):
        weights.layer(5)


def test_missing_and_needless_weights() -> None:
    with pytest.raises(CompileError, match="gate 'learned' needs its weights: give gate_weights, the file"):
        fc.ReplayConfig(gate="learned")
    with pytest.raises(CompileError, match="gate 'tas' has no weights: leave gate_weights out"):
        fc.ReplayConfig(gate="tas", gate_weights=networks(8, 3))
    with pytest.raises(CompileError, match="gate 'input_delta' has no weights"):
        gate_named("input_delta", weights=networks(8, 3).layer(0))
    with pytest.raises(CompileError, match="gate weights are a safetensors file, not 3"):
        fc.ReplayConfig(gate="learned", gate_weights=3)
    with pytest.raises(CompileError, match="gate learned has no weights"):
        GATES["learned"]().params()
    assert "w2 . relu(w1 @ [x ; |x - x_cached|] + b1) + b2" in GATES["learned"]().describe()
    assert "a trained network of 3 units" in gate_named("learned", weights=networks(8, 3).layer(0)).describe()


def test_json_names_the_weights_and_not_their_file(tmp_path: Path) -> None:
    weights = networks(8, 3)
    weights.save(tmp_path / "gate.safetensors")
    config = fc.ReplayConfig(gate="learned", gate_weights=str(tmp_path / "gate.safetensors"), threshold=0.5)
    text = json.dumps(config.to_json())
    assert str(tmp_path) not in text
    assert config.to_json()["gate_weights"] == f"sha256:{weights.digest}"
    again = fc.ReplayConfig.from_json(json.loads(text))
    assert again == config
    with pytest.raises(CompileError, match=f"known only by their digest, sha256:{weights.digest}"):
        again.gate_weights.require()
    assert "gate_weights" not in fc.ReplayConfig(gate="tas").to_json()


def test_pipeline_text_names_the_weights() -> None:
    item = InsertReplay((0.5,), gate="learned", gate_weights=networks(8, 3))
    text = pipeline_to_string([item])
    assert re.search(r'"gate_weights": "sha256:[0-9a-f]{64}"', text)
    (again,) = pipeline_from_string(text, PASSES)
    assert again == item
    assert isinstance(again, InsertReplay)
    with pytest.raises(CompileError, match="known only by their digest"):
        again.gate_of(0)


def test_cases_are_read_with_their_weights(tmp_path: Path) -> None:
    weights = networks(8, 3)
    replay = fc.ReplayConfig(gate="learned", gate_weights=weights, threshold=(0.25,))
    cases = [Case("dense"), Case("calibrated", replay, 0.5)]
    save_cases(cases, tmp_path / "cases.json")
    found = load_cases(tmp_path / "cases.json", weights)
    assert found == cases
    assert found[1].replay is not None
    assert found[1].replay.gate_weights is weights
    for given, has in ((None, "no weights were given"), (networks(8, 2), "those given are sha256:")):
        with pytest.raises(UserError, match=has):
            load_cases(tmp_path / "cases.json", given)
