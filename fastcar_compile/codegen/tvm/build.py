"""fx graphs -> virtual machine executable. Parameters and state are arguments, paired by name."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import tvm
from torch import fx
from tvm import relax

from fastcar_compile.artifact.sections import ProgramPart, ProgramsPart
from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.codegen.tvm.fusion import QUANTIZED_LINEARS
from fastcar_compile.codegen.tvm.importer import SegmentImporter
from fastcar_compile.codegen.tvm.isa import InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.pipeline import check_of, compile_module, import_graphs
from fastcar_compile.codegen.tvm.relax_api import parameters
from fastcar_compile.codegen.tvm.standalone import StandaloneSources, link_command, standalone_sources
from fastcar_compile.errors import CompileError, InternalError
from fastcar_compile.ir.provenance import where
from fastcar_compile.support import machine as processes

# From a compiled module to a shared library, or to its object files.
#
# LLVM ends the process where it cannot write an object. So it writes to memory, and from there the files are written
# where a full disk is an error like any other.


_OBJECTS = ("lib0.o", "devc.o")
"""What TVM calls them: the module's code, and what it imports, such as the virtual machine's instructions."""

_NO_ROOM = {"No space left on device": errno.ENOSPC, "Disk quota exceeded": errno.EDQUOT, "File too large": errno.EFBIG}


def link_library(executable: relax.VMExecutable, path: Path, compiler: str, scratch: Path | None = None) -> None:
    """Write the shared library of a module.

    Args:
        path: of the library. compiler: what links it. scratch: folder for files in between; None: the system's.

    Raises:
        CompileError: the compiler cannot link it. OSError: there is no room for it.
    """

    def link(library: str, objects: Sequence[str], **_options: object) -> None:
        for name in objects:
            _to_disk(Path(name))
        _link([compiler, "-shared", "-fPIC", "-o", library, *objects], Path(library), Path(objects[0]).parent)

    _export(executable, path, link, scratch)


def link_standalone(
    sources: StandaloneSources, isa: InstructionSet, path: Path, compiler: str, scratch: Path | None = None
) -> None:
    """Write the library of sources that need no runtime; see `link_library`."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="fastcar-") as folder, _in_memory(Path(folder)):
        kernels, code = Path(folder) / _OBJECTS[0], Path(folder) / "entries.c"
        sources.kernels.write_to_file(str(kernels), "o")
        _to_disk(kernels)
        code.write_text(sources.text)
        command = link_command(compiler, isa, sources.entries)
        _link([*command, "-o", str(path), str(code), str(kernels)], path, Path(folder))


def pack_objects(executable: relax.VMExecutable, path: Path, scratch: Path | None = None) -> None:
    """Write the objects of a module as a .tar, without the times and owners that TVM's own has."""

    def pack(archive: str, objects: Sequence[str], **_options: object) -> None:
        with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as stream:
            for name in sorted(objects):
                data = Path(name).read_bytes()
                # A new TarInfo has time 0 and no owner, so the same module gives the same bytes.
                member = tarfile.TarInfo(Path(name).name)
                member.size = len(data)
                stream.addfile(member, io.BytesIO(data))

    _export(executable, path, pack, scratch)


def _export(executable: relax.VMExecutable, path: Path, finish: Callable[..., None], scratch: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=scratch, prefix="fastcar-") as folder, _in_memory(Path(folder)):
        executable.export_library(str(path), fcompile=finish, workspace_dir=folder)


@contextmanager
def _in_memory(folder: Path) -> Generator[None]:
    """Have what is written under the names of TVM's objects written to memory."""
    with ExitStack() as stack:
        for name in _OBJECTS:
            descriptor = os.memfd_create(name)
            stack.callback(os.close, descriptor)
            # LLVM opens the object by its name, follows the link, and so writes to memory.
            (folder / name).symlink_to(f"/proc/self/fd/{descriptor}")
        yield


