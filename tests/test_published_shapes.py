"""Dry runs of published decoders, from a config.json each: layers, parameters, and Llama-2-7B on a board."""

import re
from pathlib import Path
from typing import Any

import pytest

import fastcar_compile as fc

CONFIGS = Path(__file__).parents[1] / "examples" / "configs"
README = (CONFIGS / "README.md").read_text("utf-8")
ROWS = re.findall(r"^\| `([\w.-]+)` \| (\d+) \| ([\d.]+) B \|", README, re.MULTILINE)
POSITIONS = {"gemma-2-9b": 4608}
"""More than the window, so that local and global layers alternate. Others: 1024, for the sake of time."""
QUICK = ("gemma-2-9b", "cosmos-ar-4b")
"""What the families' tests do not show: many layers, those of two kinds among them, and cross-attention."""


def test_the_table_lists_every_folder() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(p.name for p in CONFIGS.iterdir() if p.is_dir())


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [row if row[0] in QUICK else pytest.param(*row, marks=pytest.mark.thorough) for row in ROWS],
)
def test_a_published_decoder_is_found_whole(name: str, layers: str, billions: str) -> None:
    options: dict[str, Any] = {"tokens_per_frame": 256, "max_seq_len": POSITIONS.get(name, 1024), "prefill_chunk": 1}
    found = fc.compile(CONFIGS / name, "cpu", dry_run=True, **options)
    assert found.decoder.num_layers == len(found.layers) == int(layers)
    assert all(layer.replay is not None for layer in found.layers)
    assert "repeat-layers" in found.pipeline
    assert found.memory.weights / 4e9 == pytest.approx(float(billions), abs=0.01)


@pytest.mark.thorough  # tests/estimate has published shapes on boards
def test_llama_2_7b_on_a_board() -> None:
    found = fc.compile(CONFIGS / "llama-2-7b", "u280", quant="w4a8", tokens_per_frame=256, dry_run=True)
    assert (found.options.offload, found.options.kv) == ("linears", "int8"), "the host's attention is the faster one"
    assert found.ok
    assert not [f for f in found.fallbacks if f.kind != "assumption"]
    assert {p.what: p.calls for p in found.placements if p.unit == "accelerator"} == {
        "MLP": 32, "gate": 32, "qkv": 32, "o": 32, "head": 1,
    }  # fmt: skip
    banks = [bank for bank in found.memory.banks if bank.tag]
    assert len(banks) > 1
    assert all(bank.fits for bank in banks)
    dense, *_, replayed = found.speed
    assert replayed.tokens_per_second > dense.tokens_per_second
