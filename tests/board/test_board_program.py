"""The XRT host program: built against the real libxrt-dev, run on a stand-in with the kernels in C simulation."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
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
from fastcar_compile.codegen.hls.control_table.table import TableStatus
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

    def decoded(
        self, prompts: Sequence[Sequence[int]], count: int, log: Path | None = None, seconds: int = 120
    ) -> tuple[list[list[int]], str]:
        """The tokens of a run that succeeds, row by row, and what it says."""
        rows = [word for prompt in prompts for word in ("--prompt", ",".join(map(str, prompt)))]
        done = self.run("--xclbin", self.xclbin, *rows, "--num-tokens", count, log=log, seconds=seconds)
        assert done.returncode == 0, done.stderr
        return [list(map(int, line.split())) for line in done.stdout.splitlines()], done.stderr

    def refused(self, *words: object, real: bool = False, fault: str = "") -> str:
        """What a run says that is refused and prints nothing else."""
        done = self.run(*words, real=real, fault=fault)
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

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
    done = native.build(copy, folder, "board")
    assert done.returncode == 0, done.stderr
    return Built(folder / "fastcar_board", copy, fake, artifact)


TOKENS = 40


def same_tokens(built: Built, prompts: Sequence[Sequence[int]] = ((16,), (3,)), log: Path | None = None) -> np.ndarray:
    """The decisions [forwards, L, B] of TOKENS tokens, which are those of a session here."""
    session = built.artifact.session("cpu", record=True)
    expected = session.generate(torch.tensor(prompts), TOKENS)
    assert len(set(expected.flatten().tolist())) > 4
    assert 0.0 < session.stats.replay_ratio < 1.0
    ratio = f"replay ratio {session.stats.replay_ratio:.4f}\n"
    assert built.decoded(prompts, TOKENS, log) == (expected.tolist(), ratio)
    return session.stats.decisions


def test_tokens_equal_those_of_the_session_here(built: Built) -> None:
    same_tokens(built)


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


@pytest.mark.thorough
def test_rows_that_the_host_has_replay_are_not_computed(
    foreign_artifact: fc.Artifact, native: Machine, fake_library: Fake, tmp_path: Path
) -> None:
    """A gate that the host decides: the kernel gets the mask of its rows, layer by layer."""
    built = build(foreign_artifact, native, fake_library, tmp_path)
    assert accelerator_of(foreign_artifact).design.axi_words > 1
    decisions = same_tokens(built, [[16], [3], [5], [11]], log := tmp_path / "log")
    registers = ~decisions @ (1 << np.arange(4))
    assert 15 in registers  # every row computes
    assert set(registers.reshape(-1).tolist()) - {0, 15}  # some do, others replay
    prompt, *steps = index_registers(log)
    assert prompt == 15  # a prompt of one token is a dense decode step
    assert steps == [register for register in registers.reshape(-1).tolist() if register]


@pytest.mark.thorough  # another artifact, stand-in and program each; tests/gates decides in the fabric by default
@pytest.mark.parametrize("name", ["engine_artifact", "half_artifact", "learned_artifact"])
def test_tokens_are_equal(
    name: str, request: pytest.FixtureRequest, native: Machine, fake_library: Fake, tmp_path: Path
) -> None:
    """With linears offloaded; and where the kernel decides, by what the C++ host gives it, a network too."""
    artifact = request.getfixturevalue(name)
    assert name == "engine_artifact" or accelerator_of(artifact).controller.gated_layers == (0,)
    same_tokens(build(artifact, native, fake_library, tmp_path))


def index_registers(log: Path) -> list[int]:
    """The active rows of the kernel's runs in a log of the stand-in."""
    runs = [dict(word.split("=") for word in line.split()[1:]) for line in log.read_text().splitlines()]
    return [int(values["active"]) for values in runs if int(values["op"]) == StepOp.RUN]


PROMPT = ("--prompt", "1", "--num-tokens", 9)
ON = ("--xclbin", "XCLBIN", *PROMPT)


