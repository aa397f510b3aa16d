"""Golden graphs: what every pass makes of the graph before it.

FASTCAR_UPDATE_GOLDEN=1 rewrites the files; read their diff before committing it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from fastcar_compile.ir import DecoderProgram

from .programs import STAGES, gated, listing, plain, up_to

GOLDEN = Path(__file__).parent / "golden"


def check(name: str, text: str) -> None:
    """`text` equals the golden file."""
    path = GOLDEN / name
    if os.environ.get("FASTCAR_UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


@pytest.fixture(params=[plain, gated], ids=["plain", "gated"])
def program(request: pytest.FixtureRequest) -> tuple[str, DecoderProgram]:
    return request.param.__name__, request.param()


def test_captured(program: tuple[str, DecoderProgram]) -> None:
    name, captured = program
    check(f"{name}.0-captured.txt", listing(captured))


@pytest.mark.parametrize("stage", STAGES)
def test_after(program: tuple[str, DecoderProgram], stage: str) -> None:
    name, captured = program
    number = list(STAGES).index(stage) + 1
    check(f"{name}.{number}-{stage}.txt", listing(up_to(captured, stage, inclusive=True)))


def test_sites(program: tuple[str, DecoderProgram]) -> None:
    name, captured = program
    (site,) = up_to(captured, "find-sites", inclusive=True).sites
    found = dataclasses.asdict(site) | {"source": site.source.split(":")[0]}
    check(f"{name}.sites.json", json.dumps(found, indent=1) + "\n")


@pytest.mark.parametrize("stage", ["normalize-state", "canonicalize", "find-sites", "quantize-w8a8", "offload-mlp"])
def test_second_application_changes_nothing(program: tuple[str, DecoderProgram], stage: str) -> None:
    after = up_to(program[1], stage, inclusive=True)
    before = listing(after)
    assert STAGES[stage].apply(after) is False
    assert listing(after) == before
