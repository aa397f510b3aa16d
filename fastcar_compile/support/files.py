"""Files that are replaced whole: a reader finds the old file or the new one, and a kill leaves nothing beside them."""

import errno
import itertools
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fastcar_compile.errors import os_errors

_HAS_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR)
"""What file systems, and old kernels, without unnamed files answer."""

_NUMBERS = itertools.count()
"""Of the files that this process replaces, in any thread."""


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading. Nothing is waited for.

    Raises:
        OSError: it cannot be opened, or is a pipe, a folder or a device.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return descriptor
        os.close(descriptor)
        kind = "pipe" if stat.S_ISFIFO(mode) else "folder" if stat.S_ISDIR(mode) else "device"
        raise OSError(errno.EINVAL, f"it is a {kind}, not a plain file")

    return open(path, "rb", opener=opener)


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Generator[BinaryIO]:
    """Yield a stream whose bytes replace the file when the block ends; where the block fails, the old file stays.

    Of a symbolic link the link stays, and the file that it names is replaced.

    Args:
        mode: of a file that can be made again: it is not written through to the disk. None: an old file keeps its mode
            and owner, and a new one gets what the umask allows.

    Raises:
        OSError: the file cannot be written, or it is not a plain file.
    """
    old = None
    with suppress(FileNotFoundError):
        old = path.stat()
    if old is not None and not stat.S_ISREG(old.st_mode):
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe, not a plain file")
    place = Path(os.path.realpath(path))
    part = place.with_name(f".fastcar-{os.getpid()}-{next(_NUMBERS)}")  # short, as the file's name may be the longest
    part.unlink(missing_ok=True)  # of a process that was killed
    try:
        with _opened(part) as stream:
            if mode is not None:
                os.fchmod(stream.fileno(), mode)
            elif old is not None:  # before anything is written, as nobody else may be allowed to read it
                with suppress(PermissionError):  # only root gives files to others
                    os.fchown(stream.fileno(), old.st_uid, old.st_gid)
                os.fchmod(stream.fileno(), stat.S_IMODE(old.st_mode))
            yield stream
            stream.flush()
            if mode is None:
                os.fsync(stream.fileno())
            if os.fstat(stream.fileno()).st_nlink == 0:
                # With `src_dir_fd` Python follows the link in /proc. The name stays for two system calls.
                os.link(f"/proc/self/fd/{stream.fileno()}", part, src_dir_fd=stream.fileno())
        os.replace(part, place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if mode is None:
        with suppress(OSError):  # the file is in its place; not every folder may be opened
            sync(place.parent)


def _opened(part: Path) -> BinaryIO:
    """Return a new file without a name, of which a kill leaves nothing; or at `part`, where all files have names."""
    try:
        return open(os.open(part.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    except OSError as error:
        if error.errno not in _HAS_NO_UNNAMED:
            raise
    return part.open("x+b")


def replace_file(path: Path, data: bytes) -> None:
    """Write the file whole or not at all, and the folders that lead to it.

    Raises:
        UserError: it cannot be written.
    """
    with os_errors("the file cannot be written", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as stream:
            stream.write(data)


def sync(path: Path) -> None:
    """Write a file or folder entry through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
