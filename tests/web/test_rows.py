"""A decoder of several rows of one video has, in WebAssembly, the tokens and bits of one row a step."""

from pathlib import Path
from typing import Any

import pytest
from play.worlds import FRAME

import fastcar_compile as fc

from .conftest import Node, compiled
from .test_wasm import TOKENS

COUNT = 48
pytestmark = pytest.mark.thorough  # in every run test_example_crafter.py has the shipped page of several rows in Node


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder of `artifact` with four rows."""
    return compiled(tmp_path_factory.mktemp("rows") / "a", rows=4).path


def decoded(node: Node, folder: Path, tokens: list[int], windows: list[int]) -> list[dict[str, Any]]:
    return node(folder, prompt=TOKENS[:FRAME], tokens=tokens, windows=windows, count=COUNT)["decoded"]


def test_windows_are_lossless(artifact: fc.Artifact, four: Path, node: Node) -> None:
    """Tokens, decisions, scores, logits and counts, with guesses that are right in part."""
    (expected,) = decoded(node, artifact.path, TOKENS[:3], [1])
    guesses = [token if i % 7 else 16 - token for i, token in enumerate(expected["tokens"][:36])]
    alike = decoded(node, four, TOKENS[:3] + guesses, [1, 2, 4])
    steps = [one.pop("steps") for one in alike]
    assert expected.pop("steps") == steps[0] == len(expected["reads"])
    assert alike == [expected] * 3
    assert steps == sorted(steps, reverse=True)
    assert steps[2] < 0.6 * steps[0]
    assert 0.1 < expected["counts"][2] < 0.9


def test_steps_have_the_bits_of_one_row(artifact: fc.Artifact, four: Path, node: Node) -> None:
    request = {"prompt": TOKENS[:FRAME], "tokens": TOKENS[FRAME:], "thresholds": ["compiled", None]}
    assert node(four, **request)["games"] == node(artifact.path, **request)["games"]
