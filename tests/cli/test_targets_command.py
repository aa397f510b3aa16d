"""`fastcar targets`."""

import json
import re
from pathlib import Path

from .conftest import Fastcar


def test_table(fastcar: Fastcar) -> None:
    result = fastcar("targets")
    assert result.exit_code == 0
    assert re.search(r"zcu104-sodimm +estimate only ", result.stdout)
    for word in ("zcu102", "xczu9eg-ffvb1156-2-e", "274080", "cortex-a53", "cpu", "u280"):
        assert word in result.stdout


def test_one_with_its_sources(fastcar: Fastcar) -> None:
    text = " ".join(fastcar("targets", "zcu102").stdout.split())
    assert "DS891" in text
    assert "12.8 GB/s, 75.0% of the peak" in text
    assert "bursts of up to 256 bytes" in text
    assert "no artifact is built" in fastcar("targets", "zcu104-sodimm").stdout
    found = json.loads(fastcar("targets", "zcu102", "--json").stdout)
    assert found["target"]["fabric"]["lut"] == 274_080
    assert found["budget"]["dsp"] == 2016


def test_brackets_in_an_error_are_not_markup(fastcar: Fastcar, tmp_path: Path) -> None:
    path = tmp_path / "[bold]board.toml"
    assert str(path) in fastcar("targets", path).stderr
