"""Libraries for the board's CPU where the cross compiler is there, and where it is not."""

import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tvm
from conftest import check_tool
from manifests import sections
from tvm import relax

from fastcar_compile.artifact.sections import BoardPart, HostSection, ProgramPart
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.codegen.tvm.build import LoweredModule
from fastcar_compile.codegen.tvm.emit import HostLibraries, cross_compiler, emit_board
from fastcar_compile.codegen.tvm.isa import host_instruction_set
from fastcar_compile.codegen.tvm.pipeline import check_of
from fastcar_compile.config.targets import load_target


@pytest.fixture(scope="module")
def lowered() -> LoweredModule:
    """x + x as a program."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([tvm.tirx.IntImm("int64", 4)], "float32"))
    with builder.function("decode", [x]):
        builder.emit_func_output(relax.Tuple([builder.emit(relax.op.add(x, x))]))
    module = builder.finalize()
    program = ProgramPart(function="decode", check=check_of("decode"), inputs=("x",), params=(), outputs=("y",))
    return LoweredModule(cast("Any", None), {"decode": program}, module).retarget(host_instruction_set())


def emit(lowered: LoweredModule, folder: Path, target: str, machine: str = "x86_64-linux-gnu") -> BoardPart:
    with ArtifactWriter(folder) as writer:
        host = HostLibraries(writer, {}, host_instruction_set(), machine)
        vars(host)["lowered"] = lowered
        board = emit_board(host, load_target(target))
        writer.finish(sections(host=HostSection(variants=(), board=board)))
        return board


def test_names_of_compilers() -> None:
    assert cross_compiler("aarch64-linux-gnu", "x86_64-linux-gnu") == "aarch64-linux-gnu-g++"
    assert cross_compiler("aarch64-linux-gnu", "aarch64-linux-gnu") == "g++"


def test_without_the_cross_compiler_object_files_are_written(
    lowered: LoweredModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "aarch64-linux-gnu-g++" else which(tool))
    text = r"aarch64-linux-gnu-g\+\+ is not on PATH: .* are written as object files \(.tar\).* Install it \(Debian: "
    section = emit(lowered, tmp_path / "a", "zcu102")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("fastcar_compile", "WARNING")
    assert re.match(text, record.getMessage())
    assert (section.linked, section.compiler) == (False, "aarch64-linux-gnu-g++")
    name = section.programs.library
    assert name == "host/aarch64-linux-gnu/decoder.tar"
    emit(lowered, tmp_path / "b", "zcu102")
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    monkeypatch.undo()
    compiler = check_tool("aarch64-linux-gnu-g++")
    with tarfile.open(tmp_path / "a" / name) as archive:
        assert [m.mtime for m in archive] == [0] * len(archive.getmembers())
        archive.extractall(tmp_path / "objects", filter="data")
    objects = sorted((tmp_path / "objects").glob("*.o"))
    subprocess.run([compiler, "-shared", "-o", tmp_path / "decoder.so", *objects], check=True)


def test_a_card_in_a_server_of_this_kind_has_a_folder_of_its_own(lowered: LoweredModule, tmp_path: Path) -> None:
    section = emit(lowered, tmp_path / "a", "u280")
    assert (section.compiler, section.linked) == ("g++", True)
    library = section.programs.library
    assert library == "host/x86_64-linux-gnu-x86-64-v3/decoder.so"
    module: Any = tvm.runtime.load_module(str(tmp_path / "a" / library))
    machine = relax.VirtualMachine(module, cast("Any", tvm.cpu()))
    (doubled,) = machine["decode"](tvm.runtime.tensor(np.array([1, 2, 3, 4], np.float32)))
    assert doubled.numpy().tolist() == [2, 4, 6, 8]
