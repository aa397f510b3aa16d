"""An exported program from a file: whatever is in the file, its code does not run."""

import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fastcar_compile.errors import UserError
from fastcar_compile.frontend.pt2 import load_exported

from . import evil

LOADED = ("sample inputs", "weights of an older form", "constants of an older form")
"""The evil part is not read at all."""


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return evil.exported()


@pytest.fixture(scope="module")
def parts(program: torch.export.ExportedProgram) -> evil.Parts:
    return evil.parts_of(program)


def test_an_exported_program_is_read(program: torch.export.ExportedProgram, parts: evil.Parts, tmp_path: Path) -> None:
    found = load_exported(evil.write(tmp_path / "m.pt2", parts))
    assert [n.target for n in found.graph.nodes] == [n.target for n in program.graph.nodes]
    assert [n.name for n in found.graph.nodes] == [n.name for n in program.graph.nodes]
    for name, value in {**program.state_dict, **program.constants}.items():
        torch.testing.assert_close({**found.state_dict, **found.constants}[name], value, rtol=0, atol=0)


def has_run(place: Path) -> bool:
    """Whether the code ran; forgets it."""
    ran = place.exists() or sys.modules.pop("this", None) is not None
    shutil.rmtree(place, ignore_errors=True)
    return ran


def refusal(path: Path) -> UserError | None:
    """Why the file is not read."""
    try:
        load_exported(path)
    except UserError as error:
        return error
    return None


def test_no_code_of_an_evil_file_runs(parts: evil.Parts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "ran"
    cases = evil.evil_parts(parts, place)
    refused = dict[str, str]()
    for name, evil_parts in cases.items():
        path = evil.write(tmp_path / "m.pt2", evil_parts)
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            caplog.set_level("CRITICAL")
            _ = torch.export.load(path).graph_module.code  # as its first call makes it
        assert has_run(place), f"{name}: the file is not evil at all"
        problem = refusal(path)
        if problem is not None:
            refused[name] = problem.what
            assert (problem.where, bool(problem.hint)) == (str(path), True), name
        assert not has_run(place), name
    assert sorted(refused) == sorted(cases.keys() - set(LOADED)), refused


@pytest.mark.parametrize("target", evil.refused_operators())
def test_an_operator_that_no_file_may_ask_for(parts: evil.Parts, target: str, tmp_path: Path) -> None:
    changed = evil.edited(parts, evil.PROGRAM, lambda data: evil.nodes(data)[0].update(target=target))
    with pytest.raises(UserError, match="which no file may ask for"):
        load_exported(evil.write(tmp_path / "m.pt2", changed))


GRAPH = ("graph_module", "graph")
BROKEN: dict[str, tuple[Any, ...]] = {
    "no graph": ("graph_module", {}),
    "a node without a target": (*GRAPH, "nodes", 0, {}),
    "another version": ("schema_version", {"major": 99, "minor": 0}),
    "a keyword as a name": (*GRAPH, "nodes", 0, "name", "lambda"),
    "an unknown pytree": ("graph_module", "module_call_graph", 0, "signature", "out_spec", '[1, {"type": "x"}]'),
    "ranges": ("range_constraints", {"s0": {"min_val": 1, "max_val": 2}}),
    "a parameter's name": ("graph_module", "signature", "input_specs", 0, "parameter", "parameter_name", 'a"b'),
    "negative size": (*GRAPH, "tensor_values", "linear", "sizes", 0, {"as_int": -1}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_a_user_error(parts: evil.Parts, name: str, tmp_path: Path) -> None:
    *path, value = BROKEN[name]
    changed = evil.edited(parts, evil.PROGRAM, evil.put(*path, value=value))
    with pytest.raises(UserError) as caught:
        load_exported(evil.write(tmp_path / "m.pt2", changed))
    assert (bool(caught.value.where), bool(caught.value.hint)) == (True, True)


def test_a_broken_archive_is_a_user_error(parts: evil.Parts, tmp_path: Path) -> None:
    whole = evil.write(tmp_path / "whole.pt2", parts).read_bytes()
    for number, data in enumerate([b"", b"PK", whole[:-30], whole[: len(whole) // 2], b"\0" * 100]):
        path = tmp_path / f"{number}.pt2"
        path.write_bytes(data)
        with pytest.raises(UserError, match="cannot be read"):
            load_exported(path)
    for older in ("data/weights/model_weights_config.json", evil.PROGRAM):
        with pytest.raises(UserError, match=r"(?s)write it .*torch\.export\.save"):
            load_exported(evil.write(tmp_path / "older.pt2", {n: data for n, data in parts.items() if n != older}))
    two = {"models/other.json": parts[evil.PROGRAM]}
    with pytest.raises(UserError, match="2 exported programs"):
        load_exported(evil.write(tmp_path / "two.pt2", parts | two))


def test_a_tensor_takes_no_more_memory_than_the_file(parts: evil.Parts, tmp_path: Path) -> None:
    config = "data/weights/model_weights_config.json"

    def expand(data: Any) -> None:
        meta = data["config"]["embed.weight"]["tensor_meta"]
        meta.update(sizes=[{"as_int": 10**6}, {"as_int": 10**6}], strides=[{"as_int": 0}, {"as_int": 0}])

    with pytest.raises(UserError, match="not a plain tensor"):
        load_exported(evil.write(tmp_path / "m.pt2", evil.edited(parts, config, expand)))
