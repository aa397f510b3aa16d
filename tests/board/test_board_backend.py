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
from fastcar_compile.codegen.hls.step_program.cache_layout import ACTIVE_BIT
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.accelerator.step import accelerator_of
from fastcar_compile.runtime.backends.board import MEMINFO, buffer_bytes, require_contiguous
from fastcar_compile.runtime.backends.cpu import programs_for
from fastcar_compile.support.machine import cpu_flags

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


@pytest.mark.parametrize(
    ("name", "linears"), [("artifact", 0), pytest.param("engine_artifact", 3, marks=pytest.mark.thorough)]
)  # q, k and v; o; the head
def test_logits_equal_those_of_the_cpu(name: str, linears: int, request: pytest.FixtureRequest, pyxrt: Faulty) -> None:
    offloaded = request.getfixturevalue(name)
    fake = pyxrt(offloaded)
    decisions = assert_same_logits(offloaded)
    assert len(accelerator_of(offloaded).linears) == linears
    launched = int((~decisions.all(2)).sum()) + linears * decisions.shape[0]
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


@pytest.mark.thorough
def test_rows_that_the_host_has_replay_are_not_computed(foreign_artifact: fc.Artifact, pyxrt: Faulty) -> None:
    fake = pyxrt(foreign_artifact)
    decisions = assert_same_logits(foreign_artifact)
    (compute,) = accelerator_of(foreign_artifact).kernels
    given = [call[2][compute.index("inputs")] for call in fake.calls if call[:2] == ("start", compute.name)]
    lists = [np.frombuffer(begin[:64], np.uint32).reshape(4, 4) for begin in given]
    _table, prompt, *runs = [int((words[:, 2] >> ACTIVE_BIT) @ (1 << np.arange(4))) for words in lists]
    assert prompt == 15  # a prompt of one token is a dense decode step
    registers = ((~decisions) @ (1 << np.arange(4))).reshape(-1).tolist()
    assert runs == [r for r in registers if r]


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
        ("no memory", r"no memory for \d+ bytes: std::bad_alloc\n  where: fastcar_step, argument weights_0\n  hint:"),
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


def test_a_region_holds_whole_buffers(
    artifact: fc.Artifact, pyxrt: Faulty, meminfo: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two regions hold two weight buffers each. A page less in both, and more in a third, ends before a load."""
    fake, section, page = pyxrt(artifact), accelerator_of(artifact), 4096
    (each,) = {-(-a.bytes // page) * page for a in section.kernels[0].arguments if a.name.startswith("weights_")}
    needed = buffer_bytes(section)
    monkeypatch.setenv(MEMINFO, str(meminfo(needed)))
    fake.regions = [2 * each, needed - 2 * each]
    artifact.session("board")
    assert fake.regions == [0, 0]
    fake.calls.clear()
    fake.regions = [2 * each - page, 2 * each - page, needed - 4 * each + 2 * page]
    text = r"no memory for \d+ bytes: .*\n  where: fastcar_step, argument weights_[23]\n  hint:  a region of contiguous"
    with pytest.raises(BackendError, match=text):
        artifact.session("board")
    assert not starts(fake)


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


def test_libraries_are_picked_by_machine(artifact: fc.Artifact) -> None:
    host = artifact.manifest.host
    variant, board = host.variants[0], host.board
    assert board is not None
    here, triple = cpu_flags(), variant.triple
    assert programs_for(host, triple, here) == variant.programs
    better = variant.model_copy(update={"flags": ("later",), "programs": board.programs})
    assert programs_for(host.model_copy(update={"variants": (better, variant)}), triple, here) == variant.programs
    arm = "aarch64-linux-gnu"
    assert programs_for(host, arm, frozenset()).library == "host/aarch64-linux-gnu/decoder.so"
    name = variant.instruction_set
    text = f"no library for this CPU ({triple}), only for {name} ({triple}), cortex-a53 ({arm})\n  hint:  compile it"
    with pytest.raises(BackendError, match=re.escape(text)):
        programs_for(host, triple, frozenset())
    unlinked = host.model_copy(update={"board": board.model_copy(update={"linked": False})})
    with pytest.raises(
        BackendError, match=r"the library for aarch64-linux-gnu is an archive of object files, not linked"
    ):
        programs_for(unlinked, arm, frozenset())
