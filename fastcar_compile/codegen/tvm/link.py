"""From a compiled module to a shared library, or to its object files.

LLVM ends the process where it cannot write an object. So it writes to memory, and from there the files are written
where a full disk is an error like any other.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tvm import relax

from fastcar_compile import processes
from fastcar_compile.errors import CompileError, InternalError

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
        _link(compiler, library, objects, Path(objects[0]).parent)

    _export(executable, path, link, scratch)


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


def _link(compiler: str, library: str, objects: Sequence[str], scratch: Path) -> None:
    command = [compiler, "-shared", "-fPIC", "-o", library, *objects]
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
            raise OSError(code, os.strerror(code), library)
    what = f"{compiler} could not link {Path(library).name} (exit code {done.returncode}):\n{text[:2000]}"
    raise CompileError(what, hint="see `fastcar doctor`")
