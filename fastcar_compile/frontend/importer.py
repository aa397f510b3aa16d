"""ExportedProgram -> fx.GraphModule with parameters as attributes and the step protocol's inputs under our names."""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import SymInt, Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map

from fastcar_compile.errors import CompileError, count_text
from fastcar_compile.ir.provenance import error_at, is_path
from fastcar_compile.ir.query import graph_module, node_arg, output_nodes
from fastcar_compile.ir.rewrite import Inserter, fake_like, fake_mode_of, fake_value

# Names of modules and tensors: torch.fx writes them into source code, and a graph file has to be readable again.


_HINT = "rename it: letters, digits, blanks and . _ - + : / @ [ ], at most 1,000 in a whole path"


def check_module_names(model: nn.Module) -> None:
    """Raise CompileError unless every module, parameter and buffer has a name that a graph file can hold."""
    named = (model.named_modules(), model.named_parameters(), model.named_buffers())
    check_paths(name for pairs in named for name, _ in pairs if name)


def check_paths(names: Iterable[str]) -> None:
    """Raise CompileError for a name that a graph file cannot hold, with all such names."""
    wrong = [name for name in names if not is_path(name)]
    if wrong:
        # Sorted by length: a module's name comes before those of its parameters.
        first = min(wrong, key=len)
        what = f"{count_text(len(wrong), 'name')} of the model cannot be written"
        raise CompileError(what, where=f"{first!a:.200}", hint=_HINT)


# What an ExportedProgram must be before it can be imported: a module is brought there, an export is as it is.


TOKEN_NAMES = {"input_ids": "tokens", "tokens": "tokens", "inputs_embeds": "inputs_embeds"}
POSITION_NAMES = ("cache_position", "position")
SHAPE_HINT = "export the step for fixed shapes: one token per row [B, 1] (or [B, 1, H]) and cache_position [1]"


def check_exported(exported: ExportedProgram) -> None:
    """Check shapes and precision.

    Raises:
        CompileError: dynamic shapes, more than one token per step, or another precision than float32; all at once.
    """
    problems = [CompileError(t, where="inputs of the exported program", hint=SHAPE_HINT) for t in _shapes(exported)]
    tensors = {**exported.state_dict, **exported.constants}
    check_paths(tensors)
    floats = {n: t.dtype for n, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point()}
    other = {name: dtype for name, dtype in floats.items() if dtype != torch.float32}
    if other:
        dtypes = sorted({str(dtype).removeprefix("torch.") for dtype in other.values()})
        first = next(iter(other))
        what = f"the exported program holds {count_text(len(other), 'tensor')} of {', '.join(dtypes)}, first {first}"
        problems.append(CompileError(what, hint="export module.float(), or give the module itself"))
    CompileError.raise_all(problems)


def _shapes(exported: ExportedProgram) -> list[str]:
    found: list[str] = []
    names = set(exported.graph_signature.user_inputs)
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in names or not isinstance(value, Tensor):
            continue
        shape: tuple[int | SymInt, ...] = tuple(value.shape)
        # One shape error is enough for each input; later checks compare sizes as numbers.
        if any(isinstance(d, SymInt) for d in shape):
            found.append(f"input {node.name} has the dynamic shape [{', '.join(map(str, shape))}]")
        elif node.name in TOKEN_NAMES and (value.dim() < 2 or value.shape[1] != 1):
            found.append(f"input {node.name} has shape {list(value.shape)}, but a decode step takes one token per row")
        elif node.name in POSITION_NAMES and (value.dim() != 1 or (value.numel() != 1 and not found)):
            what = f"input {node.name} has shape {list(value.shape)}, but the rows of a step share one position, [1]"
            found.append(f"{what}: rows with padding are not supported")
    return found


