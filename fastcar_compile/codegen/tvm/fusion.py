"""Fusion: several operators of the rewritten program become one, which one kernel computes."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.library import Library, infer_schema

from fastcar_compile.ir.ops import exact
from fastcar_compile.ir.ops import linear as quant
from fastcar_compile.ir.query import bound, shape_of
from fastcar_compile.ir.rewrite import before, set_origin
from fastcar_compile.passes.patterns import norms
from fastcar_compile.passes.patterns.norms import arguments, factors

aten, fastcar = torch.ops.aten, torch.ops.fastcar


# Fused operators: each is what one kernel computes of several operators of the rewritten program.
#
# Only the TVM lowering knows them. Each is defined by the operators that it replaces, so a fused graph also runs in
# PyTorch.


_LIBRARY = Library("fastcar", "FRAGMENT")
_Definition = TypeVar("_Definition", bound=Callable[..., object])


def _fused(function: _Definition) -> _Definition:
    """Register the function as the operator `fastcar::<name>`."""
    name = function.__name__
    _LIBRARY.define(name + infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return function


@_fused
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 rows of x float32 [..., K] and their float32 scales [...]."""
    return quant.quantize_rows(x)


@_fused
def integer_linear(rows: Tensor, scales: Tensor, qweight: Tensor, wscale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the float32 [..., N] of quantised rows: of `linear_w8a8` for int8 weights, else of `linear_w4a8`."""
    scaled = quant.scaled_int8 if qweight.dtype == torch.int8 else quant.scaled_int4
    y = scaled(rows, scales, qweight, wscale)
    return y if bias is None else y + bias


@_fused
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x * rsqrt(mean(x^2, last axis) + epsilon) * weight, weight [K]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


@_fused
def rms_norm_quantize(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `rms_norm`."""
    return quant.quantize_rows(rms_norm(x, weight, epsilon))


@_fused
def exact_norm_quantize(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `exact_norm`."""
    return quant.quantize_rows(exact.exact_norm(x, weight, epsilon))


@_fused
def exact_layer_norm_quantize(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `exact_layer_norm`."""
    return quant.quantize_rows(exact.exact_layer_norm(x, weight, bias, epsilon))


@_fused
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Return the layer norm of float32 rows over the last axis; weight and bias [K], None: ones, zeros."""
    return torch.layer_norm(x, x.shape[-1:], weight, bias, epsilon)


@_fused
def layer_norm_quantize(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `layer_norm`."""
    return quant.quantize_rows(layer_norm(x, weight, bias, epsilon))


@_fused
def gated_quantize(gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of activation(gate) * up, the activation by its table's factor."""
    return quant.quantize_rows(gate * fastcar.activation_factor(gate, activation) * up)


@_fused
def draft_features_quantize(
    gate: Tensor, up: Tensor, inner: Tensor, gain: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `draft_difference` of [activation(gate) * up ; inner], the features of a draft."""
    features = torch.cat([gate * fastcar.activation_factor(gate, activation) * up, inner], 1)
    return quant.quantize_rows(fastcar.draft_difference(features, gain))


@_fused
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x * cos + cat(-x[..., D/2:], x[..., :D/2]) * sin of x [B, H, T, D]; cos and sin [1 or B, 1, T, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@_fused
def gate_and_count(
    chain: Tensor,
    score: Tensor,
    threshold: Tensor,
    step: Tensor,
    stride: int,
    max_chain: int,
    couple_cfg: bool,
    refresh_every: int,
    at_most: bool,
) -> tuple[Tensor, Tensor]:
    """Return the decisions of `gate`, bool [B], and chain int32 [F, B] with the count of each row after them."""
    replay = fastcar.gate(score, threshold, step, chain, stride, max_chain, couple_cfg, refresh_every, at_most)
    count = (fastcar.slot_read(chain, step) + 1) * replay.to(torch.int32)
    return replay, fastcar.slot_write(chain, count, step)


@_fused
def keep_frame(
    cache: Tensor, inputs: Tensor, y: Tensor, x: Tensor, replay: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two caches float32 [F, B, H] with row step mod F written where no replay is: y in `cache`, x in `inputs`.

    y, x float32 [B, H], replay bool [B]. Without a draft, y of a row that replays is what the slot has.
    """
    mask = replay.unsqueeze(1)
    outputs, kept = (torch.where(mask, fastcar.slot_read(c, step), v) for c, v in ((cache, y), (inputs, x)))
    return fastcar.slot_write(cache, outputs, step), fastcar.slot_write(inputs, kept, step)


GraphStep = Callable[[fx.Graph], None]
"""A rewrite of one graph. A step finds its own pattern and leaves everything else as it is."""


def replace(node: fx.Node, operator: OpOverload, args: tuple[Any, ...], made_by: str) -> None:
    """Put a call of `operator`, which yields the same value, in the place of a node."""
    with node.graph.inserting_before(node):
        new = node.graph.call_function(operator, args)
    set_origin(new, node, made_by)
    new.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(new)


def replace_all(nodes: Sequence[fx.Node], target: OpOverload, args: tuple[Any, ...], made_by: str) -> None:
    """Put the results of one call, which are the same values, in the places of several nodes.

    The call stands where its last argument is known. Every reader of a node has to stand behind that.
    """
    # Nodes compare by their place in the graph: the call needs its last argument.
    after = max(argument for argument in args if isinstance(argument, fx.Node))
    with after.graph.inserting_after(after):
        new = after.graph.call_function(target, args)
    set_origin(new, nodes[0], made_by)
    new.meta["val"] = tuple(node.meta["val"] for node in nodes)
    place = new
    for index, node in enumerate(nodes):
        with new.graph.inserting_after(place):
            place = new.graph.call_function(operator.getitem, (new, index))
        set_origin(place, node, made_by)
        place.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(place)


def fuse_norms(graph: fx.Graph) -> None:
    """Replace every root-mean-square norm that is written out, and every layer norm over the last axis.

    A layer norm of another form stays TVM's own.
    """
    for node in list(graph.nodes):
        # The nodes of the pattern stay where they are: without readers they go as dead code.
        if (found := norms.rms_norm(node)) is not None:
            replace(node, fastcar.rms_norm.default, found, "fuse-norms")
        elif (found := norms.layer_norm(node)) is not None:
            replace(node, fastcar.layer_norm.default, found, "fuse-norms")


_QUANTIZED_NORMS = {
    fastcar.rms_norm.default: fastcar.rms_norm_quantize.default,
    fastcar.exact_norm.default: fastcar.exact_norm_quantize.default,
    fastcar.exact_layer_norm.default: fastcar.exact_layer_norm_quantize.default,
    fastcar.layer_norm.default: fastcar.layer_norm_quantize.default,
}


def fuse_quantize(graph: fx.Graph) -> None:
    """Replace every `quantize_rows` whose rows one kernel can make and quantise.

    The rows stay where another operator reads them too.
    """
    for node in list(graph.nodes):
        quantize = arguments(node, fastcar.quantize_rows)
        if quantize is None:
            continue
        x = quantize["x"]
        # fuse-norms ran before, so a norm is one node by now.
        if x.target in _QUANTIZED_NORMS:
            replace(node, _QUANTIZED_NORMS[x.target], tuple(bound(x).values()), "fuse-quantize")
        elif (found := gated_product(x)) is not None:
            replace(node, fastcar.gated_quantize.default, found, "fuse-quantize")
        elif (draft := _features(x)) is not None:
            replace(node, fastcar.draft_features_quantize.default, draft, "fuse-quantize")


def gated_product(node: fx.Node) -> tuple[fx.Node, fx.Node, str] | None:
    """Return (gate, up, activation) where node is activation(gate) * up by a table's factor, all of one shape."""
    for product, up in factors(node):
        for gate, factor in factors(product):
            # `(gate * activation_factor(gate)) * up`, with both products in either order.
            activation = arguments(factor, fastcar.activation_factor)
            if activation is None or activation["x"] is not gate:
                continue
            if shape_of(node) == shape_of(gate) == shape_of(up):
                return gate, up, str(activation["activation"])
    return None


def _features(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node, str] | None:
    """Return (gate, up, inner, gain, activation) where node is the difference of a gated draft's features."""
    difference = arguments(node, fastcar.draft_difference)
    joined = arguments(difference["both"], aten.cat) if difference else None
    if difference is None or joined is None or len(joined["tensors"]) != 2:
        return None
    product, inner = joined["tensors"]
    found = gated_product(product)
    return None if found is None else (*found[:2], inner, difference["gain"], found[2])


_RULES = ("stride", "max_chain", "couple_cfg", "refresh_every", "at_most")
_GATE_ARGUMENTS = ("chain", "score", "threshold", "step", *_RULES)


def fuse_replay(graph: fx.Graph) -> None:
    """Replace every gate together with its chain counter, and the two writes of a layer that caches the MLP's input."""
    for node in list(graph.nodes):
        if node.target is fastcar.gate.default and (counted := _counted(node)) is not None:
            # The count follows from the decision, so one kernel makes both and reads the counters once.
            gate = bound(node)
            args = tuple(gate[name] for name in _GATE_ARGUMENTS)
            replace_all((node, counted), fastcar.gate_and_count.default, args, "fuse-replay")
    for node in list(graph.nodes):
        if (kept := _kept_input(node)) is not None and (found := _written_output(kept)) is not None:
            output, result = found
            cached = arguments(output, fastcar.slot_write)
            assert cached is not None
            args = (cached["cache"], kept["cache"], result, kept["x"], kept["replay"], kept["step"])
            replace_all((output, node), fastcar.keep_frame.default, args, "fuse-replay")


def _counted(gate: fx.Node) -> fx.Node | None:
    """Return the write of (slot_read(chain) + 1) * gate to the gate's chain counters; None where there is none."""
    chain, step = bound(gate)["chain"], bound(gate)["step"]
    for node in chain.users:
        write = arguments(node, fastcar.slot_write)
        if write is None or write["cache"] is not chain or write["step"] is not step:
            continue
        # `slot_write(chain, (slot_read(chain, step) + 1) * to(gate, int32), step)`, as insert-replay writes it.
        product = arguments(write["value"], aten.mul)
        more = arguments(product["self"], aten.add) if product else None
        read = arguments(more["self"], fastcar.slot_read) if more and more["other"] == 1 else None
        factor = arguments(product["other"], aten.to) if product else None
        alone = len(chain.users) == 3  # the gate, the read and the write: nobody else reads what the kernel changes
        if read and factor and factor["self"] is gate and read["cache"] is chain and read["step"] is step and alone:
            return node
    return None


def _kept_input(node: fx.Node) -> dict[str, Any] | None:
    """Return cache, x, replay and step where node writes where(replay, slot_read(cache), x) to the cache, else None."""
    write = arguments(node, fastcar.slot_write)
    choice = arguments(write["value"], aten.where) if write else None
    mask = arguments(choice["condition"], aten.unsqueeze) if choice else None
    read = arguments(choice["self"], fastcar.slot_read) if choice else None
    if write is None or choice is None or mask is None or read is None or mask["dim"] != 1:
        return None
    if read["cache"] is not write["cache"] or read["step"] is not write["step"]:
        return None
    return {**write, "x": choice["other"], "replay": mask["self"]}


def _written_output(kept: dict[str, Any]) -> tuple[fx.Node, fx.Node] | None:
    """Return the write of the result of the conditional on the same decision, and that result.

    The cache is float32 of the same shape. With a draft it is written where no replay is, as the input is.
    """
    for cond in kept["replay"].users:
        # The decision has other readers as well: the choice of the kept input, and the stacked decisions.
        if cond.target is not torch.ops.higher_order.cond:
            continue
        for result in cond.users:
            assert result.target is operator.getitem
            for user in [*result.users, *(second for first in result.users for second in first.users)]:
                write, own = arguments(user, fastcar.slot_write), _kept_input(user)
                value = own["x"] if own is not None else write and write["value"]
                # The output's own write has the form of an input's where a draft makes it conditional.
                if write and value is result and value is not kept["x"] and write["step"] is kept["step"]:
                    return user, result
    return None


def fuse_rotary(graph: fx.Graph) -> None:
    """Replace every rotary embedding of four axes."""
    for node in list(graph.nodes):
        if (found := norms.rotary(node)) is not None:
            replace(node, fastcar.rotary.default, found, "fuse-rotary")


QUANTIZED_LINEARS = frozenset(kind.default for kind in quant.INTEGER_LINEARS)


def split_quantized_linears(graph: fx.Graph) -> None:
    """Replace every `linear_w8a8` and `linear_w4a8` by the quantisation of its rows and an integer product.

    Linears that share their rows share one quantisation, and later steps can fuse it with what makes the rows.
    """
    rows: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in list(graph.nodes):
        if node.target not in QUANTIZED_LINEARS:
            continue
        arguments = bound(node)
        x = arguments.pop("x")
        assert isinstance(x, fx.Node)
        # q, k and v, or gate and up, read one x: its rows are quantised once.
        if x not in rows:
            rows[x] = _quantized(node, x)
        replace(node, fastcar.integer_linear.default, (*rows[x], *arguments.values()), "split-quantized-linears")


def _quantized(linear: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return rows and scales of x, placed before the first linear that reads them."""
    with before(linear, "split-quantized-linears") as emit:
        both = emit(fastcar.quantize_rows.default, x)
        return emit(operator.getitem, both, 0), emit(operator.getitem, both, 1)
