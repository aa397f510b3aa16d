"""The XRT host program: built against the real libxrt-dev, run on a stand-in with the kernels in C simulation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import check_module, check_tool, missing

import fastcar_compile as fc
from board.conftest import Machine
from fastcar_compile.codegen.hls.csim import ap_types_folder

XRT_HEADERS = Path("/usr/include/xrt")


@pytest.fixture(scope="module")
def xrt_headers() -> Path:
    """Skips (or in CI fails) unless Debian's libxrt-dev is there."""
    if not (XRT_HEADERS / "xrt" / "xrt_kernel.h").is_file():
        missing("package missing: libxrt-dev")
    return XRT_HEADERS


@pytest.fixture(scope="module")
def program(
    artifact: fc.Artifact, native: Machine, xrt_headers: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """fastcar_board for this machine, linked with the real libxrt_coreutil. It takes the libraries in `here`."""
    folder = tmp_path_factory.mktemp("board_program")
    here = artifact_for_this_machine(artifact, folder)
    built = native.build(here, folder, "board", CXXFLAGS="-O0")
    assert built.returncode == 0, built.stderr
    needed = subprocess.run(["readelf", "-d", folder / "fastcar_board"], capture_output=True, text=True, check=True)
    assert "[libxrt_coreutil.so.2]" in needed.stdout
    return folder / "fastcar_board"


def artifact_for_this_machine(artifact: fc.Artifact, folder: Path) -> fc.Artifact:
    """A copy whose host program names this machine's libraries instead of the board's."""
    copy = folder / "artifact"
    if not copy.exists():
        shutil.copytree(artifact.path, copy)
        header = copy / "host" / "src" / "fastcar_program.hpp"
        triple = artifact.manifest.sections["host"]["triple"]
        header.write_text(header.read_text().replace("host/aarch64-linux-gnu/", f"host/{triple}/"))
    made = object.__new__(fc.Artifact)
    made.path = copy
    return made


@pytest.fixture(scope="module")
def fake(
    artifact: fc.Artifact, program: Path, xrt_headers: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Environment in which `program` finds the stand-in instead of libxrt_coreutil."""
    check_module("hls4ml")
    folder = tmp_path_factory.mktemp("fake_xrt")
    kernels = artifact.manifest.sections["accelerator"]["kernels"]
    names = ", ".join(
        f'{{"{k["name"]}", {{{", ".join(json.dumps(a["name"]) for a in k["arguments"])}}}}}' for k in kernels
    )
    (folder / "fake_names.hpp").write_text(
        f"#include <map>\n#include <string>\n#include <vector>\n"
        f"const std::map<std::string, std::vector<std::string>> ARGUMENT_NAMES = {{{names}}};\n"
    )
    sources = artifact.path / "hls"
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w"]
    include = [f"-I{folder}", f"-I{sources}", "-isystem", str(ap_types_folder()), "-isystem", str(xrt_headers)]
    output = ["-o", str(folder / "libxrt_coreutil.so.2")]
    command = [check_tool("g++"), *options, *include, str(Path(__file__).parent / "fake_xrt.cpp"), *output]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return {"LD_LIBRARY_PATH": str(folder)}


def run(program: Path, environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, words)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


@pytest.fixture(scope="module")
def arguments(artifact: fc.Artifact, program: Path) -> list[object]:
    """Artifact and xclbin: any file will do for the stand-in."""
    return [program.parent / "artifact", "--xclbin", artifact.path / "drs" / "table.bin"]


def test_tokens_equal_those_of_the_session_here(
    artifact: fc.Artifact, program: Path, fake: dict[str, str], arguments: list[object]
) -> None:
    session = artifact.session("cpu")
    expected = session.generate(torch.tensor([[16], [3]]), 40)
    assert 0.0 < session.stats.replay_ratio < 1.0
    done = run(program, fake, *arguments, "--prompt", "16", "--prompt", "3", "--num-tokens", 40)
    assert done.returncode == 0, done.stderr
    assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected.tolist()
    assert done.stderr == f"replay ratio {session.stats.replay_ratio:.4f}\n"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no kernel", "error: the xclbin has no kernel fastcar_mlp\n  where: {xclbin}\n  mend:  link the kernels"),
        ("other design", "error: the xclbin is of another design: fastcar_mlp takes weights_0 "),
        ("other program", "error: the device holds the xclbin 00000000-0000-0000-0000-000000000002, not 0000"),
        ("no memory", "error: no memory for 4864 bytes: std::bad_alloc\n  where: fastcar_mlp, argument weights_0"),
        ("hang", "error: the kernel did not complete, XRT state 8\n  where: fastcar_drs\n  mend:  see `dmesg`"),
    ],
)
def test_faults_of_the_board_are_told(
    program: Path, fake: dict[str, str], arguments: list[object], fault: str, text: str
) -> None:
    done = run(program, fake | {"FAKE_XRT": fault}, *arguments, "--prompt", "1", "--num-tokens", 9)
    assert done.returncode == 2
    assert text.format(xclbin=arguments[-1]) in done.stderr
    assert done.stdout == ""


def test_missing_device_is_told(program: Path, fake: dict[str, str], arguments: list[object]) -> None:
    done = run(program, fake, *arguments, "--prompt", "1", "--device", 7)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: the device cannot be opened: No such device with index '7'\n  where: device 7"
    )
    assert "mend:  load the XRT driver" in done.stderr


def test_a_damaged_table_is_told(program: Path, fake: dict[str, str], arguments: list[object]) -> None:
    table = Path(str(arguments[0])) / "drs" / "table.bin"
    good = table.read_bytes()
    table.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        done = run(program, fake, *arguments, "--prompt", "1", "--num-tokens", 9)
    finally:
        table.write_bytes(good)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "the DRS controller stopped with status 5" in done.stderr


def test_the_real_library_tells_a_missing_xclbin(program: Path, arguments: list[object], tmp_path: Path) -> None:
    done = run(program, {}, arguments[0], "--xclbin", tmp_path / "nothing.xclbin", "--prompt", "1", "--num-tokens", 9)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the xclbin cannot be read: Failed to open file '{tmp_path}/nothing.xclbin'")
    assert "mend:  give the file that `make link` wrote" in done.stderr


def test_no_xclbin_is_told(program: Path, arguments: list[object]) -> None:
    done = run(program, {}, arguments[0], "--prompt", "1", "--num-tokens", 9)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no --xclbin is given\n  mend:  fastcar_board ARTIFACT --xclbin FILE")
