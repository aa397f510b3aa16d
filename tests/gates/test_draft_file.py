"""The file of a draft: what comes back, what is refused, and what names it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.errors import CompileError, UserError
from fastcar_compile.gates.draft import Draft, DraftSize
from fastcar_compile.ir.pass_manager import pipeline_from_string, pipeline_to_string
from fastcar_compile.passes.insert_drafts import InsertDrafts
from fastcar_compile.passes.pipeline import PASSES

from .drafts import layer_of_draft, random_draft
from .networks import networks

METADATA = {"format": "fastcar-draft", "version": "1"}


@pytest.mark.parametrize("gated", [True, False])
def test_file_round_trip_gives_the_same_bytes(gated: bool, tmp_path: Path) -> None:
    """Layer 1 has a gate alone."""
    draft = random_draft(8, [0], gated)
    draft.save(tmp_path / "a.safetensors")
    again = Draft.load(tmp_path / "a.safetensors")
    assert again == draft
    assert list(again.layers) == [0]
    assert again.gate == draft.gate
    assert again.layers[0].size == DraftSize(8, 4)
    stored = load_file(tmp_path / "a.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    for name, tensor in draft.layers[0].params().items():
        assert torch.equal(stored[f"layer.0.{name}"], tensor)
    again.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_other_values_have_another_digest() -> None:
    whole = layer_of_draft(8)
    made = {Draft.of({0: whole})}
    for name, tensor in whole.items():
        made.add(Draft.of({0: whole | {name: tensor + 1}}))
    assert len(made) == 1 + len(whole)
    assert Draft.of({0: whole}) in made
    # A draft without layers is known by its digest, and is no gate of the same digest.
    assert Draft("00") != fc.ReplayConfig(gate="learned", gate_weights=f"sha256:{'00' * 32}").gate_weights


def refusal(path: Path, stored: dict[str, Tensor], metadata: dict[str, str] | None = None) -> str:
    save_file(stored, path, METADATA if metadata is None else metadata)
    with pytest.raises(CompileError) as raised:
        Draft.load(path)
    assert str(path) in str(raised.value)
    return str(raised.value)


def tensors(layer: int, **changes: Tensor | None) -> dict[str, Tensor]:
    """A layer of a file, with some tensors replaced or (None) left out."""
    return {f"layer.{layer}.{n}": t for n, t in (layer_of_draft(8) | changes).items() if t is not None}


def test_everything_wrong_with_a_file_is_said_at_once(tmp_path: Path) -> None:
    stored = {
        **tensors(0, outer=None, bias=None, other=torch.ones(1)),
        **tensors(1, bias=torch.ones(7), gains=torch.full((16,), float("nan")), inner=torch.ones(4, 9)),
        **tensors(2, edges=torch.arange(15.0).flip(0)),
        **tensors(3, up_proj=torch.ones(8)),
        "nothing": torch.ones(1),
    }
    text = refusal(tmp_path / "draft.safetensors", stored)
    for problem in (
        "unknown tensor 'nothing'",
        "layer.0.outer is missing",
        "layer.0.bias is missing",
        "unknown tensor 'layer.0.other'",
        "layer.1.bias is [7], expected [8]",
        "layer.1.gains has values that are no finite floats",
        "layer.1.inner is [4, 9], expected [4, 8]",
        "layer.2.edges are not in rising order",
        "layer.3.up_proj is [8] and layer.3.inner [4, 8], expected [n, H] and [k, H]",
    ):
        assert problem in text
    assert "as `fastcar fit-draft` writes it" in text


def test_format_version_and_a_file_without_a_draft(tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"
    expected = "expected 'fastcar-draft' version '1'"
    assert f"format 'fastcar-gate' version '1', {expected}" in refusal(
        path, tensors(0), {**METADATA, "format": "fastcar-gate"}
    )
    assert f"format 'fastcar-draft' version '2', {expected}" in refusal(path, tensors(0), METADATA | {"version": "2"})
    assert "unknown tensor 'other'" in refusal(path, {"other": torch.ones(1)})
    gate = {n: t for n, t in tensors(0).items() if n.rpartition(".")[2] in ("w1", "b1", "w2", "b2")}
    assert "there is no layer with a draft" in refusal(path, gate)
    with pytest.raises(UserError, match="the weights cannot be read: "):
        fc.ReplayConfig(draft=tmp_path / "none.safetensors")


def test_a_draft_must_fit_the_decoder() -> None:
    draft = random_draft(8)
    draft.check([8, 8])
    with pytest.raises(CompileError, match="layer 1 of the draft is for a hidden size of 8, but the decoder's is 6"):
        draft.check([8, 6])
    with pytest.raises(CompileError, match="the draft has a layer 1, but the decoder has 1 layer"):
        draft.check([8])


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


def test_json_and_pipeline_text_have_the_digest_alone(tmp_path: Path) -> None:
    draft = random_draft(8)
    draft.save(tmp_path / "draft.safetensors")
    config = fc.ReplayConfig(draft=str(tmp_path / "draft.safetensors"), threshold=0.5)
    text = json.dumps(config.to_json())
    assert str(tmp_path) not in text
    assert config.to_json()["draft"] == draft.name == f"sha256:{draft.digest}"
    again = fc.ReplayConfig.from_json(json.loads(text))
    assert again == config
    assert "draft" not in fc.ReplayConfig().to_json()
    words = pipeline_to_string([InsertDrafts(draft)])
    assert words == f'insert-drafts{{"draft": "{draft.name}"}}'
    (item,) = pipeline_from_string(words, PASSES)
    assert item == InsertDrafts(draft)
    for known in (again.draft, item.draft):  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(CompileError, match=f"the layers of the draft are known only by their digest, {draft.name}"):
            known.require()
