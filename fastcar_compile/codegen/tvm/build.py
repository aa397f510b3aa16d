"""fx graph -> one Relax module -> VM executable. Parameters and state are arguments, paired by name."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tvm
from torch import Tensor, fx
from torch.export import ExportedProgram
from tvm import relax
from tvm.ir import StringImm
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter
from tvm.support import cc
from tvm.tirx import IntImm

from fastcar_compile.codegen.tvm.converters import CONVERTERS, Converter
from fastcar_compile.codegen.tvm.flatten import flatten
from fastcar_compile.codegen.tvm.isa import InstructionSet, host_instruction_set
from fastcar_compile.codegen.tvm.kernels.registry import specialise
from fastcar_compile.codegen.tvm.segment import Segment, segment
from fastcar_compile.codegen.tvm.share_rows import share_rows
from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.program import LayerSite, where
from fastcar_compile.ir.rewrite import output_nodes

ENTRY = "run"
"""Name of the function in the library."""

CHECK = "check"
"""Name of the function that takes the same arguments and only checks their shapes and types."""


@dataclass(frozen=True)
class LoweredModule:
    """A compiled graph.

    Attributes:
        executable: TVM VM executable with the function `run`.
        inputs: names of the first arguments, in order: the graph's placeholders, state among them.
        params: names of the arguments after them.
        outputs: result names in order; state results are the argument tensors, updated in place.
        distinct_layers: how many layer functions were compiled.
        ir_module: the Relax module before TVM's CPU pipeline, its kernels those of the first instruction set.
    """

    executable: Any
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    outputs: tuple[str, ...]
    distinct_layers: int
    ir_module: Any

    def arguments(self) -> dict[str, Any]:
        """What the runtime needs to call the library, as JSON."""
        return {"inputs": list(self.inputs), "params": list(self.params), "outputs": list(self.outputs)}

    def export(self, path: Path, compiler: str | None = None) -> None:
        """Write the shared library, linked by the C++ compiler of this machine or by `compiler`."""
        link = None if compiler is None else cc.cross_compiler(compiler)
        self.executable.export_library(str(path), fcompile=link)

    def export_objects(self, path: Path) -> None:
        """Write the object files that the shared library is linked from, as a .tar; same module, same bytes."""
        self.executable.export_library(str(path), fcompile=_pack_objects)

    def retarget(self, isa: InstructionSet) -> LoweredModule:
        """The same module compiled for another CPU, with the kernels for it."""
        return replace(self, executable=_compile(self.ir_module, isa))


def lower(
    module: fx.GraphModule,
    outputs: Sequence[str],
    sites: Sequence[LayerSite],
    state: Sequence[str],
    isa: InstructionSet | None = None,
) -> LoweredModule:
    """Lower a decode step or a prefill chunk to a CPU.

    Args:
        module: fx graph. outputs: names of its results. sites: where to cut it into layers. state: names of its state.
        isa: instruction set; default: the best one of this machine.

    Raises:
        CompileError: operators that TVM cannot import, all of them.
    """
    _check_operators(module)
    isa = isa or host_instruction_set()
    segments = segment(module, sites, state)
    builder = relax.BlockBuilder()
    functions: dict[str, Any] = {}
    for part in segments:
        if part.key not in functions:
            functions[part.key] = _add_segment(builder, part, f"segment_{len(functions)}", isa)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    params = _params(segments)
    _add_entry(builder, module, segments, functions, [*inputs, *params.values()])
    ir_module = _shared(builder.finalize(), isa)
    executable = _compile(ir_module, isa)
    names = tuple(str(n.target) for n in inputs)
    exits = {s.exit for s in sites}
    layers = len({part.key for part in segments if exits & {n.name for n in part.outputs}})
    return LoweredModule(executable, names, tuple(params), tuple(outputs), layers, ir_module)


def _shared(module: tvm.IRModule, isa: InstructionSet) -> tvm.IRModule:
    """Equal calls once, and linears of one input in one."""
    unused = relax.transform.DeadCodeElimination([ENTRY])  # what a kernel of several operators stands for
    return tvm.transform.Sequential([relax.transform.EliminateCommonSubexpr(), share_rows(isa), unused])(module)


def _check_operators(module: fx.GraphModule) -> None:
    """Raises CompileError with every operator that has no lowering, and where it comes from."""
    known = ExportedProgramImporter().convert_map.keys() | CONVERTERS.keys()
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function"]
    unknown = [n for n in nodes if n.target.__name__ not in known]
    if unknown:
        problems = [CompileError(f"operator {n.target} has no TVM lowering", where=where(n)) for n in unknown]
        raise CompileError.collect(problems)


def _pack_objects(path: str, objects: Sequence[str], **_options: Any) -> None:
    """TVM's own .tar has times and owners in it."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(objects):
            data = Path(name).read_bytes()
            member = tarfile.TarInfo(Path(name).name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _compile(ir_module: Any, isa: InstructionSet) -> Any:
    target = host_target(isa)
    return tvm.compile(specialise(ir_module, isa), target=target, relax_pipeline=_pipeline(target))


def _pipeline(target: tvm.target.Target) -> tvm.transform.Pass:
    """TVM's CPU pipeline on dataflow blocks, which the importer does not make in a function with an `If`."""
    unused = relax.transform.DeadCodeElimination([ENTRY])
    prepare = [relax.transform.ConvertToDataflow(), unused]
    default = relax.backend.cpu_generic.get_default_pipeline(target)
    return tvm.transform.Sequential([*prepare, default, flatten(ENTRY, CHECK)])


def _params(segments: Sequence[Segment]) -> dict[str, fx.Node]:
    """Parameters by attribute path; several get_attr nodes may read one."""
    found: dict[str, fx.Node] = {}
    for part in segments:
        for node in part.inputs:
            if node.op == "get_attr":
                found.setdefault(str(node.target), node)
    return found


def _add_segment(builder: Any, part: Segment, name: str, isa: InstructionSet) -> Any:
    """Import one segment and add it, its kernels and its branches to the module."""
    literals = [relax.Var(f"literal_{i}", relax.AnyType()) for i in range(len(part.literals))]
    imported = _import_segment(part, literals, isa)
    mapping: dict[str, Any] = {}
    for variable, function in imported.functions_items():
        if not isinstance(function, relax.Function):
            mapping[variable.name_hint] = builder.add_func(function, variable.name_hint)
    branches = [v.name_hint for v, f in imported.functions_items() if isinstance(f, relax.Function)]
    branches.remove("main")
    for branch in branches:
        mapping[branch] = _add_function(builder, imported[branch], f"{name}_{branch}", mapping, literals)
    return _add_function(builder, imported["main"], name, mapping, literals)


def _add_function(builder: Any, function: Any, name: str, mapping: dict[str, Any], literals: list[relax.Var]) -> Any:
    """Every function of a segment takes its literals after its own arguments."""
    renamed = _Renamer(mapping, literals).visit_expr(function)
    whole = relax.Function([*renamed.params, *literals], renamed.body, renamed.ret_ty, renamed.is_pure, renamed.attrs)
    named = relax.utils.copy_with_new_vars(whole).with_attr("global_symbol", name)
    return builder.add_func(named, name)


@mutator
class _Renamer(PyExprMutator):
    """Points calls at the functions' names in the merged module, and hands the literals to those of branches."""

    def __init__(self, mapping: dict[str, Any], literals: list[relax.Var]) -> None:
        super().__init__()
        self._mapping, self._literals = mapping, literals

    def visit_call_(self, call: Any) -> Any:
        if isinstance(call.op, tvm.ir.GlobalVar):
            call = relax.Call(call.op, [*call.args, *self._literals], call.attrs, call.ty_args, call.span)
        return super().visit_call_(call)

    def visit_global_var_(self, op: Any) -> Any:
        return self._mapping.get(op.name_hint, op)


def _import_segment(part: Segment, literals: list[relax.Var], isa: InstructionSet) -> Any:
    examples = tuple(_example(n) for n in part.inputs)
    exported = torch.export.export(part.module, examples, strict=False)
    try:
        return _import(exported, literals, isa)
    except (AssertionError, NotImplementedError, ValueError) as error:
        raise CompileError(f"TVM cannot import this graph: {error}", where=where(part.outputs[-1])) from error


def _import(exported: ExportedProgram, literals: list[relax.Var], isa: InstructionSet) -> Any:
    """TVM calls a custom converter with the importer in the main graph, but without it in branches of a cond."""
    importer = ExportedProgramImporter()
    importer.literals = literals  # type: ignore[attr-defined]
    importer.isa = isa  # type: ignore[attr-defined]
    importer.own_converters = dict(importer.convert_map)  # type: ignore[attr-defined]

    def bound(converter: Converter) -> Converter:
        return lambda node, _importer=None: converter(node, importer)

    table = {name: bound(converter) for name, converter in CONVERTERS.items()}
    return importer.from_exported_program(exported, False, False, False, table)


def _example(node: fx.Node) -> Tensor:
    val = node.meta["val"]
    return torch.zeros(tuple(val.shape), dtype=val.dtype)


def _add_entry(
    builder: Any,
    module: fx.GraphModule,
    segments: Sequence[Segment],
    functions: dict[str, Any],
    arguments: list[fx.Node],
) -> None:
    """The entry calls prologue, layers and epilogue, handing on values by node."""
    values: dict[Any, Any] = {}
    parameters = []
    for i, node in enumerate(arguments):
        val = node.meta["val"]
        kind = relax.TensorType(tuple(val.shape), str(val.dtype).removeprefix("torch."))
        parameters.append(relax.Var(f"argument_{i}", kind))
        values[_identity(node)] = parameters[-1]
    with builder.function(ENTRY, parameters):
        for part in segments:
            literals = [IntImm("int64", v) if isinstance(v, int) else StringImm(v) for v in part.literals]
            call = relax.Call(functions[part.key], [*(values[_identity(n)] for n in part.inputs), *literals])
            result = builder.emit(call)
            for i, node in enumerate(part.outputs):
                values[node] = builder.emit(relax.TupleGetItem(result, i))
        builder.emit_func_output(relax.Tuple([values[n] for n in output_nodes(module.graph)]))


def _identity(node: fx.Node) -> Any:
    """Parameters are one value however many nodes read them."""
    return str(node.target) if node.op == "get_attr" else node
