"""Copies of the last layer of a graph, after the proof that it equals the layer before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import LAYER, PARAMETER, layer_of
from fastcar_compile.ir.modules import get_attribute
from fastcar_compile.ir.provenance import where
from fastcar_compile.ir.query import output_nodes
from fastcar_compile.ir.rewrite import set_outputs

Nodes = dict[fx.Node, fx.Node]
HINT = "give the loaded model instead of its folder: then every layer is captured"


class LayerCopier:
    """Copies the last layer of one graph. `path` is the module path of the list of layers, `have` their number."""

    def __init__(self, module: fx.GraphModule, path: str, have: int) -> None:
        self.module, self.graph, self.path, self.last = module, module.graph, path, have - 1
        self.ends = {n.op: n for n in self.graph.nodes}
        """Last node of each kind: inputs of the copies follow the inputs that are there."""

    def run(self, count: int) -> None:
        """Copy until there are `count` layers.

        Raises:
            CompileError: the last two layers differ.
        """
        before, layer = self._nodes(self.last - 1), self._nodes(self.last)
        carried = self._match(before, layer)
        outputs = output_nodes(self.graph)
        owned = set(layer)
        results = [n for n in outputs if n in owned]
        at, previous = layer[-1], {n: n for n in layer}
        copies: list[Nodes] = []
        for index in range(self.last + 1, count):
            previous = self._copy(layer, at, index, {n: previous[twin] for n, twin in carried.items()})
            at = previous[layer[-1]]
            copies.append(previous)
        self._read_last(layer, copies)
        set_outputs(self.graph, [*outputs, *(c[n] for c in copies for n in results)])

    def _read_last(self, layer: list[fx.Node], copies: list[Nodes]) -> None:
        """Let what follows the layers read the last copy."""
        inside = {*layer, *(made for nodes in copies for made in nodes.values())}
        for node in layer:
            for user in list(node.users):
                if user not in inside and user.op != "output":
                    user.replace_input_with(node, copies[-1][node])

    def _nodes(self, layer: int) -> list[fx.Node]:
        """The operators of a layer, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and layer_of(n) == layer]

    def _match(self, before: list[fx.Node], layer: list[fx.Node]) -> Nodes:
        """Check that both layers are equal; return what `layer` reads of `before` -> the same of `layer` itself."""
        if len(before) != len(layer):
            raise self._error(layer[0], f"{len(before)} operators", f"{len(layer)}")
        twins = dict(zip(before, layer, strict=True))
        carried: Nodes = {}
        inside = set(layer)
        for first, second in twins.items():
            ours, theirs = second.all_input_nodes, first.all_input_nodes
            if _operation(first) != _operation(second) or len(ours) != len(theirs):
                raise self._error(second, f"{first.target}{first.args}", f"{second.target}{second.args}")
            for mine, other in zip(ours, theirs, strict=True):
                if mine in twins and mine not in inside:
                    carried[mine] = twins[mine]
                elif not (twins.get(other) is mine or self._corresponds(other, mine)):
                    raise self._error(second, f"an input {other.name}", mine.name)
        return carried

    def _corresponds(self, before: fx.Node, node: fx.Node) -> bool:
        """Whether two inputs from outside are the same one, or each layer's own parameter or state."""
        if before is node:
            return True
        if _value(before) != _value(node) or before.op != node.op or node.op == "call_function":
            return False
        return self._own_name(str(node.target), node.op, self.last - 1) == str(before.target)

    def _own_name(self, name: str, op: str, layer: int) -> str:
        """What the last layer's parameter or state is called in another layer; its own name where it is shared."""
        if op == "placeholder":
            return state_name(name, self.last, layer)
        return self._moved_path(name, layer)

    def _moved_path(self, path: str, layer: int) -> str:
        own = f"{self.path}.{self.last}"
        inside = path == own or path.startswith(f"{own}.")
        return f"{self.path}.{layer}{path[len(own) :]}" if inside else path

    def _copy(self, layer: list[fx.Node], at: fx.Node, index: int, carried: Nodes) -> Nodes:
        mapping = dict(carried)
        for node in layer:
            for source in node.all_input_nodes:
                if source not in mapping and source.op in ("get_attr", "placeholder"):
                    mapping[source] = self._input(source, index)
        copies: Nodes = {}
        for node in layer:
            with self.graph.inserting_after(at):
                at = self.graph.node_copy(node, lambda n: copies.get(n) or mapping.get(n, n))
            at.meta = self._meta(node, index)
            copies[node] = at
        return copies

    def _input(self, node: fx.Node, index: int) -> fx.Node:
        """The parameter or state of layer `index` that stands where the last layer has `node`."""
        name = self._own_name(str(node.target), node.op, index)
        if name == node.target:
            return node
        if node.op == "get_attr":
            self._register(name, get_attribute(self.module, str(node.target)), node)
        with self.graph.inserting_after(self.ends[node.op]):
            made = self.graph.placeholder(name) if node.op == "placeholder" else self.graph.get_attr(name)
        self.ends[node.op] = made
        made.meta = self._meta(node, index)
        return made

    def _meta(self, node: fx.Node, index: int) -> dict[str, Any]:
        """The node's metadata with the layer's number and paths replaced."""
        meta: dict[str, Any] = {**node.meta, LAYER: index}
        for key in ("module", PARAMETER):
            if key in meta:
                meta[key] = self._moved_path(meta[key], index)
        if stack := meta.get("nn_module_stack"):
            moved = {k: (self._moved_path(path, index), kind) for k, (path, kind) in stack.items()}
            meta["nn_module_stack"] = moved
        return meta

    def _register(self, name: str, value: object, node: fx.Node) -> None:
        if not isinstance(value, Tensor) or not value.is_meta:
            what = f"{node.target} has a value of its own in layer {self.last}, which may be another in other layers"
            raise CompileError(what, where=where(node), hint=HINT)
        owner: torch.nn.Module = self.module
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, value)

    def _error(self, node: fx.Node, found: str, here: str) -> CompileError:
        what = f"layers {self.last - 1} and {self.last} differ, so that neither stands for the others: {found} | {here}"
        return CompileError(what, where=where(node), hint=HINT)


def state_name(name: str, old: int, new: int) -> str:
    """Return the name of a layer's state in another layer."""
    return f"{name.removesuffix(str(old))}{new}" if name.endswith(f"_{old}") else name


def _operation(node: fx.Node) -> tuple[object, ...]:
    """Operator, type of the result, and the arguments with one mark for every node."""
    literals = str(map_arg((node.args, dict(node.kwargs)), lambda _: "node"))
    return (node.target, literals, _value(node))


def _value(node: fx.Node) -> tuple[object, ...]:
    value: object = node.meta.get("val")
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (type(value),)
