"""Layers of a checkpoint are captured once: the last ones are copied until the decoder has all of its layers."""

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import LAYER, PARAMETER, layer_of, role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import get_attribute, output_nodes
from fastcar_compile.ir.rewrite import set_outputs

Nodes = dict[fx.Node, fx.Node]
HINT = "give the loaded model instead of its folder: then every layer is captured"


class LayerCopier:
    """Copies the last `period` layers of one graph in turn. `path` is the module path of the list of layers.

    Args:
        have: layers of the graph. period: layers after which the kinds of layers repeat.
    """

    def __init__(self, module: fx.GraphModule, path: str, have: int, period: int) -> None:
        self.module, self.graph, self.path = module, module.graph, path
        self.have, self.period = have, period
        heads = list(takewhile(lambda n: n.op != "call_function", self.graph.nodes))
        self.ends = {"get_attr": heads[-1]} | {n.op: n for n in heads}
        """Last input and last parameter before the first operator: those of the copies follow them."""
        self.twins: Nodes = {}
        """Operators of the block of layers before the last one -> those of the last block."""

    def run(self, count: int) -> None:
        """Copy until there are `count` layers.

        Raises:
            CompileError: the last two blocks differ.
        """
        # A layer may read operators of another layer of its block, so all layers are paired before the first is proved.
        layers = {n: self._nodes(n) for n in range(self.have - 2 * self.period, self.have)}
        templates = range(self.have - self.period, self.have)
        for layer in templates:
            self._pair(layers[layer - self.period], layers[layer])
        for layer in templates:
            self._prove(layer, layers[layer - self.period], layers[layer])
        outputs = output_nodes(self.graph)
        # Until a template has a copy, it is its own last copy.
        latest = {node: node for layer in templates for node in layers[layer]}
        at, results = layers[self.have - 1][-1], list[fx.Node]()
        for index in range(self.have, count):
            template = template_of(index, self.have, self.period)
            made = self._copy(layers[template], at, index, latest)
            owned = set(layers[template])
            # The state of copies is returned behind that of the captured layers, layer by layer.
            results += [made[n] for n in outputs if n in owned]
            at = made[layers[template][-1]]
            latest |= made
        self._read_last(layers[self.have - 1], latest)
        set_outputs(self.graph, [*outputs, *results])

    def _read_last(self, layer: list[fx.Node], latest: Nodes) -> None:
        """Let what follows the layers read the last copy."""
        for node in layer:
            for user in list(node.users):
                # Final norm and head belong to no layer. The outputs
                # stay: a captured layer still returns its own state.
                if layer_of(user) is None and user.op != "output":
                    user.replace_input_with(node, latest[node])

    def _nodes(self, layer: int) -> list[fx.Node]:
        """The operators of a layer, in order."""
        return [n for n in self.graph.nodes if n.op == "call_function" and layer_of(n) == layer]

    def _pair(self, before: list[fx.Node], layer: list[fx.Node]) -> None:
        """Note which operators of two layers of one kind belong together."""
        if len(before) != len(layer):
            raise self._error(layer[0], f"{len(before)} operators", f"{len(layer)}")
        self.twins |= dict(zip(before, layer, strict=True))

    def _prove(self, number: int, before: list[fx.Node], layer: list[fx.Node]) -> None:
        """Check that a layer of the last block equals the one a period before it."""
        for first, second in zip(before, layer, strict=True):
            ours, theirs = second.all_input_nodes, first.all_input_nodes
            if _operation(first) != _operation(second) or len(ours) != len(theirs):
                raise self._error(second, f"{first.target}{first.args}", f"{second.target}{second.args}")
            for mine, other in zip(ours, theirs, strict=True):
                same = self.twins.get(other) is mine or self._is_carried(mine, number)
                if not (same or self._corresponds(other, mine, number)):
                    raise self._error(second, f"an input {other.name}", mine.name)

    def _is_carried(self, node: fx.Node, number: int) -> bool:
        """Whether a layer reads this of the block before, at most a period back: a copy reads its twin's last copy."""
        made_in = layer_of(node)
        return node in self.twins and made_in is not None and number - made_in <= self.period

    def _corresponds(self, before: fx.Node, node: fx.Node, number: int) -> bool:
        """Whether two inputs from outside are the same one, or each layer's own parameter or state."""
        # Both layers read one node, such as the position, or each reads its own: `layers.0.w` and `layers.1.w`.
        if before is node:
            return True
        if _value(before) != _value(node) or before.op != node.op or node.op == "call_function":
            return False
        return self._own_name(str(node.target), node.op, number, number - self.period) == str(before.target)

    def _own_name(self, name: str, op: str, old: int, new: int) -> str:
        """What a layer's parameter or state is called in another layer; its own name where it is shared."""
        return state_name(name, old, new) if op == "placeholder" else self._moved_path(name, old, new)

    def _moved_path(self, path: str, old: int, new: int) -> str:
        own = f"{self.path}.{old}"
        inside = path == own or path.startswith(f"{own}.")
        return f"{self.path}.{new}{path[len(own) :]}" if inside else path

    def _copy(self, layer: list[fx.Node], at: fx.Node, index: int, latest: Nodes) -> Nodes:
        """Copy a layer behind `at`. `latest`: operators of the last block -> their last copies."""
        mapping: Nodes = {}
        for source in dict.fromkeys(source for node in layer for source in node.all_input_nodes):
            if source.op in ("get_attr", "placeholder"):
                mapping[source] = self._input(source, index)
            # An input from the block before is renamed to its twin in the last block, and then to that one's last copy.
            elif (twin := self.twins.get(source, source)) in latest:
                mapping[source] = latest[twin]
        copies: Nodes = {}
        for node in layer:
            with self.graph.inserting_after(at):
                at = self.graph.node_copy(node, lambda n: copies.get(n) or mapping.get(n, n))
            at.meta = self._meta(node, index)
            copies[node] = at
        return copies

    def _input(self, node: fx.Node, index: int) -> fx.Node:
        """The parameter or state of layer `index` that stands where its template has `node`."""
        name = self._own_name(str(node.target), node.op, template_of(index, self.have, self.period), index)
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
        old = template_of(index, self.have, self.period)
        meta: dict[str, Any] = {**node.meta, LAYER: index}
        for key in ("module", PARAMETER):
            if key in meta:
                meta[key] = self._moved_path(meta[key], old, index)
        if stack := meta.get("nn_module_stack"):
            moved = {k: (self._moved_path(path, old, index), kind) for k, (path, kind) in stack.items()}
            meta["nn_module_stack"] = moved
        return meta

    def _register(self, name: str, value: object, node: fx.Node) -> None:
        # On the meta device a value comes from the checkpoint by its name, so a copy gets its own. A value in memory is
        # that of the captured layer, and another layer's is not known.
        if not isinstance(value, Tensor) or not value.is_meta:
            what = f"{node.target} has a value of its own in its layer, which may be another in other layers"
            raise error_at(node, what, HINT)
        owner: torch.nn.Module = self.module
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        owner.register_buffer(leaf, value)

    def _error(self, node: fx.Node, found: str, here: str) -> CompileError:
        layer = layer_of(node) or 0
        pair = f"layers {layer - self.period} and {layer}"
        what = f"{pair} differ, so that neither stands for the others: {found} | {here}"
        return error_at(node, what, HINT)


