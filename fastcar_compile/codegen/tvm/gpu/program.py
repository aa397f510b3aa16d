"""A decode step as a list of dispatches: the flat entry, whose buffers and kernels are known, written as JSON."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any, cast

import numpy as np
import tvm
from numpy.typing import NDArray
from torch import fx
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as generic
from tvm.relax.expr_functor import PyExprMutator, mutator

from fastcar_compile.codegen.segment import HostGraph
from fastcar_compile.codegen.tvm import passes
from fastcar_compile.codegen.tvm.flatten import flatten
from fastcar_compile.codegen.tvm.gpu.converters import GpuImporter
from fastcar_compile.codegen.tvm.gpu.merge import Dispatch, Inside, ShaderStage, StageWriter, arranged, pooled, staged
from fastcar_compile.codegen.tvm.gpu.shaders import (
    STORED,
    THREADS,
    Binding,
    Shader,
    ShaderKernel,
    narrow,
    scheduled,
    shaders_of,
)
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

VERSION = 2
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
        flatten({ENTRY: check_of(ENTRY)}, share=False),  # the arena is shared by stages
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
      the decoder has them. A `constant` has its bytes as base64. One of several weights has `parts`, which are such
      buffers with the first `word` of each.
    - `shaders`: WGSL with the entry `main`; a binding is a place in a dispatch's `buffers`, the last of which may be a
      uniform one.
    - `dispatches`: `shader`, `buffers`, `groups`; with `when` [buffer, word, value] the dispatch has an effect only
      where that word is that, and `counts` [buffer, word] is where one before it writes the workgroups to run.
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
        _buffers: all, by number. _of: variable -> its buffer's number. _counts: condition -> where its workgroups are.
    """

    kernels: Mapping[str, ShaderKernel]
    _buffers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _dispatches: list[Dispatch] = field(default_factory=list[Dispatch])
    _of: dict[Any, int] = field(default_factory=dict[Any, int])
    _constants: dict[str, int] = field(default_factory=dict[str, int])
    _weights: list[int] = field(default_factory=list[int])
    _counts: dict[int, int] = field(default_factory=dict[int, int])

    def program(self, entry: relax.Function, named: Mapping[str, fx.Node], outputs: Sequence[str]) -> dict[str, Any]:
        for variable, (name, node) in zip(entry.params, named.items(), strict=True):
            stored = node.meta[STORED]
            facts = {"name": name, "dtype": dtype_of(stored), "shape": [int(d) for d in stored.shape]}
            self._of[variable] = self._buffer(_words(variable), **facts)
            self._weights += [self._of[variable]] * (node.op == "get_attr")
        body = entry.body
        assert isinstance(body, relax.SeqExpr)
        self._statements(body)
        results = body.body.fields if isinstance(body.body, relax.Tuple) else [body.body]
        places = {name: self._place(value) for name, value in zip(outputs, results, strict=True)}
        for name, value in zip(outputs, results, strict=True):
            facts = {"dtype": str(cast(Any, value).ty.dtype), "shape": list(shape_of(value))}
            self._buffers[places[name]] = {**facts, **self._buffers[places[name]]}
        return self._merged(places)

    def _merged(self, outputs: Mapping[str, int]) -> dict[str, Any]:
        """Return the program of the dispatches."""
        words = {i: facts["words"] for i, facts in enumerate(self._buffers) if facts.keys() == {"words"}}
        stages = staged(self._dispatches, words)
        places, size = arranged(stages, words)
        arena, codes = self._buffer(size), dict[str, int]()
        inside = {b: (arena, word) for b, word in places.items()}
        for weights in pooled(stages, {b: self._buffers[b]["words"] for b in self._weights}):
            begins = [*accumulate((self._buffers[b]["words"] for b in weights), initial=0)]
            parts = [{**self._buffers[b], "word": word} for b, word in zip(weights, begins, strict=False)]
            whole = self._buffer(begins[-1], parts=parts)
            inside |= {b: (whole, part["word"]) for b, part in zip(weights, parts, strict=True)}
        runs = {condition: [s for s in stages if s.when and s.when[0] == condition] for condition in self._counts}
        dispatches = [self._dispatch(stage, inside, runs, codes) for stage in stages]
        kept = [i for i in range(len(self._buffers)) if i not in inside]
        numbers = {old: new for new, old in enumerate(kept)}
        for dispatch in dispatches:
            dispatch["buffers"] = [numbers[b] for b in dispatch["buffers"]]
            for name in dispatch.keys() & {"when", "counts"}:
                dispatch[name][0] = numbers[dispatch[name][0]]
        return {
            "version": VERSION,
            "buffers": [self._buffers[i] for i in kept],
            "shaders": list(codes),
            "dispatches": dispatches,
            "outputs": {name: numbers[place] for name, place in outputs.items()},
        }

    def _dispatch(
        self, stage: ShaderStage, inside: Inside, runs: Mapping[int, Sequence[ShaderStage]], codes: dict[str, int]
    ) -> dict[str, Any]:
        """Return a stage's dispatch. runs: condition -> stages that have it."""
        lanes = (tuple(_counted(one, runs) for one in lane) for lane in stage.lanes)
        writer = StageWriter(ShaderStage(tuple(lanes)), inside)
        shader = codes.setdefault(writer.text(), len(codes))
        places = [self._constant(np.array(writer.places, np.int32))] if writer.places else []
        found = {"shader": shader, "buffers": [*writer.buffers, *places], "groups": [*stage.groups]}
        if stage.when is None:
            return found
        condition, wanted = stage.when
        counts = self._counts[condition]
        self._buffers[counts]["words"] = 3 * len(runs[condition])
        return found | {
            "when": [*inside.get(condition, (condition, 0)), int(wanted)],
            "counts": [counts, 3 * runs[condition].index(stage)],
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
                pass
            case "relax.vm.alloc_tensor":
                self._of[variable] = self._buffer(_words(variable))
            case name:
                raise InternalError(f"a flat entry has {name or type(value).__name__}, which has no form on a GPU")

    def _kernel(self, name: str, arguments: Sequence[int]) -> None:
        kernel = self.kernels[name]
        temporaries = [self._buffer(words) for words in kernel.temporaries]
        for launch in kernel.launches:
            buffers = tuple(arguments[b] if b >= 0 else temporaries[-1 - b] for b in launch.buffers)
            self._dispatches.append(Dispatch(launch.shader, buffers))

    def _branches(self, variable: relax.Var, value: relax.If) -> None:
        """Write both branches: a shader before them gives the dispatches of one of them no workgroups."""
        condition = self._place(value.cond)
        if condition not in self._counts:
            self._counts[condition] = self._buffer(0, indirect=True)
            self._dispatches.append(Dispatch(_COUNTER, (condition, self._counts[condition])))
        result: int | None = None
        # The branch that computes comes first: its result is the place of both.
        for is_true, branch in ((False, value.false_branch), (True, value.true_branch)):
            assert isinstance(branch, relax.SeqExpr)
            begin = len(self._dispatches)
            self._statements(branch)
            made = self._place(branch.body)
            if result is None:
                result = made
            elif made != result:
                self._dispatches.append(Dispatch(_copy(_words(variable)), (made, result)))
            inside = self._dispatches[begin:]
            self._dispatches[begin:] = [replace(one, when=(condition, is_true)) for one in inside]
        assert result is not None
        self._of[variable] = result

    def _place(self, value: relax.Expr) -> int:
        if isinstance(value, relax.Var):
            return self._of[value]
        if isinstance(value, tvm.ir.GenericConst):
            array = cast(Any, value).value.numpy()
            return self._constant(array if array.dtype.itemsize == 4 else array.astype("int32"))
        raise InternalError(f"a kernel of a flat entry is given a {type(value).__name__}, which is no buffer")

    def _constant(self, array: NDArray[Any]) -> int:
        key = base64.b64encode(array.tobytes()).decode()
        if key not in self._constants:
            self._constants[key] = self._buffer(array.size, constant=key)
        return self._constants[key]


_PAIR = (Binding("given", "u32"), Binding("made", "u32", writes=True))


def _copy(words: int) -> Shader:
    """Return the shader that copies the result of a branch to the place of the other one's."""
    line = f"let i = i32(blockIdx.x * {THREADS}u + threadIdx.x);\nif (i < {words}) {{ made[i] = given[i]; }}\n"
    return Shader(line, _PAIR, (THREADS, 1, 1), (-(-words // THREADS), 1, 1))


def _counter(stages: Sequence[ShaderStage]) -> Shader:
    """Return the shader that writes the workgroups of stages: 0 where the condition is not what they need."""
    lines = [
        f"made[{3 * i + axis}] = select(0u, {count}u, {'' if stage.when and stage.when[1] else '!'}holds);\n"
        for i, stage in enumerate(stages)
        for axis, count in enumerate(stage.groups)
    ]
    code = f"let holds = given[0] != 0u;\nif (threadIdx.x == 0u) {{\n{''.join(lines)}}}\n"
    return Shader(code, _PAIR, (THREADS, 1, 1), (1, 1, 1))


_COUNTER = _counter(())
"""Stands for the counter of a condition until its stages are known."""


def _counted(one: Dispatch, runs: Mapping[int, Sequence[ShaderStage]]) -> Dispatch:
    return replace(one, shader=_counter(runs[one.buffers[0]])) if one.shader is _COUNTER else one


def _words(value: relax.Expr) -> int:
    return prod(shape_of(value))
