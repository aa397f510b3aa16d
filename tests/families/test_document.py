"""docs/reference/models.md is what the list of cases says."""

from __future__ import annotations

from .cases import CASES
from .document import DOCUMENT, document


def test_the_page_is_what_the_list_says() -> None:
    assert DOCUMENT.read_text("utf-8") == document(), "run: python -m tests.families"


def test_names_are_told_apart() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
