"""The Vitis project: configurations, memory connections, the bandwidth probe and the exact commands of the Makefile."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hls.library import DESIGNS

from fastcar_compile.codegen.hls.design.memory import bank_map
from fastcar_compile.codegen.hls.design.step_usage import StepDesign
from fastcar_compile.codegen.hls.interface import KernelInterface, KernelPort, kernel_interface, probe_interface
from fastcar_compile.codegen.hls.project import emit_hls, table_of_sizes
from fastcar_compile.codegen.hls.render import connections, vitis_files
from fastcar_compile.codegen.hls.step_program.builder import short_program
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import CompileError

U280 = load_target("u280")

FAKE_VPP = """#!/bin/sh
case "$*" in --version) echo "****** v++ v${VERSION:-2023.2} (64-bit)"; exit ;; esac
echo "v++ $*" >> "$LOG"
case "$*" in
    *--work_dir*) for last; do :; done; mkdir -p "$last"; test -n "$EMPTY" || touch "$last/$(basename "$last").xo" ;;
    *fastcar.xclbin*) mkdir -p build; touch build/fastcar.xclbin ;;
esac
"""
"""Writes its command to $LOG and the file that Vitis would write; with $EMPTY no kernel."""


@pytest.fixture
def project(require_tool: Callable[[str], str], tmp_path: Path) -> Path:
    """The project of the example design on zcu102."""
    require_tool("make")
    emit_hls(DESIGNS["example"], tmp_path / "project", board=load_target("zcu102"))
    return tmp_path / "project"


@pytest.fixture
def vpp(tmp_path: Path) -> dict[str, str]:
    """Environment with the stand-in for v++."""
    tool = tmp_path / "bin" / "v++"
    tool.parent.mkdir()
    tool.write_text(FAKE_VPP)
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}


def make(project: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *words], cwd=project, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def commands(platform: str, rootfs: Path, image: Path, sd: str) -> list[str]:
    """What Vitis has to run for csynth, link and package of the example design."""
    objects, xclbin = "build/fastcar_step/fastcar_step.xo", "build/fastcar.xclbin"
    return [
        "v++ -c --mode hls --config fastcar_step_hls_config.cfg --work_dir build/fastcar_step",
        f"v++ -l -t hw --platform {platform} --config link.cfg --temp_dir build/_x -o {xclbin} {objects}",
        f"v++ -p -t hw --platform {platform} {xclbin} --package.out_dir build/package "
        f"--package.boot_mode sd --package.image_format ext4 --package.rootfs {rootfs} --package.kernel_image {image} "
        f"--package.sd_dir {sd} --package.sd_file {xclbin} -o build/packaged.xclbin",
    ]


def test_every_file_that_a_configuration_names_is_there(project: Path) -> None:
    for kernel in ("step", "probe"):
        top = f"fastcar_{kernel}"
        lines = (project / f"{top}_hls_config.cfg").read_text().splitlines()
        assert lines[:2] == ["part=xczu9eg-ffvb1156-2-e", ""]
        assert {"[hls]", "clock=250MHz", f"syn.top={top}", f"syn.file={top}.cpp"} <= {*lines}
        assert {"flow_target=vitis", "package.output.format=xo", "package.output.syn=true"} <= {*lines}
        bench = ["tb.file=step_testbench.cpp", "tb.cflags=-I. -std=c++14"]  # fastcar_probe checks what its kernel read
        assert [line for line in lines if line.startswith("tb.")] == (bench if kernel == "step" else [])
        assert "syn.cflags=-I. -std=c++14" in lines
        assert lines[lines.index("clock=250MHz") + 1] == "clock_uncertainty=27%"
        assert (project / f"{top}.cpp").is_file()
    assert (project / "step_testbench.cpp").is_file()


def test_link_configuration(project: Path) -> None:
    lines = (project / "link.cfg").read_text().splitlines()
    assert lines[:2] == ["[connectivity]", "nk=fastcar_step:1:fastcar_step_1"]
    weights = {"weights_0": "HP0", "weights_1": "HP1", "weights_2": "HP3", "weights_3": "HPC0"}
    others = {"step_program": "HP2", "inputs": "HP2", "outputs": "HPC1", "step_report": "HPC1"}
    assert lines[2:10] == [f"sp=fastcar_step_1.{name}:{port}" for name, port in (weights | others).items()]
    assert lines[10:] == ["", "[clock]", "freqHz=250000000:fastcar_step_1"]


def test_the_weight_ports_of_the_probe_are_those_of_the_kernel(project: Path) -> None:
    made, probe = DESIGNS["example"], probe_interface(DESIGNS["example"])
    table = table_of_sizes(made)
    kernel = kernel_interface(made, StepDesign.of(short_program(made, table)), table)
    weights = [port for port in kernel.ports if port.name.startswith("weights_")]
    own = [replace(port, depth=0, mapped=0) for port in probe.ports[: len(weights)]]
    assert own == [replace(port, depth=0, mapped=0) for port in weights]
    assert [port.name for port in probe.ports[len(weights) :]] == ["result", "words", "ports"]
    text = (project / "fastcar_probe.cpp").read_text()
    assert all(line in text for line in probe.pragmas())


def test_the_probe_is_linked_alone_to_the_memory_of_the_kernel(project: Path) -> None:
    lines = (project / "probe_link.cfg").read_text().splitlines()
    assert lines[:3] == ["[connectivity]", "nk=fastcar_probe:1:fastcar_probe_1", "sp=fastcar_probe_1.weights_0:HP0"]
    engine = (project / "link.cfg").read_text().splitlines()
    connected = [line.replace("fastcar_probe", "fastcar_step") for line in lines if ".weights_" in line]
    assert [line for line in engine if ".weights_" in line] == connected
    assert not [line for line in engine if "probe" in line]
    config = (project / "fastcar_probe_hls_config.cfg").read_text()
    assert "syn.top=fastcar_probe\n" in config
    assert "tb." not in config  # fastcar_probe checks what the ports read


def test_an_engine_of_its_own_is_linked(vpp: dict[str, str], tmp_path: Path) -> None:
    """Both kernels and their streams; weights come to the engine. Vitis cannot simulate one without the other."""
    made = replace(DESIGNS["example"], engine="rtl")
    emit_hls(made, tmp_path / "project", board=load_target("zcu102"))
    lines = (tmp_path / "project" / "link.cfg").read_text().splitlines()
    weights = {"weights_0": "HP0", "weights_1": "HP1", "weights_2": "HP3", "weights_3": "HPC0"}
    assert lines[1:3] == [f"nk={name}:1:{name}_1" for name in ("fastcar_step", "fastcar_engine")]
    assert [line for line in lines if "weights" in line] == [
        f"sp=fastcar_engine_1.{name}:{tag}" for name, tag in weights.items()
    ]
    assert [line for line in lines if line.startswith("stream_connect=")] == [
        "stream_connect=fastcar_step_1.calls:fastcar_engine_1.calls",
        "stream_connect=fastcar_engine_1.results:fastcar_step_1.results",
    ]
    assert lines[-2:] == [f"freqHz=250000000:{name}_1" for name in ("fastcar_step", "fastcar_engine")]
    done = make(tmp_path / "project", "-n", "link", "PLATFORM=p", **vpp)
    assert "BUILD=build vivado -mode batch -source package_engine.tcl" in done.stdout
    objects = [f"build/{name}/{name}.xo" for name in ("fastcar_step", "fastcar_engine")]
    assert f"-o build/fastcar.xclbin {' '.join(objects)}\n" in done.stdout, done.stderr
    assert_refused(make(tmp_path / "project", "cosim"), "co-simulation of Vitis has one kernel, and fastcar_step waits")


def kernel(name: str, weights: int, *others: str) -> KernelInterface:
    ports = [KernelPort(f"weights_{p}", "fastcar::word_t", "m_axi", f"gmem_w{p}", 8) for p in range(weights)]
    return KernelInterface(name, (*ports, *(KernelPort(o, "float", "m_axi", f"gmem_{o}", 8) for o in others)))


def test_no_other_port_shares_the_banks_of_a_weight_port() -> None:
    tags = {"weights_0": "0:9", "weights_1": "10:19", "weights_2": "20:29", "x": "30", "y": "31", "z": "30"}
    expected = [f"sp=b_1.{port}:HBM[{tag}]" for port, tag in tags.items()]
    assert connections(U280, [kernel("b", 3, "x", "y", "z")]) == expected
    assert [line[-4:] for line in connections(load_target("kv260"), [kernel("a", 6, "x")])][-2:] == ["HPC1", "HPC1"]


def test_a_board_without_connections_leaves_them_to_the_linker() -> None:
    own = U280.model_copy(update={"memories": (U280.memories[0].model_copy(update={"connections": ()}),)})
    assert connections(own, [kernel("a", 2, "x")]) == []
    assert connections(None, [kernel("a", 2, "x")]) == []


@pytest.mark.parametrize(
    ("ports", "weights", "others"),
    [
        (8, ("HBM[0:3]", "HBM[4:7]", "HBM[28:31]"), ("DDR[0]", "DDR[1]")),
        (16, ("HBM[0:1]", "HBM[2:3]", "HBM[30:31]"), ("DDR[0]", "DDR[1]")),
        (30, ("HBM[0]", "HBM[1]", "HBM[29]"), ("HBM[30]", "HBM[31]")),
    ],
)
def test_banks_of_the_u280(ports: int, weights: tuple[str, ...], others: tuple[str, ...]) -> None:
    banks = bank_map(U280, ports)
    assert banks is not None
    assert (banks.weights[0], banks.weights[1], banks.weights[-1], banks.others) == (*weights, others)
    assert banks.bank_bytes == 32 // ports * 256 * 2**20


def test_weight_ports_do_not_share_a_port_of_the_memory_controller() -> None:
    zcu102 = load_target("zcu102")
    controllers = {connection.tag: connection.controller for connection in zcu102.memories[0].connections}
    for ports in (1, 2, 3, 4):
        banks = bank_map(zcu102, ports)
        assert banks is not None
        assert len({controllers[tag] for tag in banks.weights}) == ports
        assert not set(banks.weights) & set(banks.others)


def test_more_weight_ports_than_the_board_has_are_refused() -> None:
    with pytest.raises(CompileError, match="7 weight ports are more than the 6 ports of ps_ddr4 on zcu102"):
        bank_map(load_target("zcu102"), 7)


def test_make_package_builds_all_of_it_in_order_and_once(project: Path, vpp: dict[str, str], tmp_path: Path) -> None:
    for name in ("rootfs.ext4", "Image"):
        (tmp_path / name).write_text("")
    options = (f"ROOTFS={tmp_path}/rootfs.ext4", f"KERNEL_IMAGE={tmp_path}/Image", "SD_DIR=../artifact", "PLATFORM=p")
    done = make(project, "package", *options, **vpp)
    assert done.returncode == 0, done.stderr
    wanted = commands("p", tmp_path / "rootfs.ext4", tmp_path / "Image", "../artifact")
    assert Path(vpp["LOG"]).read_text().splitlines() == wanted
    assert make(project, "link", "PLATFORM=p", **vpp).returncode == 0
    assert len(Path(vpp["LOG"]).read_text().splitlines()) == len(wanted)
    (project / "fastcar_config.hpp").touch()
    assert make(project, "csynth", **vpp).returncode == 0
    assert Path(vpp["LOG"]).read_text().splitlines()[len(wanted) :] == wanted[:1]


def assert_refused(done: subprocess.CompletedProcess[str], text: str) -> None:
    assert done.returncode == 2
    assert text in done.stderr


def test_missing_vitis_is_told(project: Path) -> None:
    for target in ("csynth", "link", "package"):
        done = make(project, target, "VPP=no-such-v++", "PLATFORM=p")
        assert_refused(done, "no-such-v++ is not on PATH: source settings64.sh of Vitis 2023.2 or newer")
    assert not (project / "build").exists()


@pytest.mark.parametrize(
    ("words", "empty", "text"),
    [
        (("link",), {}, "set PLATFORM to the name or the .xpfm file"),
        (
            ("package", "PLATFORM=p", "ROOTFS=/nowhere/rootfs.ext4"),
            {},
            "set BOOT to images/linux of a PetaLinux project",
        ),
        (("csynth",), {"EMPTY": "1"}, "v++ has not written build/fastcar_step/fastcar_step.xo: see its log below"),
    ],
)
def test_what_is_not_there_is_told(
    project: Path, vpp: dict[str, str], words: tuple[str, ...], empty: dict[str, str], text: str
) -> None:
    assert_refused(make(project, *words, **vpp, **empty), text)


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        (("csynth", "FLOW=tcl"), ["KERNEL=fastcar_step STEP=csynth BUILD=build vitis_hls -f run_hls.tcl"]),
        (
            ("cosim",),
            ["vitis-run --mode hls --cosim --config fastcar_step_hls_config.cfg --work_dir build/fastcar_step"],
        ),
        (
            ("probe", "PORT=HP2"),
            [
                "v++ -c --mode hls --config fastcar_probe_hls_config.cfg --work_dir build/fastcar_probe",
                "v++ -l -t hw --platform p --config probe_link_HP2.cfg --temp_dir build/_probe "
                "-o build/fastcar_probe_HP2.xclbin build/fastcar_probe/fastcar_probe.xo",
            ],
        ),
        (
            ("platform",),
            [
                "BUILD=build vivado -mode batch -source platform.tcl -nojournal -log build/platform/vivado.log",
                "BUILD=build BOOT=linux xsct xpfm.tcl",
            ],
        ),
        (("reports",), ["xclbinutil --force --input build/fastcar.xclbin --info build/fastcar.xclbin.info"]),
    ],
)
def test_what_make_would_run(project: Path, words: tuple[str, ...], commands: list[str]) -> None:
    tools = ("KERNEL=", "BUILD=", "v++ -", "vitis-run", "vivado", "xclbinutil")
    (project / "build").mkdir()
    (project / "build" / "fastcar.xclbin").touch()
    done = make(project, "-n", "-o", "build/fastcar.xclbin", *words, "PLATFORM=p", "BOOT=linux")
    assert [line for line in done.stdout.splitlines() if line.startswith(tools)] == commands, done.stderr


def test_a_kria_loads_what_make_writes(tmp_path: Path, require_tool: Callable[[str], str]) -> None:
    require_tool("make")
    files = vitis_files("part", 300.0, [kernel("a", 1)], board=load_target("kv260"))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tools, found = tmp_path / "bin", tmp_path / "build" / "platform" / "dt" / "pl.dtsi"
    tools.mkdir()
    found.parent.mkdir(parents=True)
    found.write_text('    firmware-name = "system.bit.bin";\n')
    (tmp_path / "build" / "fastcar.xclbin").touch()
    written = {"xclbinutil": "fastcar.bit", "bootgen": "fastcar.bit.bin", "dtc": "fastcar.dtbo"}
    for name, file in written.items():
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> log\ntouch build/kria/{file}\n')
        (tools / name).chmod(0o755)
    done = make(tmp_path, "kria", "-o", "build/fastcar.xclbin", PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    kria = tmp_path / "build" / "kria"
    wanted = ["fastcar.bit.bin", "fastcar.dtbo", "fastcar.xclbin", "shell.json"]
    assert sorted(path.name for path in kria.iterdir()) == wanted
    assert json.loads((kria / "shell.json").read_text()) == {"shell_type": "XRT_FLAT", "num_slots": "1"}
    assert (tmp_path / "build" / "fastcar.dtsi").read_text() == '    firmware-name = "fastcar.bit.bin";\n'
    assert (tmp_path / "build" / "kria.bif").read_text() == "all:{build/kria/fastcar.bit}\n"
    assert "bootgen -w -arch zynqmp -process_bitstream bin -image build/kria.bif" in (tmp_path / "log").read_text()


def test_a_version_without_the_flow_is_told(project: Path, vpp: dict[str, str]) -> None:
    done = make(project, "csynth", VERSION="2023.1", **vpp)
    assert_refused(done, "v++ is of 2023.1, which reads no HLS configuration: give FLOW=tcl, or source Vitis 2023.2")
    assert not Path(vpp["LOG"]).exists()


def test_an_artifact_is_not_built_in(project: Path) -> None:
    (project.parent / "manifest.json").write_text("{}")
    assert_refused(make(project, "csim"), "this folder is part of an artifact, whose files are checked")


def test_a_pcie_card_has_nothing_to_package(tmp_path: Path, require_tool: Callable[[str], str]) -> None:
    require_tool("make")
    assert U280.fabric is not None
    board = U280.model_copy(update={"fabric": U280.fabric.model_copy(update={"clock_uncertainty": 0.125})})
    files = vitis_files("xcu280-fsvh2892-2L-e", 276.0, [kernel("a", 1)], board=board)
    assert "\nclock_uncertainty=12.5%\n" in files["a_hls_config.cfg"]
    assert "freqHz=276000000:a_1" in files["link.cfg"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert_refused(make(tmp_path, "package"), "a PCIe card boots nothing: load build/fastcar.xclbin")
