"""A decode step as a list of dispatches: the flat entry, whose buffers and kernels are known, written as JSON."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import tvm
from torch import fx
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as generic
from tvm.relax.expr_functor import PyExprMutator, mutator

from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.codegen.tvm import passes
from fastcar_compile.codegen.tvm.flatten import flatten
from fastcar_compile.codegen.tvm.gpu.converters import GpuImporter
from fastcar_compile.codegen.tvm.gpu.packed import STORED, narrow
from fastcar_compile.codegen.tvm.gpu.shaders import Shaders, scheduled, shaders_of
from fastcar_compile.codegen.tvm.isa import PORTABLE
from fastcar_compile.codegen.tvm.pipeline import check_of, fuse
from fastcar_compile.codegen.tvm.relax_api import (
    add_entry,
    bindings_of,
    dtype_of,
    module_pass,
    operator_of,
    packed_name,
    parameters,
    shape_of,
    with_functions,
)
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.errors import InternalError

VERSION = 1
"""Version of the file."""

ENTRY = "decode"


def imported(graph: HostGraph) -> tvm.IRModule:
    """Return the Relax module of a graph whose module is the caller's to change: it gets a GPU's types."""
    builder = relax.BlockBuilder()
    importer = GpuImporter(builder, PORTABLE)
    functions: dict[str, tvm.ir.GlobalVar] = {}
    for part in graph.segments:
        if part.key not in functions:
            fused = narrow(fuse(part.copy()))
            functions[part.key] = importer.add_function(fused, f"segment_{len(functions)}", len(part.literals))
    segments = graph.segments  # of the types that the program has
    narrow(graph.module)
    add_entry(builder, ENTRY, graph.module, segments, functions)
    return builder.finalize()


def flat(module: tvm.IRModule) -> tvm.IRModule:
    """Return an imported module as kernels with threads and one flat entry."""
    target = host_target()
    steps = [
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.ConvertToDataflow(),
        relax.transform.DeadCodeElimination([ENTRY]),
        *generic.legalize_passes(target),
        module_pass("views", _views),
        module_pass("schedule-threads", scheduled),
        *generic.dataflow_lower_passes(target),
        *generic.finalize_passes(target),
        flatten({ENTRY: check_of(ENTRY)}),
        passes.no_alias(),
    ]
    with target, tvm.transform.PassContext():
        return tvm.transform.Sequential(steps)(module)


def _views(module: tvm.IRModule) -> tvm.IRModule:
    """Return the module with views where kernels only give a value another shape, at the edges of branches too."""
    changer: Any = _Views(module)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function):
            changer.builder_.update_func(variable, changer.visit_expr(function))
    return changer.builder_.get()


@mutator
class _Views(PyExprMutator):
    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Return the call, or a view of its one argument."""
        made: Any = super().visit_call_(op)
        is_view = made.op == _CALL_TIR and _RESHAPE.fullmatch(made.args[0].name_hint)
        return relax.op.reshape(made.args[1].fields[0], shape_of(op)) if is_view else made


_CALL_TIR = tvm.ir.Op.get("relax.call_tir")
_RESHAPE = re.compile(r"(reshape|expand_dims|squeeze)\d*")
"""Names that TVM gives such kernels, alone and not fused with others."""


def program_of(graph: HostGraph) -> dict[str, Any]:
    """Return the program of a decode step as JSON: buffers, shaders, and dispatches in order.

    - `buffers`: each has `words` of 4 bytes; one that the host fills or reads has a `name`, and `dtype` and `shape` as
      the decoder has them. A `constant` has its bytes as base64.
    - `shaders`: WGSL with the entry `main`; a binding is a place in a dispatch's `buffers`.
    - `dispatches`: `shader`, `buffers`, `groups`; with `when` [buffer, value] the dispatch has an effect only where the
      buffer's first word is that, and `counts` [buffer, word] is where a shader before it writes the workgroups to run.
    - `outputs`: name of a result -> buffer.
    """
    segments = graph.segments
    inputs = graph.module.graph.find_nodes(op="placeholder")
    named = {str(n.target): n for n in inputs} | parameters(segments)
    module = flat(imported(graph))
    functions: dict[Any, Any] = dict(module.functions_items())
    kernels = {v: f for v, f in functions.items() if not isinstance(f, relax.Function)}
    writer = _Writer(shaders_of(with_functions(module, kernels)))
    return writer.program(functions[module.get_global_var(ENTRY)], named, graph.outputs)


