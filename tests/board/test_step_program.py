"""The XRT host program of an artifact with offload="all": a launch per position, on the stand-in for XRT."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fastcar_compile as fc
from board.conftest import Machine
from board.test_board_program import Built, Fake, build
from fastcar_compile.codegen.hls.step_program.program import StepOp
from fastcar_compile.codegen.hls.step_program.simulator import NO_STEP
from fastcar_compile.runtime.backends.accelerator.step import accelerator_of
from fastcar_compile.runtime.backends.board import buffer_bytes

PROMPT, COUNT = [[16, 2, 11], [3, 4, 5]], 40
WORDS = ("--prompt", "1", "--num-tokens", 9)
TABLE = "drs/table.bin"


@pytest.fixture(scope="module")
def built(
    step_artifact: fc.Artifact, native: Machine, fake_library: Fake, tmp_path_factory: pytest.TempPathFactory
) -> Built:
    """The program of the artifact whose whole step is on the accelerator."""
    return build(step_artifact, native, fake_library, tmp_path_factory.mktemp("step"))


def test_a_launch_per_position_gives_the_tokens_of_the_session(built: Built, tmp_path: Path) -> None:
    session = built.artifact.session("cpu")
    expected = session.generate(torch.tensor(PROMPT), COUNT).tolist()
    assert len({token for row in expected for token in row}) > 4
    ratio = session.stats.replay_ratio
    assert 0 < ratio < 1
    prompts = [word for row in PROMPT for word in ("--prompt", ",".join(map(str, row)))]
    log = tmp_path / "log"
    done = built.run("--xclbin", built.xclbin, *prompts, "--num-tokens", COUNT, log=log)
    assert (done.returncode, done.stderr) == (0, f"replay ratio {ratio:.4f}\n")
    assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected
    lines = [dict(word.split("=") for word in line.split()[1:]) for line in log.read_text().splitlines()]
    launches = [(int(line["op"]), int(line["position"]), int(line["step"])) for line in lines]
    length = len(PROMPT[0])
    assert launches == [
        (StepOp.LOAD, 0, 0),
        *((StepOp.RUN, position, NO_STEP) for position in range(length)),
        *((StepOp.RUN, length + step, step) for step in range(COUNT - 1)),
    ]


def test_a_prompt_that_does_not_fit_is_refused(built: Built) -> None:
    for words, text in (
        (("--prompt", "17"), "token 17 is outside the vocabulary of 17\n  hint:  use ids 0 .. 16"),
        (("--prompt", "1", "--num-tokens", 66), "1 prompt token and 66 new ones do not fit max_seq_len 65"),
    ):
        done = built.run("--xclbin", built.xclbin, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {text}")


def test_what_the_kernel_refuses_is_told(built: Built) -> None:
    """Where a manifest vouches for it."""
    good = (built.folder / TABLE).read_bytes()
    with built.replaced(TABLE, good[:-1] + bytes([good[-1] ^ 1])):
        done = built.run("--xclbin", built.xclbin, *WORDS)
    assert (done.returncode, done.stdout) == (2, "")
    text = "the kernel refuses the control table with status BAD_CRC"
    assert done.stderr.startswith(f"error: {text}\n  where: {built.folder}/{TABLE}\n  hint:  copy the artifact again")


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
        done = built.run("--xclbin", built.xclbin, *WORDS)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr.splitlines()[0]
    assert f"\n  where: {built.folder}/{TABLE}\n  hint:  use the files of one artifact together" in done.stderr


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no kernel", "error: the xclbin has no kernel fastcar_step\n  where: {xclbin}\n  hint:  link the kernels"),
        ("other design", "error: the xclbin is of another design: fastcar_step takes weights_0 "),
        ("hang", "error: the kernel did not complete, XRT state 8\n  where: fastcar_step\n  hint:  see `dmesg`"),
    ],
)
def test_faults_of_the_board_are_told(built: Built, fault: str, text: str) -> None:
    done = built.run("--xclbin", built.xclbin, *WORDS, fault=fault)
    assert (done.returncode, done.stdout) == (2, "")
    assert text.format(xclbin=built.xclbin) in done.stderr


def test_too_little_contiguous_memory_is_told(built: Built, meminfo: Callable[[int], Path]) -> None:
    """Caches and what replay keeps are counted, too."""
    needed = buffer_bytes(accelerator_of(built.artifact))
    words = ("--xclbin", built.xclbin, *WORDS)
    assert built.run(*words, "--meminfo", meminfo(needed)).returncode == 0
    done = built.run(*words, "--meminfo", meminfo(needed - 1024))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: the buffers need {needed / 1e6:.1f} MB of contiguous memory (CMA)" in done.stderr
