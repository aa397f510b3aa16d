"""docs/extending.md names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_files_of_an_extension_exist() -> None:
    text = (ROOT / "docs" / "extending.md").read_text("utf-8")
    named = re.findall(r"`((?:fastcar_compile|hls_templates|tests)/[^`]*)`", text)
    assert len(named) > 20
    assert [name for name in named if "NAME" not in name and not (ROOT / name).exists()] == []
