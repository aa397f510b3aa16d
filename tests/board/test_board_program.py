"""The XRT host program: built against the real libxrt-dev, run on a stand-in with the kernels in C simulation."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trust import damage
from trust.conftest import Keys

import fastcar_compile as fc
from board.conftest import Machine
from fastcar_compile.artifact.manifest import sealed
from fastcar_compile.codegen.hls.control_table.table import Status
from fastcar_compile.codegen.hls.step_program.program import StepOp
from fastcar_compile.runtime.backends.accelerator.step import accelerator_of
from fastcar_compile.runtime.backends.board import buffer_bytes

Fake = Callable[[fc.Artifact], Path]


@dataclass(frozen=True)
class Built:
    """fastcar_board for this machine, linked with the real libxrt_coreutil, and what it runs on.

    Args:
        folder: a copy of the artifact whose host program names this machine's library. fake: folder of the stand-in.
    """

    program: Path
    folder: Path
    fake: Path
    artifact: fc.Artifact

    def run(
        self,
        *words: object,
        real: bool = False,
        fault: str = "",
        log: Path | None = None,
        artifact: bool = True,
        seconds: int = 120,
    ) -> subprocess.CompletedProcess[str]:
        """The program on the copy, with the stand-in for XRT or the real one.

        Args:
            log: file that gets a line per run of a kernel. artifact: whether the program takes one.
            seconds: after which it failed.
        """
        environment = {} if real else {"LD_LIBRARY_PATH": str(self.fake), "FAKE_XRT": fault}
        environment |= {"FAKE_XRT_LOG": str(log)} if log else {}
        words = words if "--meminfo" in words else (*words, "--meminfo", "none")  # not this machine's
        command = [str(self.program), *([str(self.folder)] if artifact else []), *map(str, words)]
        environment = {**os.environ, **environment}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=seconds)

    @contextmanager
    def replaced(self, name: str, data: bytes) -> Iterator[None]:
        """Other bytes in a file of the copy, for which its manifest vouches."""
        file, manifest = self.folder / name, self.folder / "manifest.json"
        good, fields = file.read_bytes(), manifest.read_bytes()
        old, new = (hashlib.sha256(content).hexdigest().encode() for content in (good, data))
        assert len(data) == len(good)
        try:
            file.write_bytes(data)
            manifest.write_bytes(sealed(json.loads(fields.replace(old, new))))
            yield
        finally:
            file.write_bytes(good)
            manifest.write_bytes(fields)

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
    header.write_text(re.sub(r'"host/[^"]*/', f'"{folder_here}', header.read_text()))
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


COUNT = damage.Count(int(os.environ.get("FLIPS", "80")), int(os.environ.get("TRUNCATIONS", "20")))


def test_every_flip_of_every_file_is_refused_before_a_library_is_loaded(
    built: Built, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the manifest and all its files, also those that the program does not use, and of the signature."""
    signed = tmp_path / "signed"
    shutil.copytree(built.artifact.path, signed)
    digest = ("--digest", fc.sign(signed, keys.private).digest)
    (library,) = (p.relative_to(signed).as_posix() for p in signed.glob("host/x86_64-linux-gnu/*/decoder.so"))
    used = ("weights/model.safetensors", "weights/accelerator.safetensors", "drs/table.bin", library)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(built.fake))
    words = ("--xclbin", built.xclbin, "--prompt", "16", "--num-tokens", 2, "--meminfo", "none")
    attempts = damage.attempts_of(
        (built.program, signed, *words), {"digest": digest, "signature": ("--public-key", keys.public)}
    )
    assert [attempt() for attempt in attempts.values()] == [("", True), ("", True)]
    results = list(damage.outcomes(signed, attempts, COUNT, often=used))
    print(f"\n{damage.table(results)}")
    assert [result for result in results if result.loaded or not result.error] == []


def test_tokens_are_equal_with_linears_offloaded(
    engine_artifact: fc.Artifact, native: Machine, fake_library: Fake, tmp_path: Path
) -> None:
    assert_same_tokens(build(engine_artifact, native, fake_library, tmp_path))


