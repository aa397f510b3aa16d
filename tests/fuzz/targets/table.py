"""A DRS table: as it is, and with the length and the CRC-32 that belong to its content."""

import struct
import zlib

from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.control_table.table import HEADER_WORDS
from fastcar_compile.errors import UserError
from fuzz.expect import accepted, same

_CRC, _WORDS = 2, 3


def run(data: bytes) -> bool:
    """Read the bytes as they are, and repaired."""
    found = _read(data)
    if len(data) >= 4 * HEADER_WORDS:
        found |= _read(repaired(data))
    return found


def repaired(data: bytes) -> bytes:
    """The whole words of the data, with the length and the CRC-32 that fit."""
    words = list(struct.unpack_from(f"<{len(data) // 4}I", data))
    words[_WORDS] = len(words)
    packed = struct.pack(f"<{len(words)}I", *words)
    crc = zlib.crc32(packed[4 * _CRC + 4 :])
    return packed[: 4 * _CRC] + struct.pack("<I", crc) + packed[4 * _CRC + 4 :]


def _read(data: bytes) -> bool:
    table = accepted(UserError, lambda: read_table(data))
    if table is not None:
        written = table.to_bytes()
        same(read_table(written).to_bytes(), written, "the table that is written again")
    return table is not None
