"""The linears, 16-bit and int8 caches and the gate `learned` for AArch64 under qemu-user, bit for bit."""

import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from gates.cases import CASES as GATE_CASES
from lowering.integer_cases import CASES as INTEGER_CASES
from lowering.integer_cases import ROUNDED, TOGETHER
from lowering.test_cached import CASES as CACHED_CASES
from tvm.support import cc

from board.conftest import FOLDERS, Machine
from fastcar_compile.codegen.tvm.isa import instruction_set
from fastcar_compile.codegen.tvm.target import host_target

INTEGERS = (*INTEGER_CASES, *TOGETHER)
CASES = (*INTEGERS, *CACHED_CASES, *GATE_CASES)
TYPE_CODES = {"i": 0, "u": 1, "f": 2, "V": 4}
"""Of DLPack, by numpy's kind; bfloat16 is the one of kind V."""


@pytest.fixture(scope="module")
def runner(aarch64: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """run_kernels.cpp for aarch64."""
    program = tmp_path_factory.mktemp("kernels") / "run_kernels"
    libraries = aarch64.libraries
    link = [f"-L{libraries['TVM_LIB']}", "-Wl,--no-as-needed", "-ltvm_runtime", "-ltvm_ffi"]
    command = [aarch64.compiler, "-std=c++17", "-O1", "-isystem", str(FOLDERS["FFI"] / "include")]
    command += [str(Path(__file__).parent / "run_kernels.cpp"), "-o", str(program), *link]
    command += [f"-Wl,-rpath,{libraries['TVM_LIB']}"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return program


def write(cases: Sequence[Any], path: Path) -> None:
    """The file that run_kernels.cpp reads."""
    data = bytearray(struct.pack("<i", len(cases)))
    for case in cases:
        arguments = case.arguments()
        counts = len(arguments), getattr(case, "results", 1)
        data += struct.pack(f"<i{len(case.name)}sii", len(case.name), case.name.encode(), *counts)
        for array in arguments:
            code, bits = TYPE_CODES[array.dtype.kind], array.dtype.itemsize * 8
            data += struct.pack(f"<iii{array.ndim}q", code, bits, array.ndim, *array.shape)
            data += np.ascontiguousarray(array).tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "cpu", "cases"),
    [
        # test_host_program.py decodes on an emulated CPU of this set by default.
        pytest.param("neon", "cortex-a53", CASES, marks=pytest.mark.thorough),
        ("neon-i8mm", "max", (*INTEGERS[::8], *ROUNDED)),
        pytest.param("neon-i8mm", "max", INTEGERS, marks=pytest.mark.thorough),
        pytest.param("neon-dotprod", "max", INTEGERS, marks=pytest.mark.thorough),
    ],
)
def test_kernels_are_exact(
    name: str,
    cpu: str,
    cases: Sequence[Any],
    runner: Path,
    aarch64: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The emulated CPU has what the instruction set says. Only the integer linears depend on the set."""
    isa = instruction_set(name)
    library = tmp_path / "kernels.so"
    kernels = tvm.IRModule({case.name: case.kernel(isa) for case in cases})
    executable = tvm.compile(kernels, target=host_target(isa))
    executable.export_library(str(library), fcompile=cc.cross_compiler(aarch64.compiler))
    write(cases, tmp_path / "cases.bin")
    monkeypatch.setenv("QEMU_CPU", cpu)
    done = aarch64.run(runner, library, tmp_path / "cases.bin")
    assert done.stdout.splitlines() == [f"{case.name} equal" for case in cases], done.stderr
    assert done.returncode == 0