def test_rows_that_the_host_has_replay_are_not_computed(
    foreign_artifact: fc.Artifact, native: Machine, fake_library: Fake, tmp_path: Path
) -> None:
    """A gate that the host decides: the kernel gets the mask of its rows, layer by layer."""
    built = build(foreign_artifact, native, fake_library, tmp_path)
    assert accelerator_of(foreign_artifact).design.axi_words > 1
    prompts, log = [[16], [3], [5], [11]], tmp_path / "log"
    session = foreign_artifact.session("cpu", record=True)
    expected = session.generate(torch.tensor(prompts), 40)
    words = [word for prompt in prompts for word in ("--prompt", prompt[0])]
    done = built.run("--xclbin", built.xclbin, *words, "--num-tokens", 40, log=log)
    assert done.returncode == 0, done.stderr
    assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected.tolist()
    registers = (~session.stats.decisions) @ (1 << np.arange(4))
    assert 15 in registers  # every row computes
    assert set(registers.reshape(-1).tolist()) - {0, 15}  # some do, others replay
    prompt, *steps = index_registers(log)
    assert prompt == 15  # a prompt of one token is a dense decode step
    assert steps == [register for register in registers.reshape(-1).tolist() if register]


@pytest.mark.parametrize("name", ["learned_artifact", pytest.param("bound_artifact", marks=pytest.mark.thorough)])
def test_the_fabric_decides(
    name: str, request: pytest.FixtureRequest, native: Machine, fake_library: Fake, tmp_path: Path
) -> None:
    """The C++ host gives the kernel what the gate reads, a network too, and follows it."""
    artifact = request.getfixturevalue(name)
    assert accelerator_of(artifact).controller.gated_layers == (0,)
    built = build(artifact, native, fake_library, tmp_path)
    session = artifact.session("cpu", record=True)
    expected = session.generate(torch.tensor([[16], [3]]), 40)
    assert 0 < session.stats.decisions.mean() < 1
    done = built.run("--xclbin", built.xclbin, "--prompt", 16, "--prompt", 3, "--num-tokens", 40)
    assert done.returncode == 0, done.stderr
    assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected.tolist()


def index_registers(log: Path) -> list[int]:
    """The active rows of the kernel's runs in a log of the stand-in."""
    runs = [dict(word.split("=") for word in line.split()[1:]) for line in log.read_text().splitlines()]
    return [int(values["active"]) for values in runs if int(values["op"]) == StepOp.RUN]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no kernel", "error: the xclbin has no kernel fastcar_step\n  where: {xclbin}\n  hint:  link the kernels"),
        ("other design", "error: the xclbin is of another design: fastcar_step takes weights_0 "),
        ("other program", "error: the device holds the xclbin 00000000-0000-0000-0000-000000000002, not 0000"),
        ("no memory", "error: no memory for {section} bytes: std::bad_alloc\n  where: fastcar_step, argument w"),
        ("hang", "error: the kernel did not complete, XRT state 8\n  where: fastcar_step\n  hint:  see `dmesg`"),
    ],
)
def test_faults_of_the_board_are_told(built: Built, fault: str, text: str) -> None:
    done = built.run("--xclbin", built.xclbin, "--prompt", "1", "--num-tokens", 9, fault=fault)
    assert done.returncode == 2
    accelerator = built.artifact.manifest.accelerator
    assert accelerator is not None
    section = accelerator.kernels[0].arguments[0].bytes
    assert text.format(xclbin=built.xclbin, section=section) in done.stderr
    assert done.stdout == ""