@pytest.mark.parametrize(
    ("fault", "words", "text"),
    [
        ("no kernel", ON, "the xclbin has no kernel fastcar_step\n  where: XCLBIN\n  hint:  link the kernels"),
        ("other design", ON, "the xclbin is of another design: fastcar_step takes weights_0 "),
        ("other program", ON, "the device holds the xclbin [0-]+2, not [0-]+1"),
        ("no memory", ON, "no memory for BYTES bytes: std::bad_alloc\n  where: fastcar_step, argument w"),
        ("hang", ON, "the kernel did not complete, XRT state 8\n  where: fastcar_step\n  hint:  see `dmesg`"),
        ("", (*ON, "--device", 7), "the device cannot be opened: .*'7'\n  where: device 7\n  hint:  load the XRT "),
        ("real", PROMPT, "no --xclbin is given\n  hint:  fastcar_board ARTIFACT --xclbin FILE"),
        ("real", ("--xclbin", "/none", *PROMPT), "the xclbin cannot be read: .*'/none'(.*\n)*  hint:  .*`make link`"),
    ],
)
def test_faults_of_the_board_are_told(built: Built, fault: str, words: tuple[object, ...], text: str) -> None:
    """By the stand-in, or by the real library on a machine without a board."""
    given = [built.xclbin if word == "XCLBIN" else word for word in words]
    said = built.refused(*given, real=fault == "real", fault=fault)
    section = accelerator_of(built.artifact).kernels[0].arguments[0].bytes
    pattern = text.replace("XCLBIN", re.escape(str(built.xclbin))).replace("BYTES", str(section))
    assert re.search(f"^error: {pattern}", said, re.MULTILINE), said


@pytest.fixture(scope="module")
def probe(built: Built, native: Machine, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The bandwidth probe of the same artifact; it needs no TVM."""
    folder = tmp_path_factory.mktemp("probe")
    done = native.build(built.folder, folder, "probe", TVM="", FFI="")
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
    words = ("--xclbin", probe.xclbin, "--megabytes")
    for given, fault, text in (
        ((*words, 1), "flipped bit", "the port read other words than were written\n  where: weights_0\n"),
        ((*words, 1, "--meminfo", meminfo(2**22 - 1024)), "", "the buffers need 4.2 MB of contiguous memory"),
        ((*words, 0), "", "--megabytes is 1 to 256, --repeats at least 1\n  hint:  fastcar_probe --xclbin FILE"),
        (("--prompt", 1), "", "`--prompt` is not understood\n  hint:  fastcar_probe --xclbin FILE"),
    ):
        done = probe.run(*given, fault=fault, artifact=False)
        assert (done.returncode, done.stderr.startswith(f"error: {text}")) == (2, True), done.stderr


def test_too_little_contiguous_memory_is_told(built: Built, meminfo: Callable[[int], Path]) -> None:
    needed = buffer_bytes(accelerator_of(built.artifact))
    assert needed % 4096 == 0
    words = ("--xclbin", built.xclbin, "--prompt", "1", "--num-tokens", 9, "--meminfo")
    assert built.run(*words, meminfo(needed)).returncode == 0
    scarce = meminfo(needed - 1024)
    said = built.refused(*words, scarce)
    numbers = f"{needed / 1e6:.1f} MB of contiguous memory (CMA), of which {(needed - 1024) / 1e6:.1f} MB are free"
    assert f"error: the buffers need {numbers} and " in said
    assert f"\n  where: {scarce}\n  hint:  end other programs that use the board, or reserve more" in said
    said = built.refused(*words, "/nowhere/meminfo")
    assert "error: the memory of the board cannot be read\n  where: /nowhere/meminfo\n" in said


def test_a_damaged_table_is_told(built: Built) -> None:
    """By the hardware, where a manifest vouches for it."""
    good = (built.folder / "drs" / "table.bin").read_bytes()
    with built.replaced("drs/table.bin", good[:-1] + bytes([good[-1] ^ 1])):
        said = built.refused("--xclbin", built.xclbin, "--prompt", "1", "--num-tokens", 9)
    text = f"the kernel refuses the control table with status {TableStatus.BAD_CRC.name}\n  where: "
    assert f"error: {text}{built.folder}/drs/table.bin\n  hint:  copy the artifact again" in said
