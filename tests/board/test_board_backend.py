"""session(backend="board") on a stand-in for pyxrt, and what it says where there is no board."""

import ctypes
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcar_compile as fc
from board.fake_pyxrt import FakeXrt
from fastcar_compile.artifact.accelerator_section import KernelPart
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.accelerator.step import accelerator_of
from fastcar_compile.runtime.backends.board import MEMINFO, buffer_bytes, require_contiguous
from fastcar_compile.runtime.backends.cpu import programs_for

Faulty = Callable[..., FakeXrt]


@pytest.fixture
def pyxrt(fake_library: Callable[[fc.Artifact], Path], monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """`pyxrt(artifact, fault="")` puts a stand-in with the artifact's kernels in place of pyxrt."""

    def install(artifact: fc.Artifact, fault: str = "") -> FakeXrt:
        library = ctypes.CDLL(str(fake_library(artifact)))
        kernels = {}
        for kernel in accelerator_of(artifact).kernels:
            kinds = ["scalar" if a.kind == "scalar" else "memory" for a in kernel.arguments]
            kernels[kernel.name] = (kinds + ["stream"] * len(kernel.streams), getattr(library, kernel.name))
        fake = FakeXrt(kernels, fault)
        monkeypatch.setitem(sys.modules, "pyxrt", fake.module)
        monkeypatch.setenv("FASTCAR_XCLBIN", str(artifact.path / "drs" / "table.bin"))  # any file
        monkeypatch.delenv("FASTCAR_DEVICE", raising=False)
        monkeypatch.setenv(MEMINFO, "none")  # not this machine's
        return fake

    return install


def assert_same_logits(artifact: fc.Artifact) -> np.ndarray:
    """The decisions bool [forwards, L, B] of 19 steps, in three frames, that `board` and `cpu` take alike."""
    batch = artifact.manifest.decoder.config.batch_size
    tokens = torch.randint(0, 17, (batch, 20), generator=torch.Generator().manual_seed(1))
    board, cpu = (artifact.session(b, record=True) for b in ("board", "cpu"))
    for session in (board, cpu):
        session.prefill(tokens[:, :1])
    for i in range(1, 20):
        assert torch.equal(board.step(tokens[:, i]), cpu.step(tokens[:, i]))
    assert (board.stats.decisions == cpu.stats.decisions).all()
    assert 0.0 < board.stats.replay_ratio < 1.0
    return cpu.stats.decisions


def starts(fake: FakeXrt) -> Counter[str]:
    """How often each kernel was started."""
    return Counter(call[1] for call in fake.calls if call[0] == "start")


def test_logits_equal_those_of_the_cpu(artifact: fc.Artifact, pyxrt: Faulty) -> None:
    fake = pyxrt(artifact)
    decisions = assert_same_logits(artifact)
    launched = int((~decisions.all(2)).sum())
    assert starts(fake) == {"fastcar_step": 1 + decisions.shape[0] + launched}


@pytest.mark.thorough
def test_an_engine_of_its_own_runs_with_every_launch(rtl_artifact: fc.Artifact, pyxrt: Faulty) -> None:
    fake = pyxrt(rtl_artifact)
    decisions = assert_same_logits(rtl_artifact)
    launches = 1 + 1 + decisions.shape[0]  # the table, the prompt's token, the decode steps
    assert starts(fake) == {"fastcar_engine": launches, "fastcar_step": launches}


def test_the_notebook_of_an_artifact_runs(
    artifact: fc.Artifact, pyxrt: Faulty, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pyxrt(artifact)
    monkeypatch.setenv("ARTIFACT", str(artifact.path))
    notebook = json.loads((artifact.path / "host" / "src" / "fastcar_board.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [([], None)] * 4
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    assert names["board"].position == 2
    assert capsys.readouterr().out.startswith(f"({len(names['second'])}, ")


def test_buffers_are_those_of_the_interfaces(artifact: fc.Artifact, pyxrt: Faulty) -> None:
    fake = pyxrt(artifact)
    session = artifact.session("board")
    accelerator = accelerator_of(artifact)
    (compute,) = accelerator.kernels
    assert fake.calls[0] == ("xclbin", str(artifact.path / "drs" / "table.bin"))
    assert fake.calls[1:3] == [("device", 0), ("kernel", compute.name)]
    assert {c[1:] for c in fake.calls if c[0] == "bo"} == buffers_of(compute), "buffers are made once"
    fake.calls.clear()
    session.prefill(torch.tensor([[1], [2]]))
    session.step(torch.tensor([3, 4]))
    assert not [c for c in fake.calls if c[0] == "bo"]


def buffers_of(kernel: KernelPart) -> set[tuple[int, int]]:
    """Size and memory group of what a kernel reads and writes."""
    memory = [a for a in kernel.arguments if a.kind != "scalar"]
    return {(a.bytes, 100 * len(kernel.name) + kernel.index(a.name)) for a in memory}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no kernel", r"the xclbin has no kernel fastcar_step\n  where: .*table.bin\n  hint:  link the kernels"),
        ("other design", r"of another design: fastcar_step has 10 arguments, expected are 11\n  where: .*table.bin"),
        ("other program", r"the device holds the xclbin 2, not 1\n  where: device 0\n  hint:  another program"),
        (
            "no memory",
            r"no memory for \d+ bytes: std::bad_alloc\n  where: .* weights_0\n  hint:  a region of contiguous",
        ),
        ("hang", r"the kernel did not complete: timeout\n  where: fastcar_step\n  hint:  see `dmesg`"),
    ],
)
def test_faults_are_told_when_the_session_opens(artifact: fc.Artifact, pyxrt: Faulty, fault: str, text: str) -> None:
    pyxrt(artifact, fault)
    with pytest.raises(BackendError, match=text):
        artifact.session("board")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("DEVICE", "first", r"'first' is not a device index\n  where: \$FASTCAR_DEVICE\n  hint:  give 0, 1"),
        ("DEVICE", "3", r"cannot be opened: No such device with index '3'\n  where: device 3\n  hint"),
        ("XCLBIN", "/nowhere/x", r"the xclbin does not exist\n  where: /nowhere/x\n  hint:  corr"),
        ("XCLBIN", "", r"does not know its xclbin\n  where: \$FASTCAR_XCLBIN is not set\n  hint:  set"),
    ],
)
def test_environment_is_checked(
    artifact: fc.Artifact, pyxrt: Faulty, monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    pyxrt(artifact)
    monkeypatch.delenv(f"FASTCAR_{name}", raising=False)
    if value:
        monkeypatch.setenv(f"FASTCAR_{name}", value)
    with pytest.raises(BackendError, match=text):
        artifact.session("board")


def test_too_little_contiguous_memory_is_told(
    artifact: fc.Artifact, pyxrt: Faulty, meminfo: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = pyxrt(artifact)
    needed = buffer_bytes(accelerator_of(artifact))
    monkeypatch.setenv(MEMINFO, str(meminfo(needed)))
    session = artifact.session("board")
    session.prefill(torch.tensor([[1], [2]]))
    session.step(torch.tensor([3, 4]))
    made = sum(-(-call[1] // 4096) * 4096 for call in fake.calls if call[0] == "bo")
    assert made == needed  # every buffer was counted
    monkeypatch.setenv(MEMINFO, str(meminfo(needed - 1024)))
    text = rf"the buffers need {needed / 1e6:.1f} MB of contiguous memory \(CMA\), of which .* MB are free and"
    with pytest.raises(BackendError, match=text):
        artifact.session("board")
    monkeypatch.setenv(MEMINFO, "/nowhere/meminfo")
    with pytest.raises(BackendError, match="the memory of the board cannot be read: No such file"):
        artifact.session("board")


def test_a_card_has_memory_of_its_own(artifact: fc.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMINFO, "/nowhere/meminfo")
    card = artifact.manifest.model_copy(update={"target": fc.load_target("u280")})
    require_contiguous(card, accelerator_of(artifact))


def test_without_pyxrt_it_is_told(artifact: fc.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real absence: nothing stands in for pyxrt."""
    monkeypatch.delitem(sys.modules, "pyxrt", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "xilinx" not in p])
    text = "the board backend needs pyxrt: No module named 'pyxrt'\n  where: import pyxrt\n  hint:  run on the board"
    with pytest.raises(BackendError, match=re.escape(text)):
        artifact.session("board")


def test_the_board_has_its_library(artifact: fc.Artifact) -> None:
    """test_host_variants.py has those of this machine."""
    host, arm = artifact.manifest.host, "aarch64-linux-gnu"
    assert host.board is not None
    assert programs_for(host, arm, frozenset()).library == f"host/{arm}/decoder.so"
    unlinked = host.model_copy(update={"board": host.board.model_copy(update={"linked": False})})
    with pytest.raises(BackendError, match=f"the library for {arm} is an archive of object files, not linked"):
        programs_for(unlinked, arm, frozenset())
