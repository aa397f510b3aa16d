"""Instruction sets: the table, detection, and the kernels that follow from them."""

import dataclasses
import platform
import re
from pathlib import Path

import pytest
import tvm

from fastcar_compile.codegen.tvm import isa as table
from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, InstructionSet, cpu_flags, instruction_set, runnable
from fastcar_compile.codegen.tvm.target import board_instruction_set, host_target
from fastcar_compile.errors import CompileError, TargetError

X86 = [isa for isa in INSTRUCTION_SETS if isa.machine == "x86_64"]


@pytest.mark.parametrize("isa", INSTRUCTION_SETS, ids=lambda isa: isa.name)
def test_llvm_knows_every_row_and_its_features(isa: InstructionSet) -> None:
    assert isa.cpu in tvm.get_global_func("target.llvm_get_cpu_archlist")(host_target(isa))
    offers = tvm.get_global_func("target.target_has_feature")
    assert [f for f in isa.llvm if not offers(f, host_target(isa))] == []
    assert instruction_set(isa.name) is isa


def test_a_better_row_comes_first() -> None:
    """What runs on a CPU is sorted by the table, and every x86 row needs more than the one after the next."""
    names = [isa.name for isa in INSTRUCTION_SETS]
    everything = frozenset[str]().union(*(isa.flags for isa in X86))
    assert runnable(reversed(INSTRUCTION_SETS), "x86_64", everything) == X86
    assert [isa.name for isa in runnable(INSTRUCTION_SETS, "x86_64", instruction_set("avx2").flags)] == ["avx2", "sse4"]
    assert [isa.name for isa in runnable(INSTRUCTION_SETS, "aarch64", frozenset({"asimd", "crc32"}))] == ["neon"]
    assert runnable(INSTRUCTION_SETS, "riscv64", everything) == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2\nflags\t\t: x\n", {"fpu", "avx2"}),
        ("Features\t: fp asimd\n", {"fp", "asimd"}),
    ],
)
def test_flags_of_the_running_cpu(text: str, flags: set[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_flags(tmp_path / "cpuinfo") == flags
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_unknown_name() -> None:
    with pytest.raises(CompileError, match=r"unknown instruction set 'mmx'\n.*host_cpus\n.*avx512-vnni, .*, native"):
        instruction_set("mmx")


def test_a_cpu_below_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "cpu_flags", frozenset)
    with pytest.raises(CompileError, match="this CPU runs no instruction set"):
        table.host_instruction_set()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(CompileError, match="this CPU runs no instruction set for riscv64"):
        table.host_instruction_set()


@pytest.mark.parametrize(
    ("cpu", "triple", "name"),
    [
        ("cortex-a53", "aarch64-linux-gnu", "neon"),
        ("cortex-a76", "aarch64-linux-gnu", "neon-dotprod"),
        ("neoverse-v1", "aarch64-linux-gnu", "neon-i8mm"),
        ("x86-64-v3", "x86_64-linux-gnu", "avx2"),
        ("znver4", "x86_64-linux-gnu", "avx512-vnni"),
        ("alderlake", "x86_64-linux-gnu", "avx2-vnni"),
    ],
)
def test_instruction_set_of_a_board(cpu: str, triple: str, name: str) -> None:
    found = board_instruction_set(cpu, triple)
    assert dataclasses.replace(instruction_set(name), cpu=cpu, features=()) == found


@pytest.mark.parametrize(
    ("cpu", "triple", "text"),
    [
        ("core2", "x86_64-linux-gnu", "core2 runs none of the instruction sets avx512-vnni, avx2-vnni, avx2, sse4"),
        ("6502", "x86_64-linux-gnu", "LLVM knows no CPU '6502' for x86_64-linux-gnu"),
        ("rv64", "riscv64-linux-gnu", "there are no kernels for riscv64-linux-gnu"),
    ],
)
def test_a_board_without_kernels(cpu: str, triple: str, text: str) -> None:
    with pytest.raises(TargetError, match=re.escape(text)):
        board_instruction_set(cpu, triple)
