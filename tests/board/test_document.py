"""docs/tutorial/board.md names what the Makefiles, the programs and the Python backend take."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from fastcar_compile.runtime.backends.board.device import DEVICE, XCLBIN

DOCUMENT = (Path(__file__).parents[2] / "docs" / "tutorial" / "board.md").read_text()
TEMPLATES = files("hls_templates")
MAKEFILES = (TEMPLATES / "Makefile.j2").read_text() + (TEMPLATES / "host" / "Makefile.j2").read_text()
BLOCKS = "\n".join(re.findall(r"```\n(.*?)```", DOCUMENT, re.DOTALL))


def test_every_variable_is_one_that_is_read() -> None:
    named = set(re.findall(r"\b([A-Z][A-Z_]+)=", DOCUMENT)) - {XCLBIN, DEVICE}
    assert {"PLATFORM", "AP_TYPES", "TVM_LIB", "XRT_INCLUDE", "SD_DIR"} <= named
    assert [name for name in sorted(named) if f"$({name})" not in MAKEFILES] == []
    assert XCLBIN in DOCUMENT
    assert DEVICE in DOCUMENT


def test_every_target_of_make_exists() -> None:
    targets = {"csim", "csynth", "link", "package", "decode", "board"}
    assert targets == {t for t in targets if re.search(rf"make (-C \S+ )?([a-z]+ )*{t}\b", BLOCKS)}
    assert [t for t in sorted(targets) if not re.search(rf"^{t}:", MAKEFILES, re.MULTILINE)] == []


def test_every_option_is_one_of_the_programs() -> None:
    usage = (TEMPLATES / "host" / "fastcar_board.cpp").read_text()
    options = set(re.findall(r"fastcar_\w+ ARTIFACT (.*)", BLOCKS)[0].split()) | {"--device", "--xclbin"}
    assert [o for o in sorted(options) if o.startswith("--") and o not in usage] == []