@dataclass
class _Writer:
    """Writes the statements of an entry as dispatches.

    Attributes:
        _buffers: of the program. _of: variable -> its buffer's number.
    """

    shaders: Mapping[str, Shaders]
    _buffers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _codes: dict[str, int] = field(default_factory=dict[str, int])
    _dispatches: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _of: dict[Any, int] = field(default_factory=dict[Any, int])
    _constants: dict[str, int] = field(default_factory=dict[str, int])

    def program(self, entry: relax.Function, named: Mapping[str, fx.Node], outputs: Sequence[str]) -> dict[str, Any]:
        for variable, (name, node) in zip(entry.params, named.items(), strict=True):
            stored = node.meta[STORED]
            facts = {"name": name, "dtype": dtype_of(stored), "shape": [int(d) for d in stored.shape]}
            self._of[variable] = self._buffer(_words(variable), **facts)
        body = entry.body
        assert isinstance(body, relax.SeqExpr)
        self._statements(body)
        results = body.body.fields if isinstance(body.body, relax.Tuple) else [body.body]
        places = {name: self._place(value) for name, value in zip(outputs, results, strict=True)}
        for name, value in zip(outputs, results, strict=True):
            facts = {"dtype": str(cast(Any, value).ty.dtype), "shape": list(shape_of(value))}
            self._buffers[places[name]] = {**facts, **self._buffers[places[name]]}
        return {
            "version": VERSION,
            "buffers": self._buffers,
            "shaders": list(self._codes),
            "dispatches": self._dispatches,
            "outputs": places,
        }

    def _buffer(self, words: int, **facts: Any) -> int:
        self._buffers.append({"words": words, **facts})
        return len(self._buffers) - 1

    def _statements(self, body: relax.Expr) -> None:
        for variable, value in bindings_of(body):
            if isinstance(value, relax.If):
                self._branches(variable, value)
            elif isinstance(value, relax.Var | tvm.ir.GenericConst) or packed_name(value) == "vm.builtin.reshape":
                self._of[variable] = self._place(value.args[0] if isinstance(value, relax.Call) else value)
            elif isinstance(target := operator_of(value), tvm.ir.GlobalVar):
                self._kernel(target.name_hint, [self._place(a) for a in cast(relax.Call, value).args])
            else:
                self._allocation(variable, value)

    def _allocation(self, variable: relax.Var, value: Any) -> None:
        match str(getattr(operator_of(value), "name", "")):
            case "relax.vm.alloc_storage":
                self._of[variable] = self._buffer(0)
            case "relax.vm.alloc_tensor":
                self._of[variable] = place = self._of[value.args[0]]
                self._buffers[place]["words"] = max(self._buffers[place]["words"], _words(variable))
            case name:
                raise InternalError(f"a flat entry has {name or type(value).__name__}, which has no form on a GPU")

    def _kernel(self, name: str, arguments: Sequence[int]) -> None:
        shaders = self.shaders[name]
        temporaries = [self._buffer(words) for words in shaders.temporaries]
        for launch in shaders.launches:
            buffers = [arguments[b] if b >= 0 else temporaries[-1 - b] for b in launch.buffers]
            self._dispatch(launch.code, buffers, launch.groups)

    def _dispatch(self, code: str, buffers: Sequence[int], groups: Sequence[int]) -> None:
        shader = self._codes.setdefault(code, len(self._codes))
        self._dispatches.append({"shader": shader, "buffers": list(buffers), "groups": list(groups)})

    def _branches(self, variable: relax.Var, value: relax.If) -> None:
        """Write both branches: a shader before them gives the dispatches of one of them no workgroups."""
        condition, first = self._place(value.cond), len(self._dispatches)
        ends = dict[int, int]()
        result: int | None = None
        # The branch that computes comes first: its result is the place of both.
        for is_true, branch in ((0, value.false_branch), (1, value.true_branch)):
            assert isinstance(branch, relax.SeqExpr)
            begin = len(self._dispatches)
            self._statements(branch)
            made = self._place(branch.body)
            if result is None:
                result = made
            elif made != result:
                words = _words(variable)
                self._dispatch(_COPY, [made, result], [-(-words // 64), 1, 1])
            for dispatch in self._dispatches[begin:]:
                dispatch["when"] = [condition, is_true]
            ends[is_true] = len(self._dispatches)
        assert result is not None
        self._of[variable] = result
        inside = self._dispatches[first:]
        del self._dispatches[first:]
        counts = self._buffer(3 * len(inside), indirect=True)
        self._dispatch(_counts(inside), [condition, counts], [1, 1, 1])
        for i, dispatch in enumerate(inside):
            dispatch["counts"] = [counts, 3 * i]
        self._dispatches += inside

    def _place(self, value: relax.Expr) -> int:
        if isinstance(value, relax.Var):
            return self._of[value]
        if isinstance(value, tvm.ir.GenericConst):
            array = cast(Any, value).value.numpy()
            if array.dtype.itemsize != 4:
                array = array.astype("int32")
            key = base64.b64encode(array.tobytes()).decode()
            if key not in self._constants:
                self._constants[key] = self._buffer(array.size, constant=key)
            return self._constants[key]
        raise InternalError(f"a kernel of a flat entry is given a {type(value).__name__}, which is no buffer")


_COPY = """@group(0) @binding(0) var<storage, read> from_ptr : array<u32>;
@group(0) @binding(1) var<storage, read_write> to_ptr : array<u32>;
@compute @workgroup_size(64, 1, 1)
fn main(@builtin(global_invocation_id) at : vec3<u32>) {
  if (at.x < arrayLength(&to_ptr)) { to_ptr[at.x] = from_ptr[at.x]; }
}
"""
"""Copies the result of a branch to the place of the other one's."""


def _counts(dispatches: Sequence[Mapping[str, Any]]) -> str:
    """Return the shader that writes the workgroups of dispatches: 0 where the condition is not what they need."""
    lines = [
        f"  let skip_{i} = counted == {'false' if d['when'][1] else 'true'};\n"
        + "".join(f"  counts[{3 * i + a}] = select({g}u, 0u, skip_{i});\n" for a, g in enumerate(d["groups"]))
        for i, d in enumerate(dispatches)
    ]
    return f"""@group(0) @binding(0) var<storage, read> condition : array<u32>;
@group(0) @binding(1) var<storage, read_write> counts : array<u32>;
@compute @workgroup_size(1, 1, 1)
fn main() {{
  let counted = condition[0] != 0u;
{"".join(lines)}}}
"""


def _words(value: relax.Expr) -> int:
    return prod(shape_of(value))
