"""The verifier: what must hold for a DecoderProgram between passes."""

from __future__ import annotations

from torch import Tensor, fx

from fastcar_compile.errors import InternalError
from fastcar_compile.ir.program import DecoderProgram, get_attribute, placeholder_names


def verify_program(program: DecoderProgram, moment: str) -> None:
    """Check every invariant and report all that fail.

    Raises:
        InternalError: naming the moment and each broken invariant.
    """
    problems = _graph_problems(program.graph_module, "decode step")
    if program.prefill is not None:
        problems += _graph_problems(program.prefill, "prefill")
    problems += _signature_problems(program) + _site_problems(program)
    if problems:
        raise InternalError(f"invalid program {moment}:\n  " + "\n  ".join(problems))


def _graph_problems(module: fx.GraphModule, label: str) -> list[str]:
    problems: list[str] = []
    try:
        module.graph.lint()
    except RuntimeError as error:
        problems.append(f"{label}: {error}")
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            problems.append(f"{label}: {node.name} is a {node.op}; only ATen and fastcar operators are allowed")
        if node.op == "get_attr" and not isinstance(get_attribute(module, str(node.target)), Tensor | fx.GraphModule):
            problems.append(f"{label}: {node.name} reads {node.target}, which is no tensor")
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            problems.append(f"{label}: {node.name} has no meta['val']")
    return problems


def _signature_problems(program: DecoderProgram) -> list[str]:
    problems: list[str] = []
    names = placeholder_names(program.graph_module)
    nodes = {str(n.target): n for n in program.graph_module.graph.nodes if n.op == "placeholder"}
    for spec in program.state:
        if spec.name not in names or spec.name not in program.outputs:
            problems.append(f"state {spec.name} is not both an input and an output of the decode step")
        elif (shape := tuple(nodes[spec.name].meta["val"].shape)) != spec.shape:
            problems.append(f"state {spec.name}: specified {spec.shape}, in the graph {shape}")
        elif (dtype := nodes[spec.name].meta["val"].dtype) != spec.dtype:
            problems.append(f"state {spec.name}: specified {spec.dtype}, in the graph {dtype}")
    outputs = program.graph_module.graph.output_node().args[0]
    if isinstance(outputs, tuple | list) and len(outputs) != len(program.outputs):
        problems.append(f"{len(outputs)} outputs in the graph, {len(program.outputs)} named")
    if len(set(names)) != len(names):
        problems.append("two placeholders share a name")
    return problems


def _site_problems(program: DecoderProgram) -> list[str]:
    names = {n.name for n in program.graph_module.graph.nodes}
    problems: list[str] = []
    for site in program.sites:
        for field_name in ("attention", "query", "entry", "residual", "exit"):
            if (node := getattr(site, field_name)) not in names:
                problems.append(f"site {site.layer}: {field_name} names {node}, which is not in the graph")
    return problems
