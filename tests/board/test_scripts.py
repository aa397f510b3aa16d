"""The Tcl scripts of a project, in tclsh with stand-ins that know only what AMD documents."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hls.library import DESIGNS

from fastcar_compile.codegen.hls.interface import KernelInterface, KernelPort
from fastcar_compile.codegen.hls.project import emit_hls
from fastcar_compile.codegen.hls.render import vitis_files
from fastcar_compile.config.targets import Target, available_targets, load_target

TOOLS = Path(__file__).parent / "amd_tools.tcl"
STATIC = Path(__file__).parents[2] / "hls_templates" / "run_hls.tcl"
BUILT = [name for name in available_targets() if load_target(name).platform is not None]


def files_of(board: Target) -> dict[str, str]:
    """What is generated for a kernel with a weight port."""
    ports = (KernelPort("weights_0", "fastcar::word_t", "m_axi", "gmem_w0", 8),)
    clock = 300.0 if board.fabric is None else board.fabric.clock_mhz
    return vitis_files(board.part or "", clock, [KernelInterface("kernel", ports)], board=board)


@pytest.fixture
def tcl(require_tool: Callable[[str], str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a folder of its own; the environment says what the tools answer."""
    require_tool("tclsh")

    def run(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.tcl").write_text(text)
        answers = {"SCRIPT": "script.tcl", "VERSION": "2023.2", "BOARDS": "a:board:part0:1.0"} | environment
        return subprocess.run(
            ["tclsh", TOOLS], cwd=tmp_path, env=os.environ | answers, capture_output=True, text=True, check=False
        )

    return run


Tcl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("name", BUILT)
def test_a_platform_has_every_port_of_the_target_file(tcl: Tcl, name: str) -> None:
    board = load_target(name)
    (memory,), platform = board.memories, board.platform
    assert platform is not None
    assert board.fabric is not None
    done = tcl(files_of(board)["platform.tcl"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"create_project -force fastcar_{name} build/platform/vivado -part {board.part}" in lines
    assert f"get_board_parts -quiet -latest_file_version {platform.board}" in lines
    assert "set_property board_part a:board:part0:1.0 project:" in lines
    assert any("board_connections" in line for line in lines) == bool(platform.connections)
    clock = f"set_property CONFIG.CLKOUT1_REQUESTED_OUT_FREQ {board.fabric.clock_mhz:g} cell:clock"
    assert clock in lines
    assert memory.width_bits == 128  # of a port that v++ switches on, as PG201 has it
    (ports,) = (line for line in lines if "PFM.AXI_PORT" in line)
    for connection in memory.connections:
        assert f"S_AXI_{connection.tag}_FPD {{memport S_AXI_{connection.tag[:-1]} sptag {connection.tag}" in ports
    assert any("HIGH_ADDRESS" in line for line in lines) == (memory.capacity_bytes > 2**31)
    assert f"write_hw_platform -hw -force -file build/platform/fastcar_{name}.xsa" in lines


def test_a_platform_needs_the_board_and_a_version_that_writes_it(tcl: Tcl) -> None:
    text = files_of(load_target("zcu102"))["platform.tcl"]
    assert "Vivado has no board files of *:zcu102:*: install them" in tcl(text, BOARDS="").stderr
    assert "Vivado 2021.1.1 is too old: 2022.2 or newer" in tcl(text, VERSION="2021.1.1").stderr
    assert tcl(text, VERSION="2024.1").returncode == 0


@pytest.mark.parametrize("name", BUILT)
def test_the_platform_for_v(tcl: Tcl, name: str, tmp_path: Path) -> None:
    board = load_target(name)
    assert board.platform is not None
    boot, out = tmp_path / "linux", tmp_path / "out" / "platform"
    for folder in (boot, out):
        folder.mkdir(parents=True)
    for name_of_file in ("boot.scr", "system.dtb"):
        (boot / name_of_file).write_text(name_of_file)
    done = tcl(files_of(board)["xpfm.tcl"], BUILD="out", DTG_BRANCH="xlnx_rel_v2023.2", BOOT=str(boot))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"platform create -name fastcar_{name} -hw out/platform/fastcar_{name}.xsa -hw_emu ")
    if board.platform.loader == "xmutil":
        assert lines[1:3] == ["platform write", "platform generate"]
        assert [line.split()[0] for line in lines[3:]] == ["createdts"]
        return
    given = [f"-boot {boot}", "-bif linux.bif", "-image out/platform/image"]
    assert lines[1:] == [*(f"domain config {own}" for own in given), "platform write", "platform generate"]
    assert sorted(path.name for path in (out / "image").iterdir()) == ["boot.scr", "system.dtb"]
    listed = re.findall(r"<(.*?)>", files_of(board)["linux.bif"])
    assert listed == ["zynqmp_fsbl.elf", "pmufw.elf", "bitstream", "bl31.elf", "u-boot.elf"]


def test_the_engine_is_packaged_with_its_registers_and_ports(tcl: Tcl, tmp_path: Path) -> None:
    """From the sources of a project: every bus of its top has the clock, and every AXI port an address."""
    made = replace(DESIGNS["eight_ports_one_row"], engine="rtl")
    emit_hls(made, tmp_path)
    done = tcl((tmp_path / "package_engine.tcl").read_text())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    top = (tmp_path / "rtl" / "fastcar_engine.v").read_text()
    buses = re.findall(r"^    (?:in|out)put wire \[\d+:0\] (\w+)_(?:t|r)data,?$", top, re.MULTILINE)
    assert len(buses) == 3 + made.axi_weight_ports
    clocked = [f"ipx::associate_bus_interfaces -busif {bus} -clock ap_clk core:" for bus in buses]
    assert sorted(line for line in lines if "-busif" in line) == sorted(clocked)
    added = {line.split("/")[-1] for line in lines if line.startswith("add_files ")}
    assert {"fastcar_engine.v", "fastcar_product.sv", "fastcar_control.sv", "fastcar_rtl_config.svh"} <= added
    assert not {"DSP48E2.sv", "fastcar_decide.sv"} & added
    arguments = [
        *("set_property address_offset 0x{0:03x} register:weights_{1}", "set_property size 64 register:weights_{1}"),
        "set_property value m_axi_gmem_w{1} parameter:ASSOCIATED_BUSIF",
    ]
    wanted = [own.format(0x10 + 12 * p, p) for p in range(made.axi_weight_ports) for own in arguments]
    at = lines.index("set_property address_offset 0x010 register:weights_0")
    assert lines[at : at + len(wanted)] == wanted
    xo = "build/fastcar_engine/fastcar_engine.xo -kernel_name fastcar_engine -ip_directory build/fastcar_engine/ip"
    assert lines[-1] == f"package_xo -force -xo_path {xo} -ctrl_protocol ap_ctrl_hs"


def test_vitis_hls_takes_what_the_configuration_says(tcl: Tcl, tmp_path: Path) -> None:
    board = load_target("kv260")
    (tmp_path / "kernel_hls_config.cfg").write_text(files_of(board)["kernel_hls_config.cfg"])
    done = tcl(STATIC.read_text(), KERNEL="kernel", STEP="csynth")
    assert done.returncode == 0, done.stderr
    flags = f"-cflags {{-I{tmp_path} -std=c++14}}"
    assert done.stdout.splitlines() == [
        "open_project hls",
        "set_top kernel",
        f"add_files {tmp_path}/kernel.cpp {flags}",
        f"add_files -tb {tmp_path}/kernel_testbench.cpp {flags}",
        "open_solution -flow_target vitis solution",
        f"set_part {board.part}",
        "create_clock -period 300MHz",
        "set_clock_uncertainty 27%",
        "csynth_design",
        f"export_design -format xo -output {tmp_path}/build/kernel/kernel.xo",
    ]
    assert tcl(STATIC.read_text(), KERNEL="kernel", STEP="cosim").stdout.splitlines()[-1] == "cosim_design"
    assert "set STEP: KERNEL=" in tcl(STATIC.read_text(), KERNEL="kernel").stderr
    assert "STEP is csim, csynth or cosim, not all" in tcl(STATIC.read_text(), KERNEL="k", STEP="all").stderr
