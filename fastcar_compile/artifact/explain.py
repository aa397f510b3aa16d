"""What the compiler found, inserted and cached, per layer and per node, as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from fastcar_compile.errors import InputError
from fastcar_compile.gates import gate_named
from fastcar_compile.gates.weights import PARAMETERS, gate_parameter, weight_bytes
from fastcar_compile.ir.layers import ReplayFacts
from fastcar_compile.ir.program import DecoderConfig, StateRole, StateSpec
from fastcar_compile.ir.provenance import module_path_of, source_of
from fastcar_compile.ir.sites import LayerSite
from fastcar_compile.ir.text import graph_to_text


def explain_program(
    config: DecoderConfig,
    sites: Sequence[LayerSite],
    state: Sequence[StateSpec],
    pipeline: str,
    layer: int | None = None,
    accelerator: Mapping[str, Any] | None = None,
) -> str:
    """Per layer: what was matched and where, what replay inserted, what is cached and offloaded, and why.

    `accelerator` is the manifest's section; None: there is none.
    """
    if layer is not None and not 0 <= layer < len(sites):
        raise InputError(f"there is no layer {layer}", hint=f"layers are 0 .. {len(sites) - 1}")
    chosen = sites if layer is None else [sites[layer]]
    head = (
        f"decoder of {config.num_layers} layers, hidden {config.hidden_size}, batch {config.batch_size}, "
        f"{config.max_seq_len} positions, {config.tokens_per_frame} tokens per frame\npipeline: {pipeline}\n"
    )
    head += _sparse(config, state)
    texts = []
    for site in chosen:
        own = [t for t in state if t.layer == site.layer]
        texts.append(_layer(config, site, own) + _offload(accelerator, site.layer, f"layer_{site.layer}"))
    if layer is None and (rest := _offload(accelerator, None, None)):
        texts.append(f"outside of the layers:\n{rest}")
    return head + "\n".join(texts)


def _sparse(config: DecoderConfig, state: Sequence[StateSpec]) -> str:
    """What sparse attention sees and keeps; nothing where attention is to all positions."""
    ring = config.ring
    if ring is None:
        return ""
    kept, full = kv_bytes(config, state)
    where = "inside the cache" if ring.positions == "cache" else "absolute"
    return (
        f"  sparse    {ring.sinks} sinks and the last {ring.window} tokens, rotary positions {where}; "
        f"{ring.capacity} rows of keys and values instead of {config.max_seq_len}, "
        f"{kept / 2**20:.3f} MiB instead of {full / 2**20:.3f}\n"
    )


def kv_bytes(config: DecoderConfig, state: Sequence[StateSpec]) -> tuple[int, int]:
    """Bytes of the key and value caches, and of caches of max_seq_len rows."""
    caches = [s for s in state if s.role in (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)]
    return sum(s.nbytes for s in caches), sum(s.nbytes // s.shape[2] * config.max_seq_len for s in caches)


def _offload(accelerator: Mapping[str, Any] | None, layer: int | None, mlp: str | None) -> str:
    """What the accelerator computes of one layer (None: outside of the layers), and which linears stay on the host."""
    if accelerator is None:
        return ""
    lines = [f"  offload  {mlp}: the MLP, one call, rows by the DRS table"] if mlp else []
    controller = accelerator["controller"]
    if layer in controller["gated_layers"]:
        lines.insert(
            0,
            "  offload  gate: the TAS unit decides from q and the cached key; threshold, chain limit and coupling are "
            f"in the DRS table (version {controller['table_version']})",
        )
    for call in accelerator.get("linears", ()):
        if call["layer"] == layer:
            channels = " + ".join(str(n) for n in call["channels"])
            lines.append(
                f"  offload  {call['name']}: {', '.join(call['paths'])}; {call['inputs']} -> {channels}, one call, "
                "all rows, sequenced by the host"
            )
    lines += [
        f"  on host  {item['path']}: {item['reason']}"
        for item in accelerator.get("on_host", ())
        if item["layer"] == layer
    ]
    return "".join(f"{line}\n" for line in lines)


def _layer(config: DecoderConfig, site: LayerSite, state: Sequence[StateSpec]) -> str:
    attention, mlp, replay = site.attention, site.mlp, site.replay
    product = " * linear" if mlp.gated else ""
    lines = [
        f"layer {site.layer}: {site.module_path} ({site.source})",
        f"  found    attention {attention.node}: {attention.num_heads} query heads, {attention.num_kv_heads} key/value "
        f"heads of {attention.head_dim}, scale {attention.scale:.6g}; query {attention.query}, key cache "
        f"{attention.key_cache}",
        f"  found    MLP {mlp.input} -> {mlp.output}: linear -> {mlp.activation}{product} -> linear, "
        f"{mlp.hidden} -> {mlp.intermediate} -> {mlp.hidden}; "
        f"closed by {site.exit} = {site.residual} + {site.region_output}",
    ]
    if replay is not None:
        lines += _replay_lines(config, site, replay)
    else:
        lines.append(
            "  inserted nothing: this layer was compiled without a replay threshold, so its MLP always computes"
        )
    if replay is not None and replay.gate_units is not None:
        size = weight_bytes(replay.gate_units, mlp.hidden)
        names = ", ".join(gate_parameter(name, site.layer) for name in PARAMETERS)
        lines.append(f"  weights  of the gate, {replay.gate_units} units: {names}, {size / 2**20:.3f} MiB")
    lines += [f"  state    {s.name}: {s.dtype} {list(s.shape)}, {s.nbytes / 2**20:.3f} MiB, {s.role}" for s in state]
    return "\n".join(lines) + "\n"


def _replay_lines(config: DecoderConfig, site: LayerSite, replay: ReplayFacts) -> list[str]:
    stride = config.tokens_per_frame
    gate = gate_named(replay.gate, replay.heads)
    around = "MLP (the gate reads the norm before it)" if gate.caches_input else "norm and MLP"
    read = f"query {site.attention.query}, {stride} positions back, " if gate.reads_query else ""
    kept = f", and keeps the MLP input of every computed visit (gate_cache_{site.layer})" if gate.caches_input else ""
    return [
        f"  inserted gate {gate.name}: {gate.describe()}; {read}"
        f"replaying at a score {gate.comparison.value} {replay.threshold:g}{kept}; "
        f"cond around {around} (replay_branch_{site.layer} | compute_branch_{site.layer})",
        f"  why      a row whose score passes keeps the MLP output of {stride} forwards ago; "
        "the MLP is skipped when every row does",
    ]


def explain_node(module: fx.GraphModule, name: str) -> str:
    """One node: its operator, shape, source line, module, the pass that made it, its inputs and users.

    Raises:
        InputError: there is no such node in the graph or its branches.
    """
    found = _find(module, name, "decode step")
    if found is None:
        raise InputError(f"there is no node {name!r}", hint="list the nodes with `fastcar inspect ARTIFACT --after`")
    place, node = found
    listing = next(line for line in graph_to_text(node.graph.owning_module).splitlines() if line.startswith(f"{name}:"))  # type: ignore[arg-type]
    return "\n".join(
        [
            listing.partition("  #")[0],
            f"  graph    {place}",
            f"  source   {source_of(node) or 'none'}",
            f"  module   {module_path_of(node) or 'none'}",
            f"  made by  {node.meta.get('made_by', 'the model')}",
            f"  reads    {', '.join(n.name for n in node.all_input_nodes) or 'nothing'}",
            f"  read by  {', '.join(n.name for n in node.users) or 'nothing'}",
        ]
    )


def _find(module: fx.GraphModule, name: str, place: str) -> tuple[str, fx.Node] | None:
    for node in module.graph.nodes:
        if node.name == name and node.op != "output":
            return place, node
    for child_name, child in module.named_children():
        if isinstance(child, fx.GraphModule) and (found := _find(child, name, child_name)):
            return found
    return None
