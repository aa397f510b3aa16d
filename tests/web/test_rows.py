"""A decoder of several rows of one video has, in WebAssembly, the tokens and bits of one row a step."""

from pathlib import Path
from typing import Any

import pytest

import fastcar_compile as fc

from .conftest import Node, compiled
from .test_wasm import TOKENS

FRAME, LENGTH, COUNT = 9, 110, 70


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, fc.Artifact]:
    root, sizes = tmp_path_factory.mktemp("rows"), {"tokens_per_frame": FRAME, "max_seq_len": LENGTH}
    return {rows: compiled(root / str(rows), rows=rows, **sizes) for rows in (1, 4)}


def decoded(node: Node, folder: Path, tokens: list[int], windows: list[int]) -> list[dict[str, Any]]:
    return node(folder, prompt=TOKENS[:FRAME], tokens=tokens, windows=windows, count=COUNT)["decoded"]


def test_windows_are_lossless(decoders: dict[int, fc.Artifact], node: Node) -> None:
    """Tokens, decisions, scores, logits and counts, with guesses that are right in part."""
    (expected,) = decoded(node, decoders[1].path, TOKENS[:3], [1])
    guesses = [token if i % 7 else 16 - token for i, token in enumerate(expected["tokens"][:50])]
    alike = decoded(node, decoders[4].path, TOKENS[:3] + guesses, [1, 2, 4])
    steps = [one.pop("steps") for one in alike]
    assert expected.pop("steps") == steps[0] == len(expected["reads"])
    assert alike == [expected] * 3
    assert steps == sorted(steps, reverse=True)
    assert steps[2] < 0.6 * steps[0]
    assert 0.1 < expected["counts"][2] < 0.9


def test_steps_have_the_bits_of_one_row(decoders: dict[int, fc.Artifact], node: Node) -> None:
    request = {"prompt": TOKENS[:FRAME], "tokens": TOKENS[FRAME:], "thresholds": ["compiled", None]}
    one, four = (node(decoders[rows].path, **request)["games"] for rows in (1, 4))
    assert four == one
