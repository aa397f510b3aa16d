"""The registry of kernels that depend on the instruction set.

`dispatch` marks a kernel with its kind and options. `specialise` reads the marks, and replaces every marked kernel of a
module by the kernel of the same kind and options for another instruction set. So a module is imported once and built
for several CPUs.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import tvm
from tvm.s_tir import SBlock, SBlockRealize, renew_defs
from tvm.tirx import Bind, DeclBuffer, For, ForKind, IfThenElse, IntImm, PrimFunc, SeqStmt, Stmt, Var

from fastcar_compile.codegen.tvm.isa import PORTABLE, InstructionSet
from fastcar_compile.codegen.tvm.kernels import cache, draft, tas
from fastcar_compile.codegen.tvm.kernels.attention import chunk, decode, exact, exact_rows, rows
from fastcar_compile.codegen.tvm.kernels.linear import activations, amx, blocks, few_rows, floats, products
from fastcar_compile.codegen.tvm.kernels.linear.tiles import SMALL_BATCH, WeightType
from fastcar_compile.errors import InternalError

Kernel = Callable[..., PrimFunc]
"""`kernel(*options, isa=...)`. Options are numbers, texts and tuples of these. The kernel takes the same arguments for
every instruction set."""


def _float_linear(dtype: WeightType, m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    # The CPU's own products of bfloat16 round x, so they are for prompts and batches only.
    if dtype == "bfloat16" and m > SMALL_BATCH:
        if products.multiplies("bfloat16", n, k, isa):
            return blocks.linear_blocks("bfloat16", m, n, k, isa)
        if amx.multiplies("bfloat16", n, k, isa):
            return amx.linear_tiles("bfloat16", m, n, k)
    # Measured: a vector of eight rows or more is worth its padding from six rows on.
    few = 5 if isa.float_lanes >= SMALL_BATCH else SMALL_BATCH
    return (floats.float_gemv if m <= few else floats.float_gemm)(m, n, k, dtype, isa)


def _int8_linear(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    # Measured with AMX: up to 8 rows are as fast without tiles, 16 take 0.6 to 0.75 times as long by them.
    if m > SMALL_BATCH and amx.multiplies("int8", n, k, isa):
        return amx.linear_tiles("int8", m, n, k)
    # Measured: with AVX-512, dot products along the reduction are as fast for up to 8 rows.
    if m > (1 if isa.int8 == "smmla" else SMALL_BATCH) and products.multiplies("int8", n, k, isa):
        return blocks.linear_blocks("int8", m, n, k, isa)
    return few_rows.linear_few("int8", m, n, k, isa)


def _int4_linear(m: int, n: int, k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    # Measured: with AVX-512, two rows are faster as sums along the reduction than as half of a vector's rows.
    if m > (1 if isa.int8 == "smmla" else 2) and products.multiplies("int4", n, k, isa):
        return blocks.linear_blocks("int4", m, n, k, isa)
    return few_rows.linear_few("int4", m, n, k, isa)


@dataclass(frozen=True)
class LinearKernel:
    """One kind of linear kernel.

    Args:
        kernel: `kernel(m, n, k, isa=...)`. Its first arguments are the activations, its last is the result [m, n].
        activations: how many arguments the activations are.
    """

    kernel: Kernel
    activations: int


LINEARS: dict[str, LinearKernel] = {
    "linear_bfloat16": LinearKernel(functools.partial(_float_linear, "bfloat16"), activations=1),
    "linear_float16": LinearKernel(functools.partial(_float_linear, "float16"), activations=1),
    "linear_float32": LinearKernel(functools.partial(_float_linear, "float32"), activations=1),
    "linear_w4a8": LinearKernel(_int4_linear, activations=2),
    "linear_w8a8": LinearKernel(_int8_linear, activations=2),
}


# Parallel matmuls combined: their parallel loops become one loop, which is launched and awaited once.


def combine(kernels: Sequence[PrimFunc], shared: int) -> PrimFunc:
    """Return one kernel with all results, each computed by the statements of its own kernel, so bit for bit.

    First comes what the kernels do before their parallel loops, then one loop over the iterations of all kernels, then
    what they do after it. A kernel without a parallel loop runs before that loop as a whole.

    Args:
        kernels: each has one block as its body and the result as its last argument. A kernel may occur several times.
        shared: how many of the first arguments are the same for all.

    Returns:
        A kernel of the shared arguments, the other arguments of each kernel in order, and the results.

    Raises:
        InternalError: a kernel has two parallel loops.
    """
    kernels = [renew_defs(kernel) for kernel in kernels]  # every variable is defined once
    common = list(kernels[0].params[:shared])
    # Every other kernel has buffers of its own for these arguments: a DeclBuffer makes each an alias.
    again = [
        DeclBuffer(other, data=buffer.data)
        for kernel in kernels[1:]
        for other, buffer in zip(kernel.params[:shared], common, strict=True)
    ]
    blocks = [kernel.body.block for kernel in kernels]
    before, loops, after = zip(*(_split(block.body) for block in blocks), strict=True)
    # Aliases, then all statements before the loops, one parallel loop, and all statements behind them.
    body = SeqStmt([*again, *chain(*before), *_one_loop([loop for loop in loops if loop is not None]), *chain(*after)])
    # A region of an alias is left out: the first kernel's regions name the same data.
    copies = {one.buffer for one in again}
    reads = [region for b in blocks for region in b.reads if region.source not in copies]
    block = SBlock([], reads, [region for b in blocks for region in b.writes], "combined", body)
    own = chain.from_iterable(kernel.params[shared:-1] for kernel in kernels)
    params = [*common, *own, *(kernel.params[-1] for kernel in kernels)]
    merged = PrimFunc(params, SBlockRealize([], True, block), attrs=kernels[0].attrs)
    assert isinstance(merged, PrimFunc)
    return merged


def _split(body: Stmt) -> tuple[list[Stmt], For | None, list[Stmt]]:
    """Return the statements before the parallel loop, the loop, and those after it."""
    statements = list(body.seq) if isinstance(body, SeqStmt) else [body]
    loops = [(i, s) for i, s in enumerate(statements) if isinstance(s, For) and s.kind == ForKind.PARALLEL]
    if len(loops) > 1:
        raise InternalError(f"a kernel with {len(loops)} parallel loops cannot be combined with another")
    if not loops:
        return statements, None, []
    at, loop = loops[0]
    return statements[:at], loop, statements[at + 1 :]


def _one_loop(loops: Sequence[Any]) -> list[For]:
    """Return one parallel loop over the iterations of these loops, all of which begin at 0, or nothing for no loops."""
    if not loops:
        return []
    # Loop i has the iterations ends[i - 1] .. ends[i] - 1 of the common loop.
    ends = [sum(int(loop.extent) for loop in loops[: i + 1]) for i in range(len(loops))]
    every = Var("block", "int32")
    body: Any = None
    # From the last loop backwards, because every earlier loop is a branch in front of the later ones.
    for loop, end in zip(reversed(loops), reversed(ends), strict=True):
        mine = SeqStmt([Bind(loop.loop_var, every - (end - int(loop.extent))), loop.body])
        body = mine if body is None else IfThenElse(every < end, mine, body)
    return [For(every, IntImm("int32", 0), IntImm("int32", ends[-1]), ForKind.PARALLEL, body)]


def combined_linears(kind: str, m: int, ns: tuple[int, ...], k: int, isa: InstructionSet = PORTABLE) -> PrimFunc:
    """Return one kernel for parallel linears of `kind`: the same activations [m, k], one result [m, n] per n in `ns`.

    Its arguments are the activations, then the weights (and scales) of each linear, then the results.
    """
    linear = LINEARS[kind]
    kernels: list[Any] = [linear.kernel(m, n, k, isa=isa) for n in ns]
    combined: Any = combine(kernels, linear.activations)
    combined.__name__ = f"{kernels[0].__name__}_x{len(ns)}"
    return combined


KERNELS: dict[str, Kernel] = {
    "activate_quantize": activations.activate_quantize,
    "draft_features_quantize": draft.draft_features_quantize,
    "activation_factor": activations.activation_factor,
    "attention": decode.decode_attention,
    "attention_chunk": chunk.chunk_attention,
    "cache_write": cache.cache_write,
    "exact_attention": exact.exact_attention,
    "exact_rows_attention": exact_rows.exact_rows_attention,
    "linears": combined_linears,
    "ring_write": cache.ring_write,
    "rows_attention": rows.rows_attention,
    "tas": tas.tas,
    "tas_heads": functools.partial(tas.tas, weighted=True),
    "window_attention": decode.window_attention,
    **{kind: linear.kernel for kind, linear in LINEARS.items()},
}
"""Kind -> kernel. A kernel reads what it needs from the traits of the `InstructionSet`: `int8` selects entries of
DOTS and TILES, `float_lanes` and `machine` set the tile sizes, `float16` selects a conversion."""

KIND, OPTIONS = "fastcar.kernel", "fastcar.options"
"""The attributes of a marked kernel."""


@functools.cache
def dispatch(isa: InstructionSet, kind: str, *options: Any) -> PrimFunc:
    """Return the kernel of that kind for the instruction set, with the marks that `specialise` reads."""
    kernel: Any = KERNELS[kind](*options, isa=isa)
    # with_attrs copies: the cached kernel stays unmarked.
    marked: Any = kernel.with_attrs({KIND: kind, OPTIONS: json.dumps(options)})
    marked.__name__ = kernel.__name__
    return marked


@functools.cache
def _unmarked(kind: str, options: str, isa: InstructionSet) -> PrimFunc:
    # JSON turns tuples into lists. Options are tuples again, because the kernels are cached by their options.
    return KERNELS[kind](*(tuple(o) if isinstance(o, list) else o for o in json.loads(options)), isa=isa)


def specialise(module: Any, isa: InstructionSet) -> tvm.IRModule:
    """Return the module with the kernel of `isa` in place of every marked kernel, without the marks."""
    functions = {}
    for variable, function in module.functions_items():
        if isinstance(function, PrimFunc) and function.attrs is not None and KIND in function.attrs:
            # A kernel of another instruction set takes the same arguments, so call sites stay as they are.
            function = _unmarked(str(function.attrs[KIND]), str(function.attrs[OPTIONS]), isa)
        functions[variable] = function
    return tvm.IRModule(functions, attrs=module.attrs)
