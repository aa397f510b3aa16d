"""docs/tutorial/board.md names what the Makefiles, the programs and the Python backend take."""

import re
from importlib.resources import files
from pathlib import Path

import fastcar_compile as fc
from fastcar_compile.cli.commands import COMMANDS
from fastcar_compile.codegen.hls.design.memory import bank_map
from fastcar_compile.config.targets import load_target
from fastcar_compile.runtime.backends.board import DEVICE, MEMINFO, XCLBIN

DOCUMENT = (Path(__file__).parents[2] / "docs" / "tutorial" / "board.md").read_text()
TEMPLATES = files("hls_templates")
MAKEFILES = (TEMPLATES / "Makefile.j2").read_text() + (TEMPLATES / "host" / "Makefile.j2").read_text()
BLOCKS = "\n".join(re.findall(r"```\w*\n(.*?)```", DOCUMENT, re.DOTALL))


def test_every_variable_is_one_that_is_read() -> None:
    named = set(re.findall(r"\b([A-Z][A-Z_]+)=", DOCUMENT)) - {XCLBIN, DEVICE, MEMINFO}
    assert {"PLATFORM", "AP_TYPES", "TVM_LIB", "XRT_INCLUDE", "SD_DIR"} <= named
    assert [name for name in sorted(named) if f"$({name})" not in MAKEFILES] == []
    assert XCLBIN in DOCUMENT
    assert DEVICE in DOCUMENT
    assert MEMINFO in DOCUMENT


def test_every_target_of_make_exists() -> None:
    targets = {"csim", "csynth", "cosim", "platform", "link", "probe", "package", "reports", "decode", "board"}
    assert targets == {t for t in targets if re.search(rf"make (-C \S+ )?([a-z]+ )*{t}\b", BLOCKS)}
    assert [t for t in sorted(targets) if not re.search(rf"^{t}:", MAKEFILES, re.MULTILINE)] == []


def test_every_option_is_one_of_the_programs() -> None:
    usage = "".join((TEMPLATES / "host" / f).read_text() for f in ("fastcar_board.cpp.j2", "fastcar_arguments.hpp"))
    options = set(re.findall(r"fastcar_\w+ ARTIFACT (.*)", BLOCKS)[0].split()) | {"--device", "--xclbin", "--meminfo"}
    assert [o for o in sorted(options) if o.startswith("--") and o not in usage] == []
    usage = (TEMPLATES / "host" / "fastcar_probe.cpp").read_text()
    (line,) = re.findall(r"fastcar_probe (--.*)", BLOCKS)
    assert [o for o in line.split() if o.startswith("--") and f"[{o}" not in usage and o != "--xclbin"] == []


def test_the_weight_ports_of_zynq_are_those_of_its_target() -> None:
    banks = bank_map(load_target("zcu102"), 4)
    assert banks is not None
    text = f"the weight ports take {', '.join(banks.weights[:3])} and {banks.weights[3]}"
    assert text in " ".join(DOCUMENT.split())
    assert "`zcu104-sodimm` is estimate only" in DOCUMENT


def test_the_readme_of_an_artifact_names_what_is_there(artifact: fc.Artifact) -> None:
    assert "README.md" in artifact.manifest.files
    text = (artifact.path / "README.md").read_text()
    rows = re.findall(r"^\| (`.+`) \|", text, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(.+?)`", row)]
    assert {"hls/", "drs/", "host/src/", "weights/", "manifest.json"} <= set(named)
    assert [name for name in named if not (artifact.path / name).exists()] == []
    assert set(re.findall(r"^fastcar ([\w-]+)", text, re.MULTILINE)) <= set(COMMANDS)
    for options, folder in (("", "hls"), (r"-C \S+ ", "host/src")):
        makefile = (artifact.path / folder / "Makefile").read_text()
        for words in re.findall(rf"^make {options}([a-z].*?) *(?:#.*)?$", text, re.MULTILINE):
            goals = [word for word in words.split() if "=" not in word]
            assert goals
            assert [g for g in goals if not re.search(rf"^{g}:", makefile, re.MULTILINE)] == []
            assert [v for v in re.findall(r"\b([A-Z_]+)=", words) if f"$({v})" not in makefile] == []
