"""What the host program takes of logits that are not finite: as `Sampling(temperature=0)` does."""

import subprocess
from importlib.resources import files
from pathlib import Path

from conftest import check_tool

PROGRAM = """#include <cstdint>
namespace fastcar_host {
struct DecoderSpec {
  bool takes_embeddings = false;
  int64_t batch = 2, rows = 1, frame = 2, vocab = 3, max_seq_len = 9, layers = 1;
};
}
"""


def test_logits_that_are_not_finite(tmp_path: Path) -> None:
    (tmp_path / "fastcar_program.hpp").write_text(PROGRAM)
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", f"-I{tmp_path}"]
    source = Path(__file__).with_name("greedy_tokens.cpp")
    command = [check_tool("g++"), *options, f"-I{files('hls_templates') / 'host'}", str(source), "-o"]
    subprocess.run([*command, str(tmp_path / "program")], check=True)
    said = subprocess.run([tmp_path / "program"], check=True, capture_output=True, text=True).stdout
    assert said.split("|") == [
        "the logits of all tokens are -inf\n  where: row 1, position 4",
        "the logit of token 2 is NaN\n  where: row 0, position 4",
        "the logit of token 0 is NaN\n  where: row 1, position 4",
        "1 1 1 1 2 2 0 2 ",
        "1 1 2 1 2 2 1 2 ",
        "",
    ]
