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
QUICK = ("cosmos-ar-4b",)
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
