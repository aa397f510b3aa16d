"""Reports of Vitis HLS, Vivado and xclbinutil: each input is read as csynth.xml, as a .rpt and as an .xclbin.info."""

import json
from dataclasses import asdict

from board.test_hls_report import EXPECTED

from fastcar_compile.errors import InputError
from fastcar_compile.report.tool_reports import compared, read_reports
from fuzz.expect import accepted, folder

_NAMES = ("csynth.xml", "a.rpt", "a.xclbin.info")


def run(data: bytes) -> bool:
    """Read the bytes as all three, and compare what is found with a model."""
    return any([_read(name, data) for name in _NAMES])


def _read(name: str, data: bytes) -> bool:
    place = folder() / f"report-{name}"
    place.mkdir(exist_ok=True)
    (place / name).write_bytes(data)
    found = accepted(InputError, lambda: read_reports(place, EXPECTED.kernel))
    if found is not None:
        json.dumps([asdict(check) for check in compared(EXPECTED, found, 0.1)], allow_nan=False)
    return found is not None
