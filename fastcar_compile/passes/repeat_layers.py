"""Layers of a checkpoint are captured once: the last one is copied until the decoder has all of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, LayerSite, get_attribute, module_path_of, where
from fastcar_compile.ir.rewrite import output_nodes, set_outputs

Mapping = dict[fx.Node, fx.Node]
_HINT = "give the loaded model instead of its folder: then every layer is captured"


@dataclass(frozen=True)
class RepeatLayers(Pass):
    """Repeat the last layer in both graphs; parameters and state of the copies are named after their own index.

    That the layer may stand for the ones after it is proved against the layer before it: both subgraphs must be equal
    but for names. Which layers of the model are alike is the front end's knowledge (`Skeleton.captured_layers`).

    Options:
        path: module path of the list of layers. count: layers of the whole decoder.
    """

    name: ClassVar[str] = "repeat-layers"
    path: str = ""
    count: int = 0

    def apply(self, program: DecoderProgram) -> bool:
        """Raises CompileError when the last two layers differ, or when fewer than two are there."""
        have = len(program.sites)
        if have == self.count:
            return False
        if program.config.ring is not None:
            what = "repeat-layers does not copy the ring caches of sparse-attention"
            raise CompileError(what, hint="name repeat-layers before sparse-attention in the pipeline")
        if have < 2 or have > self.count:
            raise CompileError(f"repeat-layers cannot make {self.count} layers out of {have}", hint=_HINT)
        copies = _Repeater(program.graph_module, self.path, have).run(self.count)
        _add_sites(program.sites, self.path, copies)
        added = [
            dataclasses.replace(spec, name=_renamed_state(spec.name, spec.layer, layer), layer=layer)
            for layer in range(have, self.count)
            for spec in program.state
            if spec.layer == have - 1
        ]
        program.state += added
        program.outputs += [s.name for s in added]
        if program.prefill is not None:
            _Repeater(program.prefill, self.path, have).run(self.count)
            program.prefill_outputs += [s.name for s in added]
        for layer in range(have, self.count):
            if program.lazy is not None:
                program.lazy.repeat(f"{self.path}.{have - 1}", f"{self.path}.{layer}")
        program.config = dataclasses.replace(program.config, num_layers=self.count)
        return True


class _Repeater:
    """Copies one layer of one graph."""

    def __init__(self, module: fx.GraphModule, path: str, have: int) -> None:
        self.module, self.graph, self.path, self.last = module, module.graph, path, have - 1
        self.ends = {n.op: n for n in self.graph.nodes}
        """Last node of each kind: inputs of the copies follow the inputs that are there."""

    def run(self, count: int) -> list[Mapping]:
        """Returns, for each layer that was added, original node -> copy."""
        before, layer = self._nodes(self.last - 1), self._nodes(self.last)
        carried = self._match(before, layer)
        outputs = output_nodes(self.graph)
        owned = {n: None for n in layer}
        results = [n for n in outputs if n in owned]
        at, previous, copies = layer[-1], {n: n for n in layer}, []
        for index in range(self.last + 1, count):
            mapping = self._copy(layer, at, index, {n: previous[twin] for n, twin in carried.items()})
            at, previous = mapping[layer[-1]], mapping
            copies.append(mapping)
        copied = {made for mapping in copies for made in mapping.values()}
        for node in layer:
            for user in list(node.users):
                if user not in owned and user.op != "output" and user not in copied:
                    user.replace_input_with(node, copies[-1][node])
        set_outputs(self.graph, [*outputs, *(c[n] for c in copies for n in results)])
        return copies

    def _nodes(self, layer: int) -> list[fx.Node]:
        """The operators of a layer, in order."""
        own = f"{self.path}.{layer}"
        nodes = [n for n in self.graph.nodes if n.op == "call_function" and _below(module_path_of(n), own)]
        if not nodes:
            raise CompileError(f"the graph has no operator of layer {layer} ({own})", hint=_HINT)
        return nodes

    def _match(self, before: list[fx.Node], layer: list[fx.Node]) -> Mapping:
        """Checks that both layers are equal; returns what `layer` reads of `before` -> the same of `layer` itself."""
        twins = dict(zip(before, layer, strict=False))
        carried: Mapping = {}
        inside = set(layer)
        if len(before) != len(layer):
            raise self._error(layer[0], f"{len(before)} operators", f"{len(layer)}")
        for first, second in zip(before, layer, strict=True):
            same = (
                first.target == second.target and _literals(first) == _literals(second) and _val(first) == _val(second)
            )
            ours, theirs = second.all_input_nodes, first.all_input_nodes
            if not same or len(ours) != len(theirs):
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
        if _val(before) != _val(node) or before.op != node.op or node.op == "call_function":
            return False
        return self._own_name(node, self.last - 1) == str(before.target)

    def _own_name(self, node: fx.Node, layer: int) -> str:
        """What the last layer's parameter or state is called in another layer; its own name where it is shared."""
        name = str(node.target)
        if node.op == "placeholder":
            return _renamed_state(name, self.last, layer)
        own = f"{self.path}.{self.last}."
        return f"{self.path}.{layer}.{name.removeprefix(own)}" if name.startswith(own) else name

    def _copy(self, layer: list[fx.Node], at: fx.Node, index: int, carried: Mapping) -> Mapping:
        mapping = dict(carried)
        for node in layer:
            for source in node.all_input_nodes:
                if source not in mapping and source.op in ("get_attr", "placeholder"):
                    mapping[source] = self._input(source, index)
        copies: Mapping = {}
        for node in layer:
            with self.graph.inserting_after(at):
                at = self.graph.node_copy(node, lambda n: copies.get(n) or mapping.get(n, n))
            at.meta = dict(node.meta) | _moved(node, f"{self.path}.{self.last}", f"{self.path}.{index}")
            copies[node] = at
        return copies

    def _input(self, node: fx.Node, index: int) -> fx.Node:
        """The parameter or state of layer `index` that stands where the last layer has `node`."""
        name = self._own_name(node, index)
        if name == node.target:
            return node
        if node.op == "get_attr":
            self._register(name, get_attribute(self.module, str(node.target)), node)
        with self.graph.inserting_after(self.ends[node.op]):
            made = self.graph.placeholder(name) if node.op == "placeholder" else self.graph.get_attr(name)
        self.ends[node.op] = made
        made.meta = dict(node.meta) | _moved(node, f"{self.path}.{self.last}", f"{self.path}.{index}")
        return made

    def _register(self, name: str, value: object, node: fx.Node) -> None:
        if not isinstance(value, Tensor) or not value.is_meta:
            what = f"{node.target} has a value of its own in layer {self.last}, which may be another in other layers"
            raise CompileError(what, where=where(node), hint=_HINT)
        owner: torch.nn.Module = self.module
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_buffer(leaf, value)

    def _error(self, node: fx.Node, found: str, here: str) -> CompileError:
        what = f"layers {self.last - 1} and {self.last} differ, so that neither stands for the others: {found} | {here}"
        return CompileError(what, where=where(node), hint=_HINT)