def template_of(index: int, have: int, period: int) -> int:
    """Return the captured layer that layer `index` is a copy of: of the last `period` ones, that of its kind."""
    return have - period + (index - have) % period


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


@dataclass(frozen=True)
class RepeatLayers(Pass):
    """Repeat the last layers in both graphs.

    1. Matches the nodes of the last two blocks of `period` layers, by their metadata. Both blocks must be equal but
       for names: that proves that the last one may stand for the ones after it.
    2. Copies the last block until there are `count` layers. A copy reads what its predecessor makes.
    3. Parameters and state of a copy are named after its own number.
    Which layers of the model are alike is the front end's knowledge (`Skeleton.captured_layers`).

    Options:
        path: module path of the list of layers.
        count: layers of the whole decoder.
        period: layers after which their kinds repeat: 2 where local and global attention alternate.
    """

    name = "repeat-layers"
    reason = "Layers of a checkpoint are captured once; this one is a copy of the captured layer."
    path: str = ""
    count: int = 0
    period: int = 1

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError when the last two blocks differ, or when fewer than two are there."""
        have = len(role_nodes(program.graph_module))
        if have == self.count:
            return False
        self._check(program, have)
        for module in program.graphs():
            LayerCopier(module, self.path, have, self.period).run(self.count)
        for layer in range(have, self.count):
            self._add_state(program, template_of(layer, have, self.period), layer)
        program.config = replace(program.config, num_layers=self.count)
        return True

    def _check(self, program: DecoderProgram, have: int) -> None:
        if program.config.ring is not None:
            what = "repeat-layers does not copy the ring caches of sparse-attention"
            raise CompileError(what, hint="name repeat-layers before sparse-attention in the pipeline")
        if self.period < 1 or have < 2 * self.period or have > self.count or (self.count - have) % self.period:
            blocks = "" if self.period == 1 else f" in blocks of {self.period}"
            raise CompileError(f"repeat-layers cannot make {self.count} layers out of {have}{blocks}", hint=HINT)

    def _add_state(self, program: DecoderProgram, template: int, layer: int) -> None:
        """Give a copy its state and the recipes of its parameters."""
        own = [spec for spec in program.state if spec.layer == template]
        # Layer by layer, as `LayerCopier.run` returns the state of its copies.
        added = [replace(spec, name=state_name(spec.name, template, layer), layer=layer) for spec in own]
        program.state += added
        program.outputs += [s.name for s in added]
        if program.prefill is not None:
            program.prefill_outputs += [s.name for s in added]
        # Recipes made the captured layer's weights, where a pass
        # transposed or split them. A copy gets the same recipes.
        if program.lazy is not None:
            program.lazy.repeat(f"{self.path}.{template}", f"{self.path}.{layer}")
