"""Draws of the host program are those of `Sampling`, token for token."""

import struct
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from conftest import check_tool

from board.test_greedy_tokens import PROGRAM
from fastcar_compile.ir.draws import table
from fastcar_compile.runtime.sampling import Sampling


@pytest.mark.parametrize("flags", [("-O0",), pytest.param(("-O3", "-march=native", "-ffp-contract=fast"), id="fused")])
def test_a_token_is_the_one_that_python_draws(flags: tuple[str, ...], tmp_path: Path) -> None:
    """At any temperature, top_k, seed, row and position; of small and large vocabularies, equal and infinite logits."""
    (tmp_path / "fastcar_program.hpp").write_text(PROGRAM)
    source, include = (
        Path(__file__).with_name("draw_tokens.cpp"),
        [f"-I{tmp_path}", f"-I{files('hls_templates') / 'host'}"],
    )
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *flags, *include, str(source), "-o", str(tmp_path / "draw")]
    subprocess.run([check_tool("g++"), *options], check=True)
    rng, given, expected = np.random.default_rng(3), list[bytes](), list[int]()
    for number in range(400):
        vocab, row = int(rng.choice([1, 2, 17, 1030])), int(rng.integers(3))
        logits = (rng.normal(size=(row + 1, vocab)) * rng.choice([0.1, 3, 40])).astype(np.float32)
        logits[:, rng.integers(vocab)] = logits[:, 0] if number % 3 else -np.inf if vocab > 1 else 0
        logits[:, vocab // 2] = np.inf if number % 11 == 0 else logits[:, vocab // 2]
        top_k = int(rng.integers(1, vocab + 2)) if number % 2 else None
        seed, position = int(rng.integers(2**63)) * 2 + 1, int(rng.choice([0, 5, 70_000]))
        temperature = float(rng.choice([1.0, 0.7, 1e-30, 1e30]))
        choose = Sampling(temperature, top_k, seed=seed, exact=True).start(np.zeros((row + 1, 1), np.int64))
        expected.append(int(choose(logits, position)[row]))
        given.append(
            struct.pack("<dqQqqq", temperature, top_k or 0, seed, row, position, vocab) + logits[row].tobytes()
        )
    said = subprocess.run([tmp_path / "draw"], input=b"".join(given), check=True, capture_output=True).stdout
    knots = table()[:-1] / 2.0**20
    np.testing.assert_array_equal(np.frombuffer(said[: knots.nbytes]), knots)  # one of C++ is -0
    assert np.frombuffer(said[knots.nbytes :], np.int64).tolist() == expected