def _to_disk(path: Path) -> None:
    """Put a file in the place of the link to memory."""
    if not path.is_symlink():
        raise InternalError(f"TVM wrote an object {path.name}, which was not in memory")
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def _link(command: Sequence[str], library: Path, scratch: Path) -> None:
    compiler = command[0]
    try:
        done = processes.run(command, {"TMPDIR": str(scratch)})
    except OSError as error:
        what = f"{compiler} cannot be run: {error.strerror}"
        raise CompileError(what, hint="see `fastcar doctor`") from error
    if done.returncode == 0:
        return
    text = f"{done.stdout}{done.stderr}".strip()
    # A linker reports a full disk as text; callers expect an OSError.
    for message, code in _NO_ROOM.items():
        if message in text:
            raise OSError(code, os.strerror(code), str(library))
    what = f"{compiler} could not link {library.name} (exit code {done.returncode}):\n{text[:2000]}"
    raise CompileError(what, hint="see `fastcar doctor`")


@dataclass(frozen=True)
class LoweredModule:
    """Compiled graphs.

    Attributes:
        isa: instruction set that it is for.
        programs: name of a graph -> how to call it. A state result is the argument tensor, updated in place.
        ir_module: the Relax module before TVM's CPU pipeline, its kernels those of the first instruction set.
    """

    isa: InstructionSet
    programs: Mapping[str, ProgramPart]
    ir_module: tvm.IRModule

    @cached_property
    def executable(self) -> relax.VMExecutable:
        """The virtual machine's executable. Every graph is a function in it, and equal kernels are one."""
        return compile_module(self.ir_module, self.isa, [*self.programs])

    def part(self, library: str) -> ProgramsPart:
        """Return what the runtime needs to call the module, exported as `library`."""
        return ProgramsPart(library=library, **self.programs)

    def export(self, path: Path, compiler: str = "g++", scratch: Path | None = None) -> None:
        """Write the library, linked by `compiler`; see `link_library`."""
        if self.isa.hosted:
            link_library(self.executable, path, compiler, scratch)
        else:
            sources = standalone_sources(self.ir_module, self.isa, [*self.programs])
            link_standalone(sources, self.isa, path, compiler, scratch)

    def export_objects(self, path: Path, scratch: Path | None = None) -> None:
        """Write the object files that the shared library is linked from, as a .tar. Same module, same bytes."""
        pack_objects(self.executable, path, scratch)

    def retarget(self, isa: InstructionSet) -> LoweredModule:
        """Return the module compiled for another CPU, with the kernels for it."""
        return replace(self, isa=isa)


def lower(graphs: Mapping[str, HostGraph], isa: InstructionSet | None = None) -> LoweredModule:
    """Lower graphs to a CPU, as functions of one library.

    Args:
        graphs: by name, as the fields of ProgramsPart.
        isa: instruction set; default: the best one of this machine.

    Raises:
        CompileError: operators that TVM cannot import, all of them.
    """
    isa = isa or host_instruction_set()
    # Before anything is imported, so that one error names every operator that has no lowering.
    _check_operators([graph.module for graph in graphs.values()], isa)
    ir_module = import_graphs(graphs, isa)
    return LoweredModule(
        isa=isa,
        programs={name: _program(name, graph) for name, graph in graphs.items()} | _draw(graphs),
        ir_module=ir_module,
    )


def _program(name: str, graph: HostGraph) -> ProgramPart:
    return ProgramPart(
        function=name,
        check=check_of(name),
        inputs=tuple(str(n.target) for n in graph.module.graph.find_nodes(op="placeholder")),
        params=tuple(parameters(graph.segments)),
        outputs=tuple(graph.outputs),
    )


def _draw(graphs: Mapping[str, HostGraph]) -> dict[str, ProgramPart]:
    """Return the program that draws tokens of a decode step's logits."""
    names = ("logits", "numbers", "temperature", "knots")
    part = ProgramPart(function="draw", check=check_of("draw"), inputs=names, params=(), outputs=("tokens",))
    return {"draw": part} if "decode" in graphs else {}


def _check_operators(modules: Sequence[fx.GraphModule], isa: InstructionSet) -> None:
    """Raise CompileError with every operator that has no lowering, and where it comes from."""
    importer = SegmentImporter(relax.BlockBuilder(), isa)
    graphs = [m.graph for module in modules for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function"]
    # Quantised linears have no converter: the fusion `split_quantized_linears` replaces them before the import.
    unknown = [n for n in nodes if n.target not in QUANTIZED_LINEARS and not importer.knows(n.target)]
    CompileError.raise_all([CompileError(f"operator {n.target} has no TVM lowering", where=where(n)) for n in unknown])
