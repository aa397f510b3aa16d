"""fit-draft, compile --draft and what inspect says of it, on a real model."""

import json
from functools import wraps
from pathlib import Path

import numpy as np
import pytest
from drawn_videos import FRAME, LENGTH, sharp_decoder, videos
from typer.testing import CliRunner, Result

import fastcar_compile as fc
from fastcar_compile.cli import app
from fastcar_compile.report.page.tables import replay_page
from fastcar_compile.tune.training import surrogate


def fastcar(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model and videos of it."""
    folder = tmp_path_factory.mktemp("draft")
    model = sharp_decoder(intermediate_size=256)
    model.save_pretrained(folder / "model")
    np.save(folder / "videos.npy", videos(model, 16, 1))
    return folder


def test_a_draft_is_fitted_compiled_and_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surrogate, "STEPS", 30)  # the gate's quality is no matter here
    monkeypatch.setattr(surrogate, "SIZES", (1 / 8, 3 / 8))
    given, file = ("--videos", folder / "videos.npy"), folder / "draft.safetensors"
    words = ("fit-draft", folder / "model", *given, "--share", 0.7, "-o", file)
    report = json.loads(fastcar(*words, "--json").stdout)
    draft = fc.Draft.load(file)
    assert report["draft"] == draft.name
    assert report["layers"] == {
        str(i): {"neurons": own.size.neurons, "rank": own.size.rank} for i, own in draft.layers.items()
    }
    sizes = ("--tokens-per-frame", FRAME, "--max-seq-len", LENGTH, "--prefill-chunk", 1, "--target", "cpu")
    fastcar("compile", folder / "model", "-o", folder / "built", "--draft", file, "--threshold", "0.5", *sizes)
    artifact = fc.load(folder / "built")
    replay = artifact.manifest.options.replay
    assert replay is not None
    assert (replay.gate, replay.draft, replay.gate_weights) == ("learned", draft, draft.gate)
    text = fastcar("inspect", folder / "built", "--explain").stdout
    page = replay_page(artifact.manifest, None)
    for number, layer in draft.layers.items():
        share = layer.size.share(256, gated=True)
        assert page["layers"][number]["draft"] == f"{layer.size}: {share:.1%} of the weights"
        line = f"draft    {layer.size.neurons} neurons, rank {layer.size.rank}: a row that replays reads {share:.1%} of"
        assert line in text
    assert "gets the draft's output, and what is left of that of" in text
    gate = json.loads((folder / "built" / "report.json").read_text())["gate"]
    assert gate["draft"] == draft.name
    assert 0 < gate["draft_share"] <= 0.7

    @wraps(fc.fit_draft)
    def fitted(source: fc.Artifact, *_others: object, **_options: object) -> fc.Draft:
        assert source.digest == artifact.digest
        return draft

    monkeypatch.setattr(fc, "fit_draft", fitted)
    said = fastcar("fit-draft", artifact.path, *given, "-o", file).stdout
    assert draft.name in said
    assert f"layer 1  {draft.layers[1].size.neurons} neurons" in said.replace("   ", "  ")
