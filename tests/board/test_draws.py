"""Tokens that the host program takes are those of `Sampling`: drawn, greedily, and of logits that are not finite."""

import struct
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
from conftest import check_tool

from fastcar_compile.ir.draws import table
from fastcar_compile.runtime.sampling import Sampling

PROGRAM = """#include <cstdint>
namespace fastcar_host {
struct DecoderSpec {
  bool takes_embeddings = false;
  int64_t batch = 2, rows = 1, frame = 2, vocab = 3, max_seq_len = 9, layers = 1;
};
}
"""


def built(name: str, folder: Path, *flags: str) -> Path:
    """A program of name.cpp and the host's headers."""
    (folder / "fastcar_program.hpp").write_text(PROGRAM)
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *flags, f"-I{folder}"]
    source, host = Path(__file__).with_name(f"{name}.cpp"), files("hls_templates") / "host"
    subprocess.run([check_tool("g++"), *options, f"-I{host}", str(source), "-o", str(folder / name)], check=True)
    return folder / name


def test_a_token_is_the_one_that_python_draws(tmp_path: Path) -> None:
    """At any temperature, top_k, seed, row and position; of small and large vocabularies, equal and infinite logits.
    Also where the compiler may fuse operations."""
    program = built("draw_tokens", tmp_path, "-O3", "-march=native", "-ffp-contract=fast")
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
    said = subprocess.run([program], input=b"".join(given), check=True, capture_output=True).stdout
    knots = table()[:-1] / 2.0**20
    np.testing.assert_array_equal(np.frombuffer(said[: knots.nbytes]), knots)  # one of C++ is -0
    assert np.frombuffer(said[knots.nbytes :], np.int64).tolist() == expected


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    program = built("greedy_tokens", tmp_path, "-fsanitize=undefined")
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert said.split("|") == [
        "the logits of all tokens are -inf\n  where: row 1, position 4",
        "the logit of token 2 is NaN\n  where: row 0, position 4",
        "the logit of token 0 is NaN\n  where: row 1, position 4",
        "1 1 1 1 2 2 0 2 ",
        "1 1 2 1 2 2 1 2 ",
        "",
    ]
