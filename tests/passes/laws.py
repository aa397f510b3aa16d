"""Listings of programs, and what must hold of every pass."""

import re

from torch import fx

from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.text import graph_to_text

# Source lines move with every edit of a model and with every release of torch; they have a test of their own.
_SOURCE = re.compile(r"(?:, |  # )[\w./-]+\.py:\d+$", re.MULTILINE)


def program_text(program: DecoderProgram) -> str:
    """Decode step, its branches and its signature."""
    state = [f"{s.name} {s.dtype} {list(s.shape)} {s.role}" for s in program.state]
    return "\n".join([module_text(program.graph_module), f"outputs: {program.outputs}", *state]) + "\n"


def without_sources(text: str) -> str:
    """A listing without source lines."""
    return _SOURCE.sub("", text)


def module_text(module: fx.GraphModule) -> str:
    """The listing without source lines."""
    return without_sources(graph_to_text(module))


def everything(program: DecoderProgram) -> str:
    """All that a pass may change, as text: a second opinion beside the framework's own fingerprint."""
    graphs = [graph_to_text(m) for m in program.graphs()]
    return "\n".join([*graphs, *map(str, (program.state, program.outputs, program.prefill_outputs))])


def check_truthful(program: DecoderProgram, item: Pass) -> None:
    """The pass modifies the program and says so; a second time it leaves it alone and says so."""
    start = everything(program)
    assert item.apply(program) is True
    assert everything(program) != start
    check_left_alone(program, item)


def check_left_alone(program: DecoderProgram, item: Pass) -> None:
    """The pass finds nothing to modify, and says so."""
    before = everything(program)
    assert item.apply(program) is False
    assert everything(program) == before


def nodes_of(program: DecoderProgram) -> list[fx.Node]:
    """Nodes of all graphs and their branches."""
    found: list[fx.Node] = []
    for module in program.graphs():
        owners = [module, *[m for m in module.children() if isinstance(m, fx.GraphModule)]]
        found += [n for owner in owners for n in owner.graph.nodes]
    return found
