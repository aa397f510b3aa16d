"""The pass framework: options as text, the verifier, truthful passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcar_compile.errors import CompileError, InternalError
from fastcar_compile.ir import DecoderProgram
from fastcar_compile.passes.base import Pass, pipeline_from_string, pipeline_to_string, run_pipeline
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import PASSES
from fastcar_compile.passes.verify import verify_program

from .programs import plain, up_to

THRESHOLD = st.one_of(st.none(), st.floats(allow_nan=False))


@dataclasses.dataclass(frozen=True)
class Named(Pass):
    """A pass with a text option."""

    name: ClassVar[str] = "named"
    text: str = ""
    numbers: tuple[int, ...] = ()

    def apply(self, program: DecoderProgram) -> bool:
        return False


@given(
    thresholds=st.lists(THRESHOLD, max_size=5).map(tuple),
    max_chain=st.one_of(st.none(), st.integers(0, 100)),
    couple=st.booleans(),
)
@settings(deadline=None)
def test_options_round_trip(thresholds: tuple[float | None, ...], max_chain: int | None, couple: bool) -> None:
    passes = [PASSES["find-sites"](), InsertReplay(thresholds, max_chain, couple), PASSES["offload-mlp"]()]
    assert pipeline_from_string(pipeline_to_string(passes), PASSES) == passes


@given(text=st.text(max_size=20), numbers=st.lists(st.integers(), max_size=3).map(tuple))
@settings(deadline=None)
def test_any_text_round_trips(text: str, numbers: tuple[int, ...]) -> None:
    registry: dict[str, type[Pass]] = {**PASSES, "named": Named}
    passes = [Named(text, numbers), PASSES["canonicalize"](), Named(text)]
    if text not in ("inf", "-inf"):  # text that means an infinity is read as one
        assert pipeline_from_string(pipeline_to_string(passes), registry) == passes


def test_every_pass_round_trips_and_has_a_kebab_case_name() -> None:
    passes = [kind() for kind in PASSES.values()]
    assert pipeline_from_string(pipeline_to_string(passes), PASSES) == passes
    assert all(name == kind.name and name == name.lower().replace("_", "-") for name, kind in PASSES.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no-such-pass", "unknown pass 'no-such-pass'"),
        ('insert-replay{"speed": 3}', r"pass 'insert-replay' has no option \['speed'\]"),
        ("find-sites,,canonicalize", "malformed pipeline text at character 11"),
        ('insert-replay{"max_chain": 3', "malformed pipeline text at character 13"),
        ("Find Sites", "malformed pipeline text at character 0"),
        ("find-sites{3}", "malformed pipeline text at character 10"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        pipeline_from_string(text, PASSES)


@dataclasses.dataclass(frozen=True)
class Liar(Pass):
    name: ClassVar[str] = "liar"
    says: bool = False

    def apply(self, program: DecoderProgram) -> bool:
        if not self.says:
            program.outputs[0] = "renamed"
        return self.says


@pytest.mark.parametrize("says", [True, False])
def test_a_pass_that_lies_is_refused(says: bool) -> None:
    program = up_to(plain(), "find-sites", inclusive=True)
    with pytest.raises(InternalError, match=f"pass liar says modified={says}, but the program tells otherwise"):
        run_pipeline(program, [Liar(says)])


def _call_module(program: DecoderProgram) -> None:
    program.graph_module.add_submodule("extra", torch.nn.Identity())
    graph = program.graph_module.graph
    with graph.inserting_before(graph.output_node()):
        graph.call_module("extra", (graph.output_node().args[0][0],))  # type: ignore[index]


def _no_value(program: DecoderProgram) -> None:
    next(n for n in program.graph_module.graph.nodes if n.op == "call_function").meta.pop("val")


def _no_output(program: DecoderProgram) -> None:
    program.outputs.remove("key_cache_0")


def _shape(program: DecoderProgram) -> None:
    program.state[0] = dataclasses.replace(program.state[0], shape=(1,))


def _site(program: DecoderProgram) -> None:
    program.sites[0] = dataclasses.replace(program.sites[0], exit="nothing")


BREAKS: dict[Callable[[DecoderProgram], None], str] = {
    _call_module: "is a call_module; only ATen and fastcar operators are allowed",
    _no_value: r"has no meta\['val'\]",
    _no_output: "state key_cache_0 is not both an input and an output",
    _shape: r"state key_cache_0: specified \(1,\), in the graph \(1, 1, 17, 32\)",
    _site: "site 0: exit names nothing, which is not in the graph",
}


@pytest.mark.parametrize("damage", BREAKS)
def test_the_verifier_finds(damage: Callable[[DecoderProgram], None]) -> None:
    program = up_to(plain(), "find-sites", inclusive=True)
    verify_program(program, "undamaged")
    damage(program)
    with pytest.raises(InternalError, match=BREAKS[damage]):
        verify_program(program, "now")


def test_the_verifier_reports_everything_at_once() -> None:
    program = up_to(plain(), "find-sites", inclusive=True)
    for damage in (_no_value, _site):
        damage(program)
    with pytest.raises(InternalError) as caught:
        run_pipeline(program, [])
    assert "invalid program before the first pass" in str(caught.value)
    assert all(text in str(caught.value) for text in ("has no meta['val']", "exit names nothing"))
