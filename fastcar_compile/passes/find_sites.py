"""Find every decoder layer's attention and MLP from the structure of the graph."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram, LayerSite, module_path_of, source_of, where
from fastcar_compile.ir.rewrite import activation_of, ancestors, descendants, in_order, is_op, node_arg

aten = torch.ops.aten
_EXPECTED = "linear -> nonlinearity (-> product) -> linear, closed by a residual add"


@dataclass(frozen=True)
class FindSites(Pass):
    """Fill `program.sites`: an attention over a written cache, and the single-entry single-exit MLP region after it."""

    name: ClassVar[str] = "find-sites"

    def apply(self, program: DecoderProgram) -> bool:
        """Raises CompileError listing every layer that cannot be matched: what was found and what was expected."""
        graph = program.graph_module.graph
        attentions = [n for n in graph.nodes if is_op(n, torch.ops.fastcar.attention)]
        problems: list[CompileError] = []
        sites: list[LayerSite] = []
        for layer, node in enumerate(attentions):
            try:
                sites.append(_Matcher(graph, layer, node, attentions).site())
            except CompileError as error:
                problems.append(error)
        if not attentions:
            hint = "the decoder must call scaled_dot_product_attention on a key cache written in the same step"
            problems.append(CompileError("no attention over a written cache was found", hint=hint))
        if problems:
            raise CompileError.collect(problems)
        modified = sites != program.sites
        program.sites = sites
        hidden = sites[0].hidden
        program.config = dataclasses.replace(program.config, num_layers=len(sites), hidden_size=hidden)
        return modified


def mlp_region(graph: fx.Graph, layer: int, attentions: list[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The residual stream before a layer's MLP, the MLP's output and the add that joins them.

    Args:
        attentions: the attention nodes of all layers, in order.

    Raises:
        CompileError: the layer's structure is not the expected one.
    """
    matcher = _Matcher(graph, layer, attentions[layer], attentions)
    residual, _ = matcher.residual_add()
    closing, output = matcher.closing_add(residual)
    return residual, output, closing


