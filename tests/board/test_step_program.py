"""The XRT host program of an artifact with offload="all": a launch per position, on the stand-in for XRT.

Errors of the board, of a prompt and of a table's checksum come from headers that both kinds of program share:
test_board_program.py and test_host_program.py have them.
"""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import check_tool

import fastcar_compile as fc
from board.conftest import Machine
from board.test_board_program import TOKENS, Built, Fake, build, same_tokens

PROMPT = [[16, 2, 11], [3, 4, 5]]
TABLE = "drs/table.bin"


@pytest.fixture(scope="module")
def built(rows_artifact: fc.Artifact, fake_library: Fake, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The program of an artifact whose whole steps are on the accelerator, by clang, in half the time of g++."""
    check_tool("make")
    machine = Machine(check_tool("clang++"), {}, ())
    return build(rows_artifact, machine, fake_library, tmp_path_factory.mktemp("step"))


@pytest.mark.thorough
def test_an_engine_of_its_own_runs_with_every_launch(
    rtl_artifact: fc.Artifact, native: Machine, fake_library: Fake, tmp_path: Path
) -> None:
    """It is started first: in C simulation a kernel without its engine aborts."""
    built = build(rtl_artifact, native, fake_library, tmp_path)
    same_tokens(built, PROMPT, log := tmp_path / "log")
    kernels = [line.split()[0] for line in log.read_text().splitlines()]
    assert kernels == ["fastcar_engine", "fastcar_step"] * (len(PROMPT[0]) + TOKENS)


@pytest.mark.parametrize(
    ("word", "value", "text"),
    [
        (5, 1, "the control table is of another decoder than this host program"),
        (32, 1, "the control table is of another decoder than this host program"),
        (29, 10**6, "the control table needs 16000000 bytes of `weights_0`, which has "),
        (30, 10**6, "bytes of `cache_0`, which has "),
        (34, 10**6, "the control table needs 16000000 bytes of `replay`, which has "),
    ],
)
def test_a_program_of_another_decoder_is_told(built: Built, word: int, value: int, text: str) -> None:
    """Before it is loaded: the kernel does not know how long its buffers are."""
    program = bytearray((built.folder / TABLE).read_bytes())
    struct.pack_into("<I", program, 4 * word, value)
    with built.replaced(TABLE, bytes(program)):
        said = built.refused("--xclbin", built.xclbin, "--prompt", "1", "--num-tokens", 9)
    assert text in said.splitlines()[0]
    assert f"\n  where: {built.folder}/{TABLE}\n  hint:  use the files of one artifact together" in said


@pytest.mark.thorough  # another host program is compiled for one sentence
def test_rows_with_positions_of_their_own_are_refused_on_the_cpu(built: Built, native: Machine, tmp_path: Path) -> None:
    """By name: the program gives all rows one position."""
    shutil.copytree(built.folder, copy := tmp_path / "artifact")
    header = copy / "host" / "src" / "fastcar_program.hpp"
    header.write_text(header.read_text().replace("own_positions = false", "own_positions = true"))
    done = native.build(copy, tmp_path, "decode")
    assert done.returncode == 0, done.stderr
    done = native.run(tmp_path / "fastcar_decode", copy, "--prompt", "1", "--num-tokens", 9)
    assert done.returncode == 2
    assert "the rows of this decoder have positions of their own, and this program gives all rows one" in done.stderr


def test_coupled_decoding_gives_the_tokens_of_the_session(built: Built, tmp_path: Path) -> None:
    """Drawn ones, of two videos with four rows each: launches are fewer, tokens and what replayed are the same."""
    session = built.artifact.session("cpu")
    prompts = [word for prompt in PROMPT for word in ("--prompt", ",".join(map(str, prompt)))]
    for sampling, drawn in (
        (fc.Sampling(0.8, 9, seed=5), ("--temperature", 0.8, "--top-k", 9, "--seed", 5)),
        (fc.Sampling(temperature=0), ()),
    ):
        expected = session.generate(np.array(PROMPT), TOKENS, sampling, jacobi=fc.Jacobi(1))
        assert 0 < session.stats.replay_ratio < 1
        launches = list[int]()
        for window in (1, 4):
            log = tmp_path / f"log_{sampling.temperature}_{window}"
            words = [*prompts, *drawn, "--num-tokens", TOKENS, "--jacobi", window]
            done = built.run("--xclbin", built.xclbin, *words, log=log, seconds=600)
            assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected.tolist(), done.stderr
            assert done.stderr == f"replay ratio {session.stats.replay_ratio:.4f}\n"
            launches.append(len(log.read_text().splitlines()))
        assert launches[0] == 2 + TOKENS - 1  # the table is loaded, and the prompt read in one launch
        assert launches[1] < launches[0]
