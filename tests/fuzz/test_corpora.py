"""Every input that a fuzzer begins from or that once was a finding, through its target without the engine."""

import importlib
from pathlib import Path

import pytest

from fuzz.seeds import PYTHON, seeds

CORPORA = Path(__file__).with_name("corpora")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PYTHON)
def test_inputs_are_accepted_or_refused_by_name(name: str) -> None:
    run = importlib.import_module(f"fuzz.targets.{name}").run
    kept = sorted((CORPORA / name).iterdir())
    assert kept
    for path in kept:
        try:
            run(path.read_bytes())
        except Exception as error:
            error.add_note(f"input: {path}")
            raise


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PYTHON)
def test_the_first_inputs_are_accepted(name: str) -> None:
    run = importlib.import_module(f"fuzz.targets.{name}").run
    assert [file for file, data in seeds(name).items() if not run(data)] == []


def test_every_corpus_has_a_fuzzer() -> None:
    programs = {path.stem for path in Path(__file__).with_name("cpp").glob("*.cpp")}
    assert {path.name for path in CORPORA.iterdir()} == {*PYTHON, *programs}
