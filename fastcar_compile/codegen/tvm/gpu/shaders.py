"""Kernels -> WGSL: dlight's schedules, TVM's lowering up to the split of host and device, the parts of each shader."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import tvm
from torch import Tensor, fx
from tvm import s_tir, tirx
from tvm.s_tir import dlight

from fastcar_compile.codegen.tvm.gpu.kernels import PRELUDE
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.query import with_branches

# Types as WGSL has them: no integer of 64 or 8 bits, and no float of 16 that every adapter has.

STORED = "stored"
"""Key of a node's meta: its type as the program has it, where `narrow` put another."""

PER_WORD = {torch.int8: 4, torch.uint8: 4, torch.float16: 2, torch.bfloat16: 2}
"""Type -> elements of one u32."""


def packed(value: Tensor) -> Tensor:
    """Return what a GPU has of a tensor: int32 of int64, u32 of small types, the last axis in whole words."""
    if value.dtype == torch.int64:
        return value.new_empty(value.shape, dtype=torch.int32, device="meta")
    count = PER_WORD.get(value.dtype)
    if count is None:
        return value
    shape = (*value.shape[:-1], -(-value.shape[-1] // count))
    return torch.empty(shape, dtype=torch.uint32, device="meta")


def narrow(module: fx.GraphModule) -> fx.GraphModule:
    """Give every node of a graph and of its branches the type that a GPU has, and return the graph."""
    for graph in with_branches(module):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if value is None or STORED in node.meta:
                continue
            node.meta[STORED] = value
            node.meta["val"] = _each(packed, value)
            if node.target is torch.ops.aten.arange.default and value.dtype == torch.int64:
                node.kwargs = {**node.kwargs, "dtype": torch.int32}
            node.args, node.kwargs = _each(_int32, node.args), _each(_int32, dict(node.kwargs))
    return module


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _each(function, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_each(function, part) for part in value)
    return function(value)


def _int32(value: Any) -> Any:
    return torch.int32 if value is torch.int64 else value


# Schedules and shaders.

MOST_GROUPS, BINDINGS = 65_535, 8
"""Workgroups along an axis and storage buffers of a shader that every adapter allows."""

THREADS, ROWS = 64, 8
"""Threads of a workgroup, and at most so many outputs of a linear, which then read 32 bytes of a row at once."""

WIDE = ("linear", "groups", "attend")
"""In names of kernels with too much work for one workgroup."""


@cache
def target() -> tvm.target.Target:
    """Return TVM's target: what every WebGPU adapter has."""
    facts = {"kind": "webgpu", "max_num_threads": THREADS, "max_shared_memory_per_block": 16384}
    return tvm.target.Target(facts).with_host("llvm")


@dataclass(frozen=True)
class Binding:
    """A buffer of a shader: its name, the type of its elements, whether the shader writes it."""

    name: str
    kind: str
    writes: bool = False


@dataclass(frozen=True)
class Shader:
    """A part of a kernel.

    Args:
        body: WGSL of a workgroup's thread, of `blockIdx` and `threadIdx`. bindings: buffers.
        shared: arrays of a workgroup: name, type and length. threads: of a workgroup. groups: workgroups.
        wide: whether it has too much work for one of them.
    """

    body: str
    bindings: tuple[Binding, ...]
    threads: tuple[int, int, int]
    groups: tuple[int, int, int]
    shared: tuple[tuple[str, str, int], ...] = ()
    wide: bool = False

    def pooled(self) -> dict[str, tuple[str, str, int]]:
        """Return the arrays of a workgroup by names that other shaders have for theirs of this type and length."""
        found = dict[str, tuple[str, str, int]]()
        for one in self.shared:
            same = sum(other[1:] == one[1:] for other in found.values())
            found[f"shared_{one[1]}_{one[2]}_{same}"] = one
        return found


@dataclass(frozen=True)
class ShaderLaunch:
    """A shader and its buffers: by binding the number of the kernel's argument; of a temporary -1 minus its number."""

    shader: Shader
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class ShaderKernel:
    """A kernel for a GPU. launches: in order. temporaries: their words."""

    launches: tuple[ShaderLaunch, ...]
    temporaries: tuple[int, ...]


class _Lenient(dlight.base.ScheduleRule):
    """One of TVM's rules, which does not apply where it asserts that a kernel reads one element at a time."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    def apply(self, func: Any, target: Any, tunable: bool) -> Any:
        """Return the kernel with threads; None: the rule is not for it."""
        try:
            return self._rule.apply(func, target, tunable)
        except AssertionError:
            return None


class _Rows(dlight.gpu.Reduction):
    """A matrix times a vector: several outputs a workgroup, with few threads each.

    TVM's rule gives every output a workgroup of 64 threads, and a tree of eight barriers adds their parts, of which a
    row of 256 bytes has one each: a step of Crafter took 7 times as long on SwiftShader.
    """

    def _sch_inner_reduction(
        self,
        sch: Any,
        target: Any,
        block: Any,
        unroll_spatial_factor: Any,
        epilogue_info: Any,
        loop_order: Any,
        s_split_index: Any,
    ) -> None:
        outputs, axis, _ = sch.get_loops(block)
        count = int(sch.get(outputs).extent)
        rows = next(r for r in (ROWS, 4, 2, 1) if count % r == 0)
        assert rows > 1
        assert unroll_spatial_factor is None
        sch.split(outputs, factors=[None, rows])
        _, part = sch.split(axis, factors=[None, THREADS // rows])
        partial = sch.rfactor(part, 0)
        group, row, axis, part, _ = sch.get_loops(partial)
        sch.reorder(group, row, part, axis)
        for loop, thread in ((group, "blockIdx.x"), (row, "threadIdx.y"), (part, "threadIdx.x")):
            sch.bind(loop, thread)
        sch.set_scope(partial, 0, "local")
        sch.decompose_reduction(partial, axis)
        sch.reverse_compute_at(block, row, preserve_unit_loops=True)
        _, _, part, *inner = sch.get_loops(block)
        sch.reorder(*inner, part)
        sch.bind(part, "threadIdx.x")
        if epilogue_info is not None:
            sch.reverse_compute_at(epilogue_info.block_rv, row, preserve_unit_loops=True)
            sch.set_scope(block, 0, "local")


def scheduled(module: tvm.IRModule) -> tvm.IRModule:
    """Return the module with threads for every kernel that has no schedule of its own."""
    own = (_Rows(), dlight.gpu.GEMV(), dlight.gpu.GeneralReduction(), dlight.gpu.Reduction(), dlight.gpu.Fallback())
    rules = map(_Lenient, own)
    with target():
        return dlight.ApplyDefaultSchedule(*rules)(module)


def _lowering() -> list[tvm.transform.Pass]:
    """Return the passes of TVM's s_tir pipeline up to the split: behind it, what calls a shader is a list of calls."""
    s, x = s_tir.transform, tirx.transform
    return [
        x.BindTarget(target()),
        *(s.CanonicalizeLoop(), s.LowerCrossThreadReduction(), s.LowerInitBlock()),
        *(s.PlanAndUpdateBufferAllocationLocation(), s.ConvertBlocksToOpaque(), s.LiftThreadBinding()),
        *(s.CompactBufferAllocation(), s.UnifyThreadBinding(), s.LowerMatchBuffer(), s.StmtSimplify()),
        *(s.LowerOpaqueBlock(), x.FlattenBuffer(), x.NarrowDataType(32), s.LoopPartition(), x.VectorizeLoop(True)),
        *(x.StorageRewrite(), s.HoistIfThenElse(), x.UnrollLoop(), s.RenormalizeSplitPattern(), x.StmtSimplify()),
        *(x.RemoveNoOp(), s.RewriteUnsafeSelect(), x.CommonSubexprElim(), x.VerifyMemory(), x.AnnotateEntryFunc()),
        *(s.ThreadSync("shared"), s.LowerThreadAllreduce(), x.SplitHostDevice()),
    ]


def shaders_of(kernels: tvm.IRModule) -> dict[str, ShaderKernel]:
    """Return the shaders of scheduled kernels, by the kernel's name."""
    lowered = tvm.ir.transform.Sequential(_lowering())(kernels)
    device, host = dict[Any, Any](), dict[str, Any]()
    for variable, function in lowered.functions_items():
        if "tirx.kernel_launch_params" in function.attrs:
            device[variable] = function
        else:
            host[variable.name_hint] = function
    finish = (tirx.transform.LowerWarpMemory(), tirx.transform.StmtSimplify(), tirx.transform.LowerIntrin())
    built = tvm.ir.transform.Sequential(finish)(tvm.IRModule(device))
    text = tvm.get_global_func("target.build.webgpu")(built, target()).inspect_source()
    codes = dict(_split(text))
    return {name: _host(function, codes) for name, function in host.items()}


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Yield each shader of TVM's text with its name."""
    for part in text.split("// Function: ")[1:]:
        name, _, code = part.partition("\n")
        if "@compute" in code:
            yield name.strip(), code.split("\n", 1)[1]


def prelude(code: str) -> str:
    """Return the functions of WGSL that code calls, and those that they call."""
    names, more = set[str](), {name for name, _ in _functions() if re.search(rf"\b{name}\(", code)}
    while more:
        names |= more
        more = {n for n, _ in _functions() if any(f"{n}(" in c for m, c in _functions() if m in names)} - names
    return "".join(f"{text}\n" for name, text in _functions() if name in names)


@cache
def _functions() -> tuple[tuple[str, str], ...]:
    parts = re.split(r"\n(?=fn )", PRELUDE.strip())
    return tuple((re.match(r"fn (\w+)", part).group(1), part) for part in parts)  # type: ignore[union-attr]  (each is a function)


def _host(function: Any, codes: dict[str, str]) -> ShaderKernel:
    """Return what the host's side of a kernel calls."""
    places: dict[Any, int] = {param: i for i, param in enumerate(function.params)}
    temporaries, launches = list[int](), list[ShaderLaunch]()
    body: Any = function.body
    for statement in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        if isinstance(statement, tirx.AllocBuffer):
            temporaries.append(prod(int(extent) for extent in statement.buffer.shape))
            places[statement.buffer] = -len(temporaries)
        elif isinstance(statement, tirx.DeclBuffer):
            places[statement.buffer] = places[statement.data.args[0]]
        else:
            launches.append(_launch(statement.value, places, codes))
    return ShaderKernel(tuple(launches), tuple(temporaries))


def _launch(call: Any, places: dict[Any, int], codes: dict[str, str]) -> ShaderLaunch:
    """Return the dispatch of a call of a shader: its name, the data of its buffers, then its extents."""
    names = [str(name) for name in call.attrs.launch_params]
    name, arguments, extents = call.args[0].value, call.args[1 : -len(names)], call.args[-len(names) :]
    sizes = {which: int(extent) for which, extent in zip(names, extents, strict=True)}
    groups = (sizes.get("blockIdx.x", 1), sizes.get("blockIdx.y", 1), sizes.get("blockIdx.z", 1))
    buffers = tuple(places[argument.args[0]] for argument in arguments)
    if groups[2] > 1 or max(groups) > MOST_GROUPS or len(buffers) > BINDINGS:
        what = f"shader {name} has {groups} workgroups and {len(buffers)} buffers"
        limits = f"{MOST_GROUPS} along an axis and {BINDINGS} buffers"
        raise CompileError(f"{what}; WebGPU allows {limits}", where="webgpu", hint="use the target cpu or wasm32")
    return ShaderLaunch(_shader(codes[name], groups, any(part in name for part in WIDE)), buffers)


def _shader(code: str, groups: tuple[int, int, int], wide: bool) -> Shader:
    """Return the parts of a shader of TVM's, as browsers take them."""
    # No grid here is folded into z.
    code = code.replace("blockIdx.z * gridDim.x + blockIdx.x", "blockIdx.x")
    code = re.sub(r"\n *if \(blockIdx\.x > podArgs\.packGridDimX\) \{ return; \}", "", code)
    # A bool is a word.
    for buffer in re.findall(r"(\w+) : array<i8>", code):
        code = re.sub(rf"({buffer}\[[^;]*?\] = )bool\(", r"\1i32(", code)
    code = code.replace("array<i8>", "array<i32>")
    bindings = re.findall(r"var<storage, (\w+)> (\w+) : array<(\w+)>;", code)
    threads = re.findall(r"@workgroup_size\((\d+), (\d+), (\d+)\)", code)[0]
    return Shader(
        code[code.index(") {", code.index("@compute")) + 3 : code.rindex("}")],
        tuple(Binding(name, kind, access == "read_write") for access, name, kind in bindings),
        (int(threads[0]), int(threads[1]), int(threads[2])),
        groups,
        tuple((n, kind, int(size)) for n, kind, size in re.findall(r"<workgroup> (\w+) : array<(\w+), (\d+)>", code)),
        wide,
    )