class _Matcher:
    def __init__(self, graph: fx.Graph, layer: int, attention: fx.Node, attentions: list[fx.Node]) -> None:
        self.graph, self.layer, self.attention = graph, layer, attention
        self.later = set(attentions[layer + 1 :])

    def site(self) -> LayerSite:
        residual, entry = self.residual_add()
        exit_add, region_output = self.closing_add(residual)
        region = self._region(residual, region_output)
        found = [n for n in region if is_op(n, aten.linear)]
        self._check_shape(region, found, region_output)
        linears = _by_role(found) or found
        name = next(activation_of(n) for n in region if activation_of(n))
        activation = name if _by_role(found) else f"{name}, not directly between two linears"
        query, key_cache, value_cache = self.attention.args[0], *self.attention.args[1:3]
        _, heads, _, dim = query.meta["val"].shape  # type: ignore[union-attr]
        return LayerSite(
            layer=self.layer,
            module_path=module_path_of(linears[0]).rpartition(".")[0],
            source=source_of(linears[0]),
            attention=self.attention.name,
            query=query.name,  # type: ignore[union-attr]
            key_cache=key_cache.name,  # type: ignore[union-attr]
            value_cache=value_cache.name,  # type: ignore[union-attr]
            scale=float(self.attention.args[4]),  # type: ignore[arg-type]
            entry=entry.name,
            residual=residual.name,
            mlp_input=linears[0].args[0].name,  # type: ignore[union-attr]
            mlp_output=linears[-1].name,
            region_output=region_output.name,
            exit=exit_add.name,
            linears=tuple(n.name for n in linears),
            weights=tuple(str(n.args[1].target) for n in linears),  # type: ignore[union-attr]
            biases=tuple(_bias_of(n) for n in linears),
            activation=activation,
            gated=len(linears) == 3,
            hidden=int(residual.meta["val"].shape[-1]),
            intermediate=int(linears[-1].args[1].meta["val"].shape[1]),  # type: ignore[union-attr]
            num_heads=int(heads),
            num_kv_heads=int(key_cache.meta["val"].shape[1]),  # type: ignore[union-attr]
            head_dim=int(dim),
        )

    def residual_add(self) -> tuple[fx.Node, fx.Node]:
        """The add that joins attention to the residual stream, and the stream before it."""
        reached = descendants(self.attention)
        for node in in_order(self.graph, reached):
            if not is_op(node, aten.add) or not all(isinstance(a, fx.Node) for a in node.args):
                continue
            outside = [a for a in node.args if a not in reached]
            if len(outside) == 1 and outside[0].meta["val"].dim() == 3 and outside[0].op != "get_attr":  # type: ignore[union-attr]
                return node, outside[0]  # type: ignore[return-value]
        raise self._error(self.attention, "its output joins no residual add", "a residual add after attention")

    def closing_add(self, residual: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The add whose one operand is the residual and whose other is the MLP of it."""
        reached = descendants(residual)
        for node in in_order(self.graph, set(residual.users)):
            others = [a for a in node.args if a is not residual and a in reached]
            if is_op(node, aten.add) and len(others) == 1 and not (ancestors(others[0]) & self.later):  # type: ignore[arg-type]
                return node, others[0]  # type: ignore[return-value]
        users = ", ".join(str(n.target) for n in in_order(self.graph, set(residual.users)))
        raise self._error(residual, f"the residual stream is used by [{users}], none of which closes an MLP", _EXPECTED)

    def _region(self, residual: fx.Node, output: fx.Node) -> list[fx.Node]:
        region = (descendants(residual) & ancestors(output)) - {residual}
        for node in in_order(self.graph, region):
            escaping = [u for u in node.users if u not in region]
            if node is not output and escaping:
                raise self._error(node, f"{node.name} inside the MLP is also used by {escaping[0].name}", "one exit")
            free = [a for a in node.all_input_nodes if a not in region and a is not residual and not _is_constant(a)]
            if free:
                raise self._error(node, f"{node.name} inside the MLP also reads {free[0].name}", "one entry")
        return in_order(self.graph, region)

    def _check_shape(self, region: list[fx.Node], linears: list[fx.Node], output: fx.Node) -> None:
        targets = [getattr(n.target, "overloadpacket", n.target) for n in region if n.op == "call_function"]
        found = [t.__name__ for t in targets]
        activations = [n for n in region if activation_of(n)]
        shared = len({node_arg(n, 0) for n in linears[:-1]}) == 1
        if len(linears) not in (2, 3) or len(activations) != 1 or not shared:
            raise self._error(output, f"between residual and closing add: {' -> '.join(found)}", _EXPECTED)

    def _error(self, node: fx.Node, found: str, expected: str) -> CompileError:
        what = f"layer {self.layer}: the MLP cannot be matched: {found}; expected {expected}"
        hint = "write the block as h = h + attention(norm(h)); h = h + mlp(norm(h)), or register the shape as an issue"
        return CompileError(what, where=where(node), hint=hint)


def _bias_of(linear: fx.Node) -> str | None:
    bias = linear.args[2] if len(linear.args) > 2 else None
    return str(bias.target) if isinstance(bias, fx.Node) else None


def _by_role(linears: list[fx.Node]) -> list[fx.Node] | None:
    """[gate, up, down] or [up, down] when the MLP is down(act(gate(x)) * up(x)) or down(act(up(x))), else None."""
    *first, down = linears
    inner = node_arg(down, 0)
    factors = inner.all_input_nodes if is_op(inner, aten.mul) else [inner]
    activated = [n for n in factors if activation_of(n)]
    if len(activated) != 1 or len(factors) != len(first):
        return None
    roles = [node_arg(activated[0], 0), *(n for n in factors if n not in activated)]
    return [*roles, down] if set(roles) == set(first) else None


def _is_constant(node: fx.Node) -> bool:
    return all(n.op == "get_attr" for n in ancestors(node) if not n.all_input_nodes)
