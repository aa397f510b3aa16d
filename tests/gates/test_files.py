"""Files of gate weights and of drafts: what comes back, what is refused, and what names it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.gates import GATES, GateWeights, gate_named
from fastcar_compile.gates.draft import Draft, DraftSize
from fastcar_compile.ir.pass_manager import Pass, pipeline_from_string, pipeline_to_string
from fastcar_compile.passes.insert_drafts import InsertDrafts
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import PASSES
from fastcar_compile.tune.evaluate import Case, load_cases, save_cases

from .drafts import layer_of_draft, random_draft
from .networks import networks

NETWORK = {"w1": torch.ones(3, 8), "b1": torch.ones(3), "w2": torch.ones(3), "b2": torch.ones(1)}
"""Of hidden size 4, with three units."""


@pytest.mark.parametrize(
    "made", [networks(8, 3, 2), random_draft(8, [0]), random_draft(8, [0], gated=False)], ids=["gate", "draft", "plain"]
)
def test_file_round_trip_gives_the_same_bytes(made: GateWeights | Draft, tmp_path: Path) -> None:
    """As float32. Layer 1 of the drafts has a gate alone."""
    made.save(tmp_path / "a.safetensors")
    again = type(made).load(tmp_path / "a.safetensors")
    assert again == made
    stored = load_file(tmp_path / "a.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    for name, tensor in made.layers[0].params().items():
        assert torch.equal(stored[f"layer.0.{name}"], tensor.float())
    again.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    if isinstance(again, Draft) and isinstance(made, Draft):
        assert {layer: own.size for layer, own in again.layers.items()} == {0: DraftSize(8, 4)}
        assert again.gate == made.gate


@pytest.mark.parametrize(("kind", "whole"), [(GateWeights, NETWORK), (Draft, layer_of_draft(8))])
def test_other_values_have_another_digest(kind: type[GateWeights | Draft], whole: dict[str, Tensor]) -> None:
    made = {kind.of({0: whole}), kind.of({0: whole, 1: whole})}
    made |= {kind.of({0: whole | {name: tensor + 1}}) for name, tensor in whole.items()}
    assert len(made) == 2 + len(whole)
    assert kind.of({0: whole}) in made
    assert Draft("00") != GateWeights("00"), "a digest alone is of one of the two"


def layer(number: int, whole: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    """A layer of a file, with some tensors replaced or (None) left out."""
    return {f"layer.{number}.{name}": t.clone() for name, t in (whole | changes).items() if t is not None}


DRAFT = layer_of_draft(8)
NAN = torch.tensor([1.0, float("nan"), 0.0])
WRONG: list[tuple[type[GateWeights | Draft], dict[str, Tensor], list[str]]] = [
    (
        GateWeights,
        {
            **layer(0, NETWORK, b1=torch.ones(2), w2=NAN, b2=None, b3=torch.ones(1)),
            **layer(1, {}, w1=torch.ones(3, 7)),
            **layer(2, NETWORK, b1=torch.ones(3).long()),
            "other": torch.ones(1),
        },
        [
            "unknown tensor 'other'",
            "layer.0.b2 is missing",
            "unknown tensor 'layer.0.b3'",
            "layer.0.w2 has values that are not finite",
            "layer.0.b1 has shape [2], expected [3] as w1 is [3, 8]",
            "layer.1.b1 is missing",
            "layer.1.w1 has shape [3, 7], expected [units, 2 H]",
            "layer.2.b1 is torch.int64, expected float32",
            "layer.l.w1 [units, 2 H]",
        ],
    ),
    (
        Draft,
        {
            **layer(0, DRAFT, outer=None, bias=None, other=torch.ones(1)),
            **layer(1, DRAFT, bias=torch.ones(7), gains=NAN[1].repeat(16), inner=torch.ones(4, 9)),
            **layer(2, DRAFT, edges=torch.arange(15.0).flip(0)),
            **layer(3, DRAFT, up_proj=torch.ones(8)),
        },
        [
            "layer.0.outer is missing",
            "layer.0.bias is missing",
            "unknown tensor 'layer.0.other'",
            "layer.1.bias is [7], expected [8]",
            "layer.1.gains has values that are no finite floats",
            "layer.1.inner is [4, 9], expected [4, 8]",
            "layer.2.edges are not in rising order",
            "layer.3.up_proj is [8] and layer.3.inner [4, 8], expected [n, H] and [k, H]",
            "as `fastcar fit-draft` writes it",
        ],
    ),
    (GateWeights, {}, ["there is no layer"]),
    (Draft, layer(0, NETWORK), ["there is no layer with a draft"]),
]


@pytest.mark.parametrize(("kind", "stored", "problems"), WRONG)
def test_everything_wrong_with_a_file_is_said_at_once(
    kind: type[GateWeights | Draft], stored: dict[str, Tensor], problems: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "file.safetensors"
    save_file(stored, path, {"format": kind.FORMAT, "version": "1"})
    with pytest.raises(CompileError) as raised:
        kind.load(path)
    assert [text for text in [str(path), *problems] if text not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({}, "format None version None"),
        ({"format": "fastcar-draft", "version": "1"}, "format 'fastcar-draft' version '1'"),
        ({"format": "fastcar-gate", "version": "2"}, "format 'fastcar-gate' version '2'"),
    ],
)
def test_another_format_or_version(metadata: dict[str, str], text: str, tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    save_file(layer(0, NETWORK), path, metadata)
    with pytest.raises(CompileError, match=f"{text}, expected 'fastcar-gate' version '1'"):
        GateWeights.load(path)
    with pytest.raises(UserError, match="the weights cannot be read: "):
        fc.ReplayConfig(draft=tmp_path / "none.safetensors")


def test_layers_must_fit_the_decoder() -> None:
    weights, draft = networks(8, 3, 2), random_draft(8)
    weights.check([8, 8])
    draft.check([8, 8])
    with pytest.raises(CompileError) as raised:
        weights.check([8, 6, 8])
    assert "layer 1: w1 is [2, 16], but the decoder's hidden size is 6: it must be [units, 12]" in str(raised.value)
    assert "the gate's weights have no layer 2; they have 0, 1" in str(raised.value)
    with pytest.raises(CompileError, match="the gate's weights have a layer 1, but the decoder has 1 layer"):
        weights.check([8])
    with pytest.raises(CompileError, match="layer 1 of the draft is for a hidden size of 8, but the decoder's is 6"):
        draft.check([8, 6])
    with pytest.raises(CompileError, match="the draft has a layer 1, but the decoder has 1 layer"):
        draft.check([8])


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
    assert "a trained network of 3 units" in gate_named("learned", weights=networks(8, 3).layer(0)).describe()


def test_a_draft_brings_its_gate(tmp_path: Path) -> None:
    draft, other = random_draft(8), networks(8, 3, 3)
    draft.save(tmp_path / "draft.safetensors")
    config = fc.ReplayConfig(draft=tmp_path / "draft.safetensors", threshold=0.5)
    assert (config.gate, config.gate_weights, config.draft) == ("learned", draft.gate, draft)
    assert fc.ReplayConfig(draft=draft, threshold=0.5) == config
    assert fc.ReplayConfig(draft=draft, gate="learned", gate_weights=other).gate_weights == other
    with pytest.raises(CompileError, match="gate 'tas' has no weights: leave gate_weights out, or use gate learned"):
        fc.ReplayConfig(draft=draft, gate_weights=other)
    own = fc.ReplayConfig(draft=draft, gate="input_delta")
    assert (own.gate, own.gate_weights) == ("input_delta", None)
    with pytest.raises(CompileError, match="a draft needs the MLP's cached input, which gate 'tas' does not keep"):
        fc.ReplayConfig(draft=draft, gate="tas")
    with pytest.raises(CompileError, match="a draft is a safetensors file, not 3"):
        fc.ReplayConfig(draft=3)


OWN = networks(8, 3)


@pytest.mark.parametrize(
    ("field", "made", "item", "options"),
    [
        ("gate_weights", OWN, InsertReplay((0.5,), gate="learned", gate_weights=OWN), {"gate": "learned"}),
        ("draft", random_draft(8), InsertDrafts(random_draft(8)), {}),
    ],
)
def test_json_and_pipeline_text_have_the_digest_alone(
    field: str, made: GateWeights | Draft, item: Pass, options: dict[str, Any], tmp_path: Path
) -> None:
    made.save(tmp_path / "file.safetensors")
    config = fc.ReplayConfig(**{field: str(tmp_path / "file.safetensors")}, threshold=0.5, **options)
    text = json.dumps(config.to_json())
    assert str(tmp_path) not in text
    assert config.to_json()[field] == made.name == f"sha256:{made.digest}"
    again = fc.ReplayConfig.from_json(json.loads(text))
    assert again == config
    assert field not in fc.ReplayConfig().to_json()
    (parsed,) = pipeline_from_string(pipeline_to_string([item]), PASSES)
    assert parsed == item
    for known in (getattr(again, field), getattr(parsed, field)):
        with pytest.raises(CompileError, match=f"known only by their digest, {made.name}"):
            known.require()


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
