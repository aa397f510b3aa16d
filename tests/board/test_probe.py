"""The bandwidth probe among the HLS files: interface and link. test_board_program.py has its host program."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hls.library import DESIGNS

from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import kernel_interface, probe_interface
from fastcar_compile.codegen.hls.project import emit_hls, table_of_sizes
from fastcar_compile.codegen.hls.step_program.builder import short_program
from fastcar_compile.config.targets import load_target


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project of the example design on zcu102."""
    emit_hls(DESIGNS["example"], tmp_path, board=load_target("zcu102"))
    return tmp_path


def make(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *words], cwd=project, capture_output=True, text=True, check=False)


def test_its_weight_ports_are_those_of_the_kernel(project: Path) -> None:
    made, probe = DESIGNS["example"], probe_interface(DESIGNS["example"])
    table = table_of_sizes(made)
    kernel = kernel_interface(made, StepDesign.of(short_program(made, table)), table)
    weights = [port for port in kernel.ports if port.name.startswith("weights_")]
    own = [replace(port, depth=0, mapped=0) for port in probe.ports[: len(weights)]]
    assert own == [replace(port, depth=0, mapped=0) for port in weights]
    assert [port.name for port in probe.ports[len(weights) :]] == ["result", "words", "ports"]
    text = (project / "fastcar_probe.cpp").read_text()
    assert all(line in text for line in probe.pragmas())


def test_it_is_linked_alone_to_the_memory_of_the_kernel(project: Path) -> None:
    lines = (project / "probe_link.cfg").read_text().splitlines()
    assert lines[:3] == ["[connectivity]", "nk=fastcar_probe:1:fastcar_probe_1", "sp=fastcar_probe_1.weights_0:HP0"]
    engine = (project / "link.cfg").read_text().splitlines()
    connected = [line.replace("fastcar_probe", "fastcar_step") for line in lines if ".weights_" in line]
    assert [line for line in engine if ".weights_" in line] == connected
    assert not [line for line in engine if "probe" in line]
    config = (project / "fastcar_probe_hls_config.cfg").read_text()
    assert "syn.top=fastcar_probe\n" in config
    assert "tb." not in config  # fastcar_probe checks what the ports read
