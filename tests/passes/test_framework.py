"""The pass framework: pipelines as text, and passes that lie or break the program."""

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from fastcar_compile.errors import CompileError, InternalError
from fastcar_compile.ir.pass_manager import Pass, pipeline_from_string, pipeline_to_string, run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import graph_module, output_nodes
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import PASSES, analysis_pipeline

from .tiny import after


@dataclass(frozen=True)
class Example(Pass):
    """A pass with options of every kind that JSON and our own spelling of infinities can carry."""

    name = "example"
    reason = "For the test."
    text: str = ""
    number: float | int | None = None
    flags: tuple[object, ...] = ()

    def apply(self, program: DecoderProgram) -> bool:
        return False


REGISTRY: dict[str, type[Pass]] = {**PASSES, "example": Example}
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
TRICKY = ["}", '"},example{"', "},", "{", '\\"}', "Infinity"]
TEXTS = st.text().filter(lambda t: t not in ("inf", "-inf")) | st.sampled_from(TRICKY)
VALUES = st.recursive(NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
EXAMPLES = st.builds(Example, text=TEXTS, number=NUMBERS, flags=st.lists(VALUES, max_size=3).map(tuple))
PLAIN = st.sampled_from([InsertReplay((None, -float("inf"), 0.5), 2, True), *(p() for p in PASSES.values())])


@settings(max_examples=50)
@given(st.lists(EXAMPLES | PLAIN, max_size=5))
def test_round_trip(passes: list[Pass]) -> None:
    text = pipeline_to_string(passes)
    again = pipeline_from_string(text, REGISTRY)
    assert [repr(p) for p in again] == [repr(p) for p in passes]  # repr tells True from 1 and "inf" from inf
    assert pipeline_to_string(again) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fuse", "unknown pass 'fuse'\n  hint:  use one of: bfloat16-embedding, bfloat16-weights, "),
        ('insert-replay{"depth": 1, "age": 2}', "pass 'insert-replay' has no option ['age', 'depth']\n  hint:  its o"),
        ("canonicalize,", "malformed pipeline text at character 13: ''"),
        ('insert-replay{"max_chain": }', "malformed pipeline text at character 13: '{\"max_chain\": }'"),
    ],
)
def test_bad_text(text: str, expected: str) -> None:
    with pytest.raises(CompileError) as error:
        pipeline_from_string(text, PASSES)
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("item", [Example("inf"), Example(flags=("a", ("-inf",)))])
def test_a_text_that_would_come_back_as_a_number_is_refused(item: Pass) -> None:
    with pytest.raises(InternalError, match="cannot be an option of a pass: it would be read back as a number"):
        pipeline_to_string([item])


@dataclass(frozen=True)
class Edits(Pass):
    """Edits a part of the program, outside of the decode graph too, and says `says`."""

    name = "edits"
    reason = "For the test."
    what: str = "nothing"
    says: bool = False

    def apply(self, program: DecoderProgram) -> bool:
        graph = program.graph_module.graph
        if self.what == "graph":
            first, *others = output_nodes(graph)
            with graph.inserting_before(graph.output_node()):
                node = graph.call_function(torch.ops.aten.neg.default, (first,))
            node.meta = dict(first.meta)
            graph.output_node().args = ((node, *others),)
        elif self.what == "outputs":
            program.outputs[-1] = "nothing"
        elif self.what == "branch":
            branch = program.graph_module.compute_branch_0
            node = next(n for n in branch.graph.nodes if n.target is torch.ops.aten.silu.default)  # pyright: ignore[reportAttributeAccessIssue, reportGeneralTypeIssues]
            node.target = torch.ops.aten.relu.default
        return self.says


@pytest.mark.parametrize("what", ["nothing", "graph", "branch"])
def test_a_lying_pass_is_caught(what: str) -> None:
    lie = Edits(what, says=what == "nothing")
    with pytest.raises(InternalError, match=f"edits says modified={lie.says}, but the program tells otherwise"):
        run_pipeline(after(*analysis_pipeline(), InsertReplay((1.5,))), [lie])


def test_an_honest_pass_is_logged_and_recompiled() -> None:
    program = after(*analysis_pipeline())
    kept = len(program.log)
    run_pipeline(program, [Edits("graph", True), Edits()])
    assert program.log[kept:] == [
        'edits{"says": true, "what": "graph"}: modified',
        'edits{"says": false, "what": "nothing"}: unchanged',
    ]
    assert "torch.ops.aten.neg.default" in program.graph_module.code


def test_a_pass_that_breaks_an_invariant_is_named() -> None:
    with pytest.raises(InternalError) as error:
        run_pipeline(after(*analysis_pipeline()), [Edits("outputs", True)])
    assert str(error.value) == (
        "invalid program after pass edits:\n  state value_cache_0 is not both an input and an output of the decode step"
    )


def node(program: DecoderProgram, name: str) -> fx.Node:
    return next(n for n in program.graph_module.graph.nodes if n.name == name)


def broken() -> Iterator[tuple[str, object]]:
    """(text of the verifier, what breaks the invariant) of a tiny decoder after analysis."""

    def output(program: DecoderProgram) -> None:
        program.outputs.append("more")

    def spec(program: DecoderProgram) -> None:
        program.state[0] = dataclasses.replace(program.state[0], name="lost")

    def value(program: DecoderProgram) -> None:
        del node(program, "linear").meta["val"]

    def method(program: DecoderProgram) -> None:
        graph = program.prefill.graph  # pyright: ignore[reportOptionalMemberAccess]
        with graph.inserting_before(graph.output_node()):
            graph.call_method("neg", (output_nodes(graph)[0],))

    yield "3 outputs in the graph, 4 named", output
    yield "state lost is not both an input and an output of the decode step", spec
    yield "decode step: linear has no meta['val']", value
    yield "prefill: neg is a call_method; only ATen and fastcar operators are allowed", method

    def role(program: DecoderProgram) -> None:
        del node(program, "add_1").meta["role"]

    def layer(program: DecoderProgram) -> None:
        del node(program, "mul").meta["layer"]

    def later(program: DecoderProgram) -> None:
        node(program, "linear_1").meta["layer"] = 1

    yield "decode step: layer 0 has no node of role exit", role
    yield "decode step: mul has no meta['layer']", layer
    yield "decode step: add of layer 0 reads a node of layer 1", later


@pytest.mark.parametrize(("text", "spoil"), list(broken()))
def test_every_broken_invariant_is_reported(text: str, spoil: object) -> None:
    program = after(*analysis_pipeline())
    spoil(program)  # pyright: ignore[reportCallIssue]
    with pytest.raises(InternalError) as error:
        run_pipeline(program, [])
    assert str(error.value).startswith("invalid program before the first pass:\n  ")
    assert text in str(error.value)


def test_a_module_of_a_graph_writes_its_code_at_its_first_call() -> None:
    """And a hook sees that call once."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, 1)))
    module = graph_module(torch.nn.Module(), graph)
    assert "_code" not in vars(module)
    seen: list[object] = []
    module.register_forward_hook(lambda _module, _args, result: seen.append(result))
    for _ in range(2):
        assert module(torch.ones(1)).item() == 2
    assert len(seen) == 2
    assert "add" in module.code
    next(iter(x.users)).args = (x, 2)
    module.recompile()
    assert copy.deepcopy(module)(torch.ones(1)).item() == 3
    assert module(torch.ones(1)).item() == 3