def _below(path: str, own: str) -> bool:
    return path == own or path.startswith(f"{own}.")


def _val(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else (type(value),)


def _literals(node: fx.Node) -> str:
    """The arguments with every node replaced by one mark."""
    return str(fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: "node"))


def _moved(node: fx.Node, old: str, new: str) -> dict[str, Any]:
    """The module stack with one layer's path replaced by another's."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return {}
    renamed = {k: (new + path[len(old) :] if _below(path, old) else path, kind) for k, (path, kind) in stack.items()}
    return {"nn_module_stack": renamed}


def _renamed_state(name: str, old: int, new: int) -> str:
    return f"{name.removesuffix(str(old))}{new}" if name.endswith(f"_{old}") else name


def _add_sites(sites: list[LayerSite], path: str, copies: Sequence[Mapping]) -> None:
    """A site for each copy; a layer is entered where the one before it is left."""
    original, old = sites[-1], len(sites) - 1
    follows = original.entry == sites[-2].exit
    fields = ("attention", "query", "key_cache", "value_cache", "residual", "mlp_input", "mlp_output", "region_output")
    for layer, copy in enumerate(copies, len(sites)):
        names = {node.name: made.name for node, made in copy.items()}
        moved = {f: names.get(getattr(original, f), getattr(original, f)) for f in (*fields, "exit")}
        own, other = f"{path}.{old}.", f"{path}.{layer}."
        site = dataclasses.replace(
            original,
            layer=layer,
            module_path=original.module_path.replace(own, other, 1),
            linears=tuple(names[n] for n in original.linears),
            weights=tuple(w.replace(own, other, 1) for w in original.weights),
            biases=tuple(None if b is None else b.replace(own, other, 1) for b in original.biases),
            entry=sites[-1].exit if follows else original.entry,
            **moved,
        )
        sites.append(site)
