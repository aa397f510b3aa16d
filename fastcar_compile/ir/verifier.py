"""The verifier: what must hold for a DecoderProgram between passes."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, fx

from fastcar_compile.errors import InternalError, count_text
from fastcar_compile.ir.layers import ATTENTIONS, LAYER, Role, layer_of, operators_with_roles, replay_of, role_of
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.query import branches_of, get_attribute, is_op, output_nodes, placeholder_names, with_branches
from fastcar_compile.ir.sites import LINEARS
from fastcar_compile.ir.types import StateRole

aten, fastcar = torch.ops.aten, torch.ops.fastcar
Problems = Iterator[str]
Type = tuple[torch.dtype, tuple[int, ...]]
_OPERATORS = {
    Role.ATTENTION: ATTENTIONS,
    Role.RESIDUAL: (aten.add,),
    Role.EXIT: (aten.add,),
    Role.GATE_PROJ: LINEARS,
    Role.UP_PROJ: LINEARS,
    Role.DOWN_PROJ: LINEARS,
    Role.MLP: (fastcar.offloaded_mlp,),
}
"""Role -> the operators that may have it."""
_ALWAYS = (Role.ATTENTION, Role.RESIDUAL, Role.EXIT)
_COMPUTED = (Role.UP_PROJ, Role.DOWN_PROJ, Role.ACTIVATION)
_REPLAY_STATE = (StateRole.MLP_CACHE, StateRole.CHAIN_COUNT)


def verify_program(program: DecoderProgram, moment: str) -> None:
    """Check every invariant and report all that fail.

    1. Graphs are well formed: operators of ATen and `fastcar::` only, values known, attributes tensors or branches.
    2. State is paired by name: each is a placeholder and an output of its shape, dtype, layer and role. A state of the
       context is a placeholder, and an output of the context graph.
    3. Both branches of a `cond` take what it passes, and return what it yields.
    4. Once find-sites ran, every node has a layer, reads no later layer, and each role is there once per layer.
    5. A layer has a gate, facts of the replay and caches, or none of them. With a gate its MLP is in a compute branch.

    Raises:
        InternalError: naming the moment and each broken invariant.
    """
    problems = [*_graph_problems(program.graph_module, "decode step"), *_signature_problems(program)]
    problems += [*_branch_problems(program.graph_module), *_replay_problems(program)]
    for module, label in zip(program.graphs(), ("decode step", "prefill"), strict=False):
        problems += _layer_problems(module, program.config.num_layers, label)
    for module, label in ((program.prefill, "prefill"), (program.context, "context")):
        problems += _graph_problems(module, label) if module is not None else ()
    if problems:
        raise InternalError(f"invalid program {moment}:\n  " + "\n  ".join(problems))


def _graph_problems(module: fx.GraphModule, label: str) -> Problems:
    try:
        module.graph.lint()
    except RuntimeError as error:
        yield f"{label}: {error}"
    for node in module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            yield f"{label}: {node.name} is a {node.op}; only ATen and fastcar operators are allowed"
        if node.op == "get_attr" and not isinstance(get_attribute(module, str(node.target)), Tensor | fx.GraphModule):
            yield f"{label}: {node.name} reads {node.target}, which is no tensor"
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            yield f"{label}: {node.name} has no meta['val']"


def _signature_problems(program: DecoderProgram) -> Problems:
    names = placeholder_names(program.graph_module)
    nodes = {str(n.target): n for n in program.graph_module.graph.find_nodes(op="placeholder")}
    outputs = output_nodes(program.graph_module.graph)
    results = dict(zip(program.outputs, outputs, strict=False))
    # A state of the context comes out of the context graph, all others out of the step itself.
    made = [] if program.context is None else output_nodes(program.context.graph)
    contexts = dict(zip(program.context_outputs, made, strict=False))
    for spec in program.state:
        made_by = contexts if spec.reads_only else results
        if spec.name not in nodes or spec.name not in made_by:
            graph = "decode step, made by the context graph" if spec.reads_only else "decode step"
            yield f"state {spec.name} is not both an input and an output of the {graph}"
        else:
            yield from _state_problems(spec, nodes[spec.name], made_by[spec.name])
    if len(outputs) != len(program.outputs):
        yield f"{count_text(len(outputs), 'output')} in the graph, {len(program.outputs)} named"
    if len(set(names)) != len(names):
        yield "two placeholders share a name"


def _state_problems(spec: StateSpec, before: fx.Node, after: fx.Node) -> Problems:
    specified, given, returned = (spec.dtype, tuple(spec.shape)), _type(before), _type(after)
    if given is not None and given != specified:
        yield f"state {spec.name}: specified {_plain(specified)}, in the graph {_plain(given)}"
    elif returned is not None and returned != given:
        yield f"state {spec.name}: its output {after.name} is {_plain(returned)}, but its input {_plain(given)}"
    if (role_of(before), layer_of(before)) != (str(spec.role), spec.layer):
        found = f"{role_of(before)} of layer {layer_of(before)}"
        yield f"state {spec.name}: specified as {spec.role} of layer {spec.layer}, in the graph {found}"


def _branch_problems(module: fx.GraphModule) -> Problems:
    branches = branches_of(module)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond):
        _, *arms, operands = node.args
        for arm in arms:
            inner = branches[str(arm.target)].graph
            takes, gives = [_type(n) for n in inner.find_nodes(op="placeholder")], output_nodes(inner)
            if takes != [_type(n) for n in operands]:
                yield f"{arm.target} takes {_list(takes)}, but {node.name} passes {_list(_type(n) for n in operands)}"
            results = [(v.dtype, tuple(v.shape)) for v in node.meta["val"]]
            if [_type(n) for n in gives] != results:
                yield f"{arm.target} returns {_list(_type(n) for n in gives)}, but {node.name} yields {_list(results)}"


def _layer_problems(module: fx.GraphModule, count: int, label: str) -> Problems:
    found: dict[int, list[str]] = {}
    for layer, role, node in operators_with_roles(module):
        found.setdefault(layer, []).append(role)
        allowed = _OPERATORS.get(Role(role))
        if allowed is not None and not is_op(node, *allowed):
            yield f"{label}: {node.name} has the role {role} of layer {layer}, but calls {node.target}"
    # Before find-sites no node has a role, and there is nothing to check.
    if not found:
        return
    if sorted(found) != list(range(count)):
        yield f"{label}: layers {sorted(found)} have roles, but the decoder has {count_text(count, 'layer')}"
    for layer, roles in sorted(found.items()):
        # offload-mlp leaves one node in the place of the linears and the activation.
        needed = [*_ALWAYS, Role.MLP] if Role.MLP in roles else [*_ALWAYS, *_COMPUTED]
        yield from (f"{label}: layer {layer} has no node of role {r}" for r in needed if r not in roles)
        twice = sorted({r for r in roles if roles.count(r) > 1})
        yield from (f"{label}: layer {layer} has {roles.count(r)} nodes of role {r}" for r in twice)
    for owner in with_branches(module):
        yield from _order_problems(owner, count, label)


def _order_problems(module: fx.GraphModule, count: int, label: str) -> Problems:
    """Every operator and parameter knows its layer, and reads nothing of a later one."""
    last: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        latest = max((last.get(a, -1) for a in node.all_input_nodes), default=-1)
        last[node] = latest
        if node.op not in ("call_function", "get_attr"):
            continue
        if LAYER not in node.meta:
            yield f"{label}: {node.name} has no meta['layer']"
            continue
        layer = layer_of(node)
        if layer is None:
            # A node of no layer is in front of all layers or behind all: behind, no layer may read it.
            last[node] = count if latest >= 0 else -1
            continue
        if latest > layer:
            yield f"{label}: {node.name} of layer {layer} reads a node of layer {latest}"
        last[node] = layer


def _replay_problems(program: DecoderProgram) -> Problems:
    """Gate, facts, caches and the place of the MLP agree."""
    # Nodes of a compute branch are in another graph, and so not in this set.
    own = set(program.graph_module.graph.nodes)
    roles: dict[int, dict[str, fx.Node]] = {}
    for layer, role, node in operators_with_roles(program.graph_module):
        roles.setdefault(layer, {})[role] = node
    for layer, nodes in sorted(roles.items()):
        gate = nodes.get(Role.GATE)
        cached = {s.role for s in program.state if s.layer == layer}
        if gate is not None and replay_of(gate) is None:
            yield f"layer {layer}: {gate.name} is its gate, but has no facts of the replay"
        # gate_cache is not among these: only a gate that compares the MLP's input has it.
        if any((role in cached) != (gate is not None) for role in _REPLAY_STATE):
            yield f"layer {layer}: {'a' if gate else 'no'} gate, but state {sorted(cached)}"
        computes = nodes.get(Role.DOWN_PROJ) or nodes.get(Role.MLP)
        if computes is not None and (computes in own) != (gate is None):
            place = "outside of" if computes in own else "inside"
            yield f"layer {layer}: {computes.name} is {place} the compute branch, with {'a' if gate else 'no'} gate"


def _type(node: fx.Node) -> Type | None:
    val = node.meta.get("val")
    return (val.dtype, tuple(val.shape)) if isinstance(val, Tensor) else None


def _plain(type_: Type | None) -> str:
    return "nothing" if type_ is None else f"{str(type_[0]).removeprefix('torch.')}{list(type_[1])}"


def _list(types: Iterable[Type | None]) -> str:
    return f"({', '.join(_plain(t) for t in types)})"
