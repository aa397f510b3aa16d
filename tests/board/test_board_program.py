"""The XRT host program: built against the real libxrt-dev, run on a stand-in with the kernels in C simulation."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fastcar_compile as fc
from board.conftest import Machine
from fastcar_compile.drs.table import Status

Fake = Callable[[fc.Artifact], Path]


@dataclass(frozen=True)
class Built:
    """fastcar_board for this machine, linked with the real libxrt_coreutil, and what it runs on.

    Args:
        folder: a copy of the artifact whose host program names this machine's libraries. fake: folder of the stand-in.
    """

    program: Path
    folder: Path
    fake: Path
    artifact: fc.Artifact

    def run(self, *words: object, real: bool = False, fault: str = "") -> subprocess.CompletedProcess[str]:
        """The program on the copy, with the stand-in for XRT or the real one."""
        environment = {} if real else {"LD_LIBRARY_PATH": str(self.fake), "FAKE_XRT": fault}
        command = [str(self.program), str(self.folder), *map(str, words)]
        environment = {**os.environ, **environment}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)

    @property
    def xclbin(self) -> Path:
        """Any file will do for the stand-in."""
        return self.folder / "drs" / "table.bin"


@pytest.fixture(scope="module")
def built(
    artifact: fc.Artifact, native: Machine, fake_library: Fake, tmp_path_factory: pytest.TempPathFactory
) -> Built:
    """The program of the artifact whose MLPs are offloaded."""
    return build(artifact, native, fake_library, tmp_path_factory.mktemp("mlp"))


def build(artifact: fc.Artifact, native: Machine, fake_library: Fake, folder: Path) -> Built:
    fake = fake_library(artifact).parent
    copy = folder / "artifact"
    shutil.copytree(artifact.path, copy)
    header = copy / "host" / "src" / "fastcar_program.hpp"
    variant = artifact.manifest.host.variants[0]
    folder_here = f"host/{variant.triple}/{variant.instruction_set}/"
    header.write_text(header.read_text().replace("host/aarch64-linux-gnu/", folder_here))
    done = native.build(copy, folder, "board", CXXFLAGS="-O0")
    assert done.returncode == 0, done.stderr
    return Built(folder / "fastcar_board", copy, fake, artifact)


def test_it_is_linked_with_the_real_library(built: Built) -> None:
    dynamic = subprocess.run(["readelf", "-d", built.program], capture_output=True, text=True, check=True).stdout
    assert "[libxrt_coreutil.so.2]" in dynamic


def assert_same_tokens(built: Built) -> None:
    session = built.artifact.session("cpu")
    expected = session.generate(torch.tensor([[16], [3]]), 40)
    assert 0.0 < session.stats.replay_ratio < 1.0
    done = built.run("--xclbin", built.xclbin, "--prompt", "16", "--prompt", "3", "--num-tokens", 40)
    assert done.returncode == 0, done.stderr
    assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected.tolist()
    assert done.stderr == f"replay ratio {session.stats.replay_ratio:.4f}\n"


def test_tokens_equal_those_of_the_session_here(built: Built) -> None:
    assert_same_tokens(built)


def test_tokens_are_equal_with_linears_offloaded(
    engine_artifact: fc.Artifact, native: Machine, fake_library: Fake, tmp_path: Path
) -> None:
    assert_same_tokens(build(engine_artifact, native, fake_library, tmp_path))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no kernel", "error: the xclbin has no kernel fastcar_engine\n  where: {xclbin}\n  hint:  link the kernels"),
        ("other design", "error: the xclbin is of another design: fastcar_engine takes weights_0 "),
        ("other program", "error: the device holds the xclbin 00000000-0000-0000-0000-000000000002, not 0000"),
        (
            "no memory",
            "error: no memory for {section} bytes: std::bad_alloc\n  where: fastcar_engine, argument w",
        ),
        ("hang", "error: the kernel did not complete, XRT state 8\n  where: fastcar_drs\n  hint:  see `dmesg`"),
    ],
)
def test_faults_of_the_board_are_told(built: Built, fault: str, text: str) -> None:
    done = built.run("--xclbin", built.xclbin, "--prompt", "1", "--num-tokens", 9, fault=fault)
    assert done.returncode == 2
    accelerator = built.artifact.manifest.accelerator
    assert accelerator is not None
    ports = sum(a.name.startswith("weights_") for a in accelerator.kernels[0].arguments)
    section = accelerator.design.stream_bytes // ports
    assert text.format(xclbin=built.xclbin, section=section) in done.stderr
    assert done.stdout == ""


def test_missing_device_is_told(built: Built) -> None:
    done = built.run("--xclbin", built.xclbin, "--prompt", "1", "--device", 7)
    assert done.returncode == 2
    assert "error: the device cannot be opened: No such device with index '7'\n  where: device 7\n" in done.stderr
    assert "hint:  load the XRT driver" in done.stderr


def test_a_damaged_table_is_told(built: Built) -> None:
    table = built.folder / "drs" / "table.bin"
    good = table.read_bytes()
    table.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        done = built.run("--xclbin", built.xclbin, "--prompt", "1", "--num-tokens", 9)
    finally:
        table.write_bytes(good)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert f"the DRS controller stopped with status {Status.BAD_CRC.value}" in done.stderr


def test_the_real_library_tells_a_missing_xclbin(built: Built, tmp_path: Path) -> None:
    done = built.run("--xclbin", tmp_path / "nothing.xclbin", "--prompt", "1", real=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the xclbin cannot be read: Failed to open file '{tmp_path}/nothing.xclbin'")
    assert "hint:  give the file that `make link` wrote" in done.stderr


def test_no_xclbin_is_told(built: Built) -> None:
    done = built.run("--prompt", "1", real=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no --xclbin is given\n  hint:  fastcar_board ARTIFACT --xclbin FILE")