@pytest.fixture(scope="module")
def probe(built: Built, native: Machine, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The bandwidth probe of the same artifact; it needs no TVM."""
    folder = tmp_path_factory.mktemp("probe")
    done = native.build(built.folder, folder, "probe", CXXFLAGS="-O0", TVM="", FFI="")
    assert done.returncode == 0, done.stderr
    return replace(built, program=folder / "fastcar_probe")


def test_the_probe_reads_every_port_alone_and_all_together(probe: Built, tmp_path: Path) -> None:
    log, options = tmp_path / "log", ("--megabytes", 1, "--repeats", 2)
    done = probe.run("--xclbin", probe.xclbin, *options, log=log, artifact=False)
    assert done.returncode == 0, done.stderr
    names = ["empty call", "weights_0", "weights_1", "weights_2", "weights_3", "all 4"]
    lines = [line.split(": ") for line in done.stdout.splitlines()]
    assert [name for name, _ in lines] == names
    assert [text.split()[1] for _, text in lines] == ["us"] + 5 * ["GB/s"]
    assert all(float(text.split()[0]) > 0 for _, text in lines)
    runs = [dict(word.split("=") for word in line.split()[1:]) for line in log.read_text().splitlines()]
    words = str(2**20 // 16)
    expected = [("0", "0"), *((words, str(ports)) for ports in (1, 2, 4, 8, 15))]
    assert [(run["words"], run["ports"]) for run in runs] == [each for each in expected for _ in range(2)]


def test_the_probe_tells_what_is_wrong(probe: Built, meminfo: Callable[[int], Path]) -> None:
    words = ("--xclbin", probe.xclbin, "--megabytes", 1)
    done = probe.run(*words, fault="flipped bit", artifact=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: the port read other words than were written")
    assert "  where: weights_0\n" in done.stderr
    done = probe.run(*words, "--meminfo", meminfo(2**22 - 1024), artifact=False)
    assert done.returncode == 2
    assert "error: the buffers need 4.2 MB of contiguous memory (CMA), of which 4.2 MB are free" in done.stderr
    done = probe.run("--xclbin", probe.xclbin, "--megabytes", 0, artifact=False)
    assert "error: --megabytes is 1 to 256, --repeats at least 1\n  hint:  fastcar_probe --xclbin FILE" in done.stderr
    done = probe.run("--prompt", 1, artifact=False)
    assert "error: `--prompt` is not understood\n  hint:  fastcar_probe --xclbin FILE" in done.stderr


def test_too_little_contiguous_memory_is_told(built: Built, meminfo: Callable[[int], Path]) -> None:
    accelerator = built.artifact.manifest.accelerator
    assert accelerator is not None
    needed = buffer_bytes(accelerator)
    assert needed % 4096 == 0
    words = ("--xclbin", built.xclbin, "--prompt", "1", "--num-tokens", 9)
    assert built.run(*words, "--meminfo", meminfo(needed)).returncode == 0
    scarce = meminfo(needed - 1024)
    done = built.run(*words, "--meminfo", scarce)
    assert (done.returncode, done.stdout) == (2, "")
    numbers = f"{needed / 1e6:.1f} MB of contiguous memory (CMA), of which {(needed - 1024) / 1e6:.1f} MB are free"
    assert f"error: the buffers need {numbers} and " in done.stderr
    assert f"\n  where: {scarce}\n  hint:  end other programs that use the board, or reserve more" in done.stderr
    done = built.run(*words, "--meminfo", "/nowhere/meminfo")
    assert "error: the memory of the board cannot be read\n  where: /nowhere/meminfo\n" in done.stderr


def test_missing_device_is_told(built: Built) -> None:
    done = built.run("--xclbin", built.xclbin, "--prompt", "1", "--device", 7)
    assert done.returncode == 2
    assert "error: the device cannot be opened: No such device with index '7'\n  where: device 7\n" in done.stderr
    assert "hint:  load the XRT driver" in done.stderr


def test_a_damaged_table_is_told(built: Built) -> None:
    """By the hardware, where a manifest vouches for it."""
    good = (built.folder / "drs" / "table.bin").read_bytes()
    with built.replaced("drs/table.bin", good[:-1] + bytes([good[-1] ^ 1])):
        done = built.run("--xclbin", built.xclbin, "--prompt", "1", "--num-tokens", 9)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert f"the kernel refuses the control table with status {Status.BAD_CRC.name}" in done.stderr


def test_the_real_library_tells_a_missing_xclbin(built: Built, tmp_path: Path) -> None:
    done = built.run("--xclbin", tmp_path / "nothing.xclbin", "--prompt", "1", real=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: the xclbin cannot be read: Failed to open file '{tmp_path}/nothing.xclbin'")
    assert "hint:  give the file that `make link` wrote" in done.stderr


def test_no_xclbin_is_told(built: Built) -> None:
    done = built.run("--prompt", "1", real=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no --xclbin is given\n  hint:  fastcar_board ARTIFACT --xclbin FILE")
