"""What the compiler does with the model: the explored design is emitted, and a decoder that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decoders import llama
from typer.testing import CliRunner

import fastcar_compile as fc
from fastcar_compile.cli import app


@pytest.mark.parametrize("offload", ["mlp", "linears"])
def test_an_artifact_is_estimated_with_its_own_design(tmp_path: Path, offload: str) -> None:
    model = llama()
    artifact = fc.compile(
        model, target="zcu102", tokens_per_frame=8, batch_size=2, offload=offload, output=tmp_path / "a"
    )
    section = artifact.manifest.accelerator
    assert section is not None
    assert section.exploration.tried > 5
    result = CliRunner().invoke(app, ["estimate", str(artifact.path), "--replay", "0.5", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["offload"] == offload
    assert report["design"] == section.design.model_dump(mode="json", exclude_none=True)
    assert {s["name"] for s in report["time_line"]} >= {"gate_up", "qkv", "attention"}
    on_host = {s["name"] for s in report["time_line"] if s["unit"] == "host"}
    assert ("qkv" in on_host) == (offload == "mlp")


def test_a_decoder_that_does_not_fit_the_board_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    board = fc.load_target("zcu102")
    small = board.memories[0].model_copy(update={"capacity_bytes": 128 * 2**20 + 10_000})
    with pytest.raises(fc.CompileError) as error:
        fc.compile(
            llama(),
            target=board.model_copy(update={"memories": (small,)}),
            tokens_per_frame=8,
            output=tmp_path / "a",
        )
    text = str(error.value)
    assert "the decoder does not fit the memory of zcu102: weights 0.00 GB (w8a8)" in text
    assert 'quant="w4a8"' in text
    assert list(tmp_path.iterdir()) == []
