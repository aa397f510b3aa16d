"""What the compiler does with the model: the explored design is emitted, and a decoder that does not fit is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoders import llama
from typer.testing import CliRunner

import fastcar_compile as fc
from fastcar_compile.cli import app
from fastcar_compile.codegen.hls.design.memory import HOST_RESERVE, Footprint, capacity, require_fit
from fastcar_compile.codegen.hls.model.shapes import load_shape
from fastcar_compile.codegen.hls.model.system import estimate
from fastcar_compile.codegen.hls.model.workload import Workload, workload_of


@pytest.mark.parametrize("offload", [pytest.param("mlp", marks=pytest.mark.thorough), "linears"])
def test_an_artifact_is_estimated_with_its_own_design(tmp_path: Path, offload: str) -> None:
    sizes: dict[str, Any] = {"tokens_per_frame": 8, "batch_size": 2, "prefill_chunk": 1}
    artifact = fc.compile(llama(), "zcu102", **sizes, offload=offload, output=tmp_path / "a")
    section = artifact.manifest.accelerator
    assert section is not None
    assert section.exploration.tried > 5
    result = CliRunner().invoke(app, ["estimate", str(artifact.path), "--replay", "0.5", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["offload"] == offload
    assert report["design"] == section.design.model_dump(mode="json", exclude_none=True)
    assert {s["name"] for s in report["time_line"]} >= {"gate_up", "qkv", "attention"}
    decoder, state = artifact.manifest.decoder, sum(s.nbytes for s in artifact.state)
    assert report["memory"]["total"] == decoder.weight_bytes + state
    assert workload_of(artifact.manifest).footprint(fc.load_target("u280")) == Footprint(decoder.weight_bytes, 0, 0)
    on_host = {s["name"] for s in report["time_line"] if s["unit"] == "host"}
    assert ("qkv" in on_host) == (offload == "mlp")


def test_a_card_holds_the_weights_and_the_caches_where_it_attends() -> None:
    """The cache alone would fill the card. A board that shares its memory with the host holds it too."""
    work, card = Workload(load_shape("llama3-8b"), "w4a8", 2**18), fc.load_target("u280")
    assert work.kv_bytes(work.context) > capacity(card)
    assert estimate(work, card).what_if == ()
    with pytest.raises(fc.CompileError, match="does not fit the memory of u280"):
        require_fit(replace(work, offload="all").footprint(card), card, quant="w4a8", positions=work.context)
    with pytest.raises(fc.CompileError, match="does not fit the memory of zcu102"):
        estimate(work, fc.load_target("zcu102"))


def test_a_dry_run_refuses_from_the_same_byte_on() -> None:
    board = fc.load_target("zcu102")
    work = fc.compile(llama(), board, offload="mlp", tokens_per_frame=8, dry_run=True)
    needed = work.memory.banks[0].used
    assert needed == work.memory.weights + sum(work.memory.state.values())
    for room, fits in ((needed, True), (needed - 1, False)):
        memory = board.memories[0].model_copy(update={"capacity_bytes": HOST_RESERVE + room})
        narrow = board.model_copy(update={"memories": (memory,)})
        found = fc.compile(llama(), narrow, offload="mlp", tokens_per_frame=8, dry_run=True)
        assert (found.ok, len(found.speed)) == (fits, len(work.speed))


def test_a_decoder_that_does_not_fit_the_board_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    board = fc.load_target("zcu102")
    small = board.memories[0].model_copy(update={"capacity_bytes": 128 * 2**20 + 10_000})
    board, text = board.model_copy(update={"memories": (small,)}), r"fit the memory of zcu102: weights 0.00 GB \(w8a8\)"
    with pytest.raises(fc.CompileError, match=rf'(?s){text}.*quant="w4a8"'):
        fc.compile(llama(), board, offload="mlp", tokens_per_frame=8, output=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
