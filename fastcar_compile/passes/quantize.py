"""Number formats: weights in bfloat16, float16, int8 or int4, and embeddings in bfloat16."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, fx

from fastcar_compile.config.formats import quant_format
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.ops.linear import FACTORS, quantize_weight, quantize_weight_int4
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import activation_of, bound, is_op, node_arg, tensor_attribute, value_of
from fastcar_compile.ir.rewrite import Edit, before, derived_parameters, replace, replace_call, rewrite_each
from fastcar_compile.ir.weight_checks import lost
from fastcar_compile.ir.weights import LazyWeights, Make, blocks_of_rows

aten, fastcar = torch.ops.aten, torch.ops.fastcar


def replace_linears(
    modules: Iterable[fx.GraphModule], target: Callable[..., Any], suffixes: tuple[str, ...], make: Make, edit: Edit
) -> bool:
    """Replace every plain `linear(x, w, bias)` by `target(x, *make(w), bias)`; return whether there was one.

    The parts that `make` gives of a weight w are called `<w>_<suffix>`. Branches of replay are not searched.
    """

    def replace_one(module: fx.GraphModule, node: fx.Node) -> None:
        with module.graph.inserting_before(node):
            parts = derived_parameters(module, node_arg(node, 1), suffixes, make, edit, origin=node)
        replace_call(node, edit.made_by, target, node_arg(node, 0), *parts, bound(node)["bias"])

    # A linear whose weight is a parameter: neither computed nor transposed in the graph.
    return rewrite_each(
        modules, lambda node: is_op(node, aten.linear) and node_arg(node, 1).op == "get_attr", replace_one
    )


SUFFIX = quant_format("bf16").suffix


def to_bfloat16(weight: Tensor) -> tuple[Tensor]:
    """Return the weight rounded half to even; exact where the value was bfloat16 before."""
    return (weight.to(torch.bfloat16),)


def to_float16(weight: Tensor) -> tuple[Tensor]:
    """Return the weight rounded half to even."""
    return (weight.to(torch.float16),)


class _HalfWeights(Pass):
    """Store the weights of linears in 16 bits, in all graphs.

    1. Matches `linear(x, w, bias)` whose w is a parameter.
    2. Makes `fastcar.linear_half(x, w in 16 bits, bias)`. Weights of a checkpoint of this type keep their bits.
    A weight that the graph computes or transposes stays as it is.

    Attributes:
        quant: name of the format. make: float32 [N, K] -> (stored weights,).
    """

    quant: ClassVar[str]
    make: ClassVar[Make]

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a linear to rewrite."""
        operator, suffix = fastcar.linear_half.default, quant_format(self.quant).suffix
        edit = Edit(self.name, program.lazy, program.losses)
        return replace_linears(program.all_graphs(), operator, (suffix,), type(self).make, edit)


class Bfloat16Weights(_HalfWeights):
    """Store the weights of linears as bfloat16: the range of float32, 8 bits of precision."""

    name = "bfloat16-weights"
    reason = "Weights of linears are stored in bfloat16: half the bytes of float32."
    quant = "bf16"
    make = staticmethod(to_bfloat16)


class Float16Weights(_HalfWeights):
    """Store the weights of linears as float16: 11 bits of precision, magnitudes up to 65504."""

    name = "float16-weights"
    reason = "Weights of linears are stored in float16: half the bytes of float32."
    quant = "fp16"
    make = staticmethod(to_float16)


class _Quantize(Pass):
    """Quantise the linears of both graphs, by the format that `name` ends in.

    1. `linear(x, w, bias)` whose w is a parameter becomes the integer linear of the format.
    2. `act(x)` becomes `x * activation_factor(x, act)`, for the activations that have a table.
    A weight that the graph computes or transposes stays as it is.

    Attributes:
        quantize: float32 [N, K] -> (integers, scales).
        linear: the operator (x, integers, scales, bias) -> y.
    """

    quantize: ClassVar[Callable[[Tensor], tuple[Tensor, Tensor]]]
    linear: ClassVar[Any]

    def apply(self, program: DecoderProgram) -> bool:
        """Return whether there was a linear or an activation to rewrite."""
        kind = quant_format(self.name.removeprefix("quantize-"))
        edit, parts = Edit(self.name, program.lazy, program.losses), (kind.suffix, "scale")
        linears = replace_linears(program.graphs(), self.linear, parts, type(self).quantize, edit)
        # ReLU has no table: it rounds nothing.
        activations = rewrite_each(program.graphs(), lambda n: activation_of(n) in FACTORS, self._through_table)
        return activations | linears

    def _through_table(self, _module: fx.GraphModule, node: fx.Node) -> None:
        x = node_arg(node, 0)
        with before(node, self.name) as emit:
            factor = emit(fastcar.activation_factor.default, x, activation_of(node))
        replace_call(node, self.name, aten.mul.Tensor, x, factor)