_MADE_BY = "import"
REASONS = {_MADE_BY: "The capture gives the decode step its position as an input."}
_CONTEXT_NAMES = ("context", "context_mask")
WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operators that take a graph, whose body is put in their place."""


def import_exported(exported: ExportedProgram, wrapper: str = "") -> fx.GraphModule:
    """Flat fx graph of an exported step-protocol module.

    Args:
        exported: one step. wrapper: attribute path of the user's model inside the exported module, "" if it is the
            module itself; it is left out of parameter names and module paths.

    Placeholders: `tokens` int64 [B, T] or `inputs_embeds` float32 [B, T, H], then `position` int64 [1], then `context`
    float32 [B, L, C] and `context_mask` bool [B, L] where the step reads them. Parameters, buffers and constants become
    `get_attr` nodes, those without values on the meta device; buffer writes stay in place (the normalize-state pass
    lifts them).

    Raises:
        CompileError: the exported program does not follow the step protocol.
    """
    return _Importer(exported, f"{wrapper}." if wrapper else "").run()


OTHER_FLOATS = (torch.float16, torch.bfloat16, torch.float64)
"""A decode step computes in float32: what a model casts to one of these, or computes in it, becomes float32."""


def _in_float32(argument: Any) -> Any:
    return torch.float32 if isinstance(argument, torch.dtype) and argument in OTHER_FLOATS else argument


def _check_target(node: fx.Node) -> None:
    """Raise CompileError for a call that is no operator of one value to the next."""
    name, owner = (str(getattr(node.target, key, node.target)) for key in ("__name__", "__module__"))
    kind = "grad" if "for_grad" in name else name.removeprefix("_").partition("_")[0]
    # `lazy_load_decompositions` begins a vmap, which the next call names.
    if (owner.startswith("torch._functorch") and kind != "lazy") or isinstance(node.target, HigherOrderOperator):
        what = f"the forward calls torch.func.{kind}" if "functorch" in owner else f"the forward calls {name}"
        raise error_at(node, f"{what}, which takes a function", "write what it computes with tensor operators")
    if node.target is torch.ops.aten.view.dtype:
        raise error_at(node, "the forward reads the bits of a tensor as another type", "cast it with .to(dtype)")


class _Importer:
    def __init__(self, exported: ExportedProgram, prefix: str) -> None:
        self.exported, self.prefix = exported, prefix
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.attributes: dict[str, Tensor] = {}
        self.kinds = {s.arg.name: s for s in exported.graph_signature.input_specs}

    def run(self) -> fx.GraphModule:
        user = [n for n in self.exported.graph.nodes if n.op == "placeholder" and self._is_user(n)]
        # An input that the step ignores is no part of the protocol. A position that it ignores still bounds attention.
        user = [n for n in user if n.users or n.name in POSITION_NAMES]
        self._check_inputs(user)
        tokens = next(n for n in user if n.name in TOKEN_NAMES)
        position = next(n for n in user if n.name in POSITION_NAMES)
        token_node = self.graph.placeholder(TOKEN_NAMES[tokens.name])
        token_node.meta = dict(tokens.meta)
        self.values[tokens] = token_node
        # The session gives the position of the first token as int64 [1], also to a chunk.
        position_node = self.graph.placeholder("position")
        start = torch.zeros(1, dtype=torch.int64)
        position_node.meta["val"] = fake_mode_of(self.exported.graph).from_tensor(start, static_shapes=True)
        for node in (n for n in user if n.name in _CONTEXT_NAMES):
            self.values[node] = self.graph.placeholder(node.name)
            self.values[node].meta = dict(node.meta)
        for node in self.exported.graph.nodes:
            # torch.export lifts parameters, buffers and constants to inputs; here they become attributes again.
            if node.op == "placeholder" and not self._is_user(node) and node.users:
                self.values[node] = self._attribute(node)
        self.values[position] = self._positions(position, position_node)
        self._copy_body(self.exported.graph_module, self.exported.graph.nodes)
        for node in self.graph.nodes:
            if stack := node.meta.get("nn_module_stack"):
                node.meta["nn_module_stack"] = {k: (self._user_path(path), kind) for k, (path, kind) in stack.items()}
        return graph_module(self.attributes, self.graph)

    def _user_path(self, path: str) -> str:
        return "" if f"{path}." == self.prefix else path.removeprefix(self.prefix)

    def _is_user(self, node: fx.Node) -> bool:
        return self.kinds[node.name].kind == InputKind.USER_INPUT

    def _check_inputs(self, user: list[fx.Node]) -> None:
        names = [n.name for n in user]
        tokens = [n for n in names if n in TOKEN_NAMES]
        positions = [n for n in names if n in POSITION_NAMES]
        others = [n for n in names if n not in (*tokens, *positions, *_CONTEXT_NAMES)]
        if len(tokens) != 1 or len(positions) != 1 or others:
            what = f"the step module takes {names}, but the step protocol wants one of {sorted(TOKEN_NAMES)} "
            what += f"and one of {list(POSITION_NAMES)}, and may take {list(_CONTEXT_NAMES)}"
            hint = "export forward(input_ids [B, T] | inputs_embeds [B, T, H], cache_position [T]); "
            hint += "see docs/reference/step_protocol.md"
            raise CompileError(what, where="inputs of the exported program", hint=hint)

    def _attribute(self, node: fx.Node) -> fx.Node:
        spec = self.kinds[node.name]
        target = str(spec.target)
        tensors = {**self.exported.state_dict, **self.exported.constants}
        value = tensors[target]
        if not isinstance(value, Tensor):
            raise CompileError(f"the model reads {target}, a {type(value).__name__}; only tensors can be compiled")
        name = self._user_path(target)
        # A fake parameter stands for one on disk. The meta device marks it for the passes.
        lazy = isinstance(value, FakeTensor)
        value = value.detach().float() if value.dtype in OTHER_FLOATS else value.detach()
        self.attributes[name] = torch.empty(value.shape, dtype=value.dtype, device="meta") if lazy else value
        attribute = self.graph.get_attr(name)
        attribute.meta = node.meta | {"val": fake_like(self.graph, value)}
        return attribute

    def _positions(self, original: fx.Node, position: fx.Node) -> fx.Node:
        steps = int(original.meta["val"].numel())
        if steps == 1:
            return position
        # cache_position [T] of a chunk is computed from its first position, so both graphs have one kind of input.
        emit = Inserter(self.graph, original, _MADE_BY)
        return emit(torch.ops.aten.add.Tensor, emit(torch.ops.aten.arange.default, steps), position)

    def _copy_body(self, owner: torch.nn.Module, nodes: Any) -> Any:
        for node in nodes:
            # The graph of a wrapper is inlined at its call, so the node that reads it goes.
            if node.op == "placeholder" or (node.op == "get_attr" and self._is_submodule(owner, node)):
                continue
            if node.op == "output" and owner is self.exported.graph_module:
                return self._output(node)
            if node.op == "output":
                return map_arg(node.args[0], lambda n: self.values[n])
            self.values[node] = self._copy(owner, node)
        return None

    def _is_submodule(self, owner: torch.nn.Module, node: fx.Node) -> bool:
        return isinstance(getattr(owner, str(node.target), None), fx.GraphModule)

    def _output(self, node: fx.Node) -> None:
        results = [self.values[n] for n in output_nodes(node.graph)]
        kinds = self.exported.graph_signature.output_specs
        # `run_decompositions` turns buffer writes into further
        # outputs. Writes in place are what normalize-state expects.
        user = [r for r, s in zip(results, kinds, strict=True) if s.kind.name == "USER_OUTPUT"]
        if len(user) != 1 or len(results) != 1:
            what = f"the step returns {count_text(len(user), 'tensor')}"
            hint = "return logits [B, T, V] of one head, or hidden states [B, T, H], from which all heads follow"
            if len(results) != len(user):
                what += f" and {count_text(len(results) - len(user), 'mutated buffer')} as outputs"
                hint = "export without run_decompositions, and return logits [B, T, V] or hidden states [B, T, H] alone"
            raise CompileError(what, where="outputs of the step", hint=hint)
        self.graph.output((user[0],))

    def _copy(self, owner: torch.nn.Module, node: fx.Node) -> Any:
        if node.op == "call_function" and str(getattr(node.target, "_name", node.target)) in WRAPPERS:
            return self._inline(owner, node)
        if node.target is operator.getitem:
            # An inlined wrapper yields a Python tuple and no node.
            source, index = self.values[node_arg(node, 0)], node.args[1]
            if isinstance(source, tuple | list) and isinstance(index, int):
                return source[index]
        _check_target(node)
        made = self.graph.node_copy(node, lambda n: self.values[n])
        if node.op == "call_function":  # an assert, which yields nothing, may name a type too
            made.args, made.kwargs = tree_map(_in_float32, (made.args, made.kwargs))
        if any(getattr(value, "dtype", None) in OTHER_FLOATS for value in tree_leaves(node.meta.get("val"))):
            made.meta["val"] = fake_value(self.graph, made)
        return made

    def _inline(self, owner: torch.nn.Module, node: fx.Node) -> Any:
        """Grad-mode and autocast wrappers mean nothing in inference: their body joins the graph."""
        arguments = [a for a in node.args if isinstance(a, fx.Node)]
        body_at = next(i for i, a in enumerate(arguments) if self._is_submodule(owner, a))
        body = getattr(owner, str(arguments[body_at].target))
        for inner, outer in zip(body.graph.find_nodes(op="placeholder"), arguments[body_at + 1 :], strict=True):
            self.values[inner] = self.values[outer]
        return self._copy_body(body, body.graph.nodes)