class QuantizeW8A8(_Quantize):
    """Quantise to symmetric int8 weights per output channel, with dynamic int8 activations per row."""

    name = "quantize-w8a8"
    reason = "Weights become int8 with one scale per output channel, inputs int8 with one scale per row."
    quantize = staticmethod(quantize_weight)
    linear = fastcar.linear_w8a8.default


class QuantizeW4A8(_Quantize):
    """Quantise to symmetric int4 weights in groups of 128 inputs, with dynamic int8 activations per row."""

    name = "quantize-w4a8"
    reason = "Weights become int4 with one scale per group, inputs int8 with one scale per row."
    quantize = staticmethod(quantize_weight_int4)
    linear = fastcar.linear_w4a8.default


def stored_like(linear: fx.Node, weight: Tensor, name: str) -> tuple[Callable[..., Any], dict[str, Tensor]]:
    """Return the operator of a linear, and another weight in its number format: suffix of the name -> tensor.

    Raises:
        CompileError: the format's range ends below the weight of this name.
    """
    if is_op(linear, fastcar.linear_half):
        make = to_bfloat16 if value_of(node_arg(linear, 1)).dtype == torch.bfloat16 else to_float16
    else:
        make = {kind.linear: kind.quantize for kind in (QuantizeW8A8, QuantizeW4A8)}.get(linear.target)
    if make is None:
        return aten.linear.default, {"": weight}
    made = make(weight)
    lost(name, weight, made)
    return cast("Callable[..., Any]", linear.target), dict(zip(("", "_scale"), made, strict=False))


class Bfloat16Embedding(Pass):
    """Store the embedding table as bfloat16, in both graphs.

    1. Matches `embedding(table, ids)` whose table is a float32 parameter that only lookups read.
    2. Every value of the table must be a bfloat16 number, as those of a bfloat16 checkpoint are.
    3. Makes `embedding(table as bfloat16, ids)` as float32. No result changes.
    """

    name = "bfloat16-embedding"
    reason = "The embedding table holds bfloat16 values and is stored as such: half the bytes."

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError where the table has no values to look at. Tables are judged once for both graphs."""
        found = [(module, node) for module in program.graphs() for node in _lookups(module.graph)]
        tables = {str(node_arg(node, 0).target): module for module, node in found}
        exact = {t for t, module in tables.items() if _is_bfloat16(module, t, program.lazy)}
        edit = Edit(self.name, program.lazy)
        for module, node in found:
            if str(node_arg(node, 0).target) in exact:
                _store(module, node, edit)
                module.graph.eliminate_dead_code()
        return bool(exact)


def _lookups(graph: fx.Graph) -> list[fx.Node]:
    """Lookups in float32 tables that only lookups read."""
    # By name, because several nodes may read one parameter. A head that is tied to the table and not quantised reads it
    # as a float32 weight, so that table stays.
    readers: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="get_attr"):
        readers.setdefault(str(node.target), []).extend(node.users)
    lookups = [n for n in graph.nodes if is_op(n, aten.embedding) and node_arg(n, 0).op == "get_attr"]
    lookups = [n for n in lookups if value_of(node_arg(n, 0)).dtype == torch.float32]
    return [n for n in lookups if all(is_op(u, aten.embedding) for u in readers[str(node_arg(n, 0).target)])]


def _is_bfloat16(module: fx.GraphModule, target: str, lazy: LazyWeights | None) -> bool:
    value = tensor_attribute(module, target)
    if value.is_meta and lazy is None:
        hint = "leave bfloat16-embedding out, or run it on a graph with weights"
        raise CompileError(f"bfloat16-embedding needs the values of {target}, which are not there", hint=hint)
    # A value is a bfloat16 number if rounding it to bfloat16 gives it back.
    for rows in blocks_of_rows(value.shape):
        part = lazy.source.read(target, rows) if lazy is not None and value.is_meta else value[slice(*rows)]
        if not torch.equal(part.to(torch.bfloat16).float(), part):
            return False
    return True


def _store(module: fx.GraphModule, node: fx.Node, edit: Edit) -> None:
    """Put the float32 rows of the bfloat16 table in the place of the lookup."""
    # Rows are widened behind the lookup: B * T rows of bfloat16, and never the whole table.
    with before(node, edit.made_by) as emit:
        (table,) = derived_parameters(module, node_arg(node, 0), (SUFFIX,), to_bfloat16, edit, origin=node)
        rows = emit(aten.embedding.default, table, *node.args[1:])
        wide = emit(aten._to_copy.default, rows, dtype=torch.float32)
    replace(node, wide)
