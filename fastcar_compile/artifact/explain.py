"""Text about an artifact: its options, and what the compiler found, inserted and cached per layer."""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from fastcar_compile.artifact.accelerator_section import AcceleratorSection
from fastcar_compile.artifact.layout import REPORT_JSON
from fastcar_compile.artifact.manifest import Sections
from fastcar_compile.artifact.sections import State
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.errors import InputError, count_text, size_text
from fastcar_compile.gates import gate_named
from fastcar_compile.gates.weights import PARAMETERS, gate_parameter, weight_bytes
from fastcar_compile.ir.types import ATTENTION_ROLES, LayerSite, ReplayFacts, StateRole
from fastcar_compile.support.values import whole

Description = tuple[str, Mapping[str, str]]
"""A title, and fields by name."""


class Described:
    """Something that a terminal shows as a title with a line for each field, and a notebook as a table."""

    @abstractmethod
    def _description(self) -> Description: ...

    def __repr__(self) -> str:
        title, fields = self._description()
        # Control characters of a file's texts are written out, as this is for a terminal.
        shown = {name: value if value.isprintable() else ascii(value) for name, value in fields.items()}
        return "\n".join([title, *(f"  {name:<8} {value}" for name, value in shown.items())])

    def _repr_html_(self) -> str:
        title, fields = self._description()
        rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in fields.items())
        return f"<table><caption>{escape(title)}</caption>{rows}</table>"


def rows_text(batch_size: int, rows: int | None) -> str:
    """Return what a decode step takes: rows at one position, or rows with positions of their own."""
    if rows is None:
        return count_text(batch_size, "row")
    return f"{count_text(batch_size, 'video')} of {count_text(rows, 'row')} with a position each"


RASTER = "raster"


def order_text(options: CompileConfig) -> str:
    """Return the order in which a decoder decodes."""
    return RASTER if options.jacobi is None else str(options.jacobi)


def decoder_fields(sections: Sections) -> dict[str, str]:
    """Return what an artifact was compiled for and from, by name."""
    options, config = sections.options, sections.decoder.config
    order = {} if (text := order_text(options)) == RASTER else {"order": text}
    if (sparse := options.sparse_attention) is not None:
        seen = f"the last {sparse.window} and the first {sparse.sinks} tokens"
        order["sees"] = f"{seen}, {sparse.positions} positions"
    return {
        "target": f"{options.target}, offload {options.offload}" if sections.accelerator else options.target,
        "decoder": f"{config.num_layers} layers of {config.hidden_size}, {config.tokens_per_frame} tokens per frame, "
        f"{config.max_seq_len} positions, {rows_text(config.batch_size, config.rows)}",
        "numbers": f"weights {options.quant}, KV cache {options.kv}, numerics {options.numerics}",
        **order,
        **_rules(options.replay),
    }


def _rules(replay: ReplayConfig | None) -> dict[str, str]:
    """Return what limits replays, besides the gate."""
    if replay is None:
        return {}
    rules = [f"at most {count_text(replay.max_chain, 'replay')} in a row"] if replay.max_chain else []
    rules += [f"one frame in {replay.refresh_every} computes"] if replay.refresh_every else []
    rules += ["guidance pairs together"] if replay.couple_cfg else []
    return {"rules": ", ".join(rules)} if rules else {}


def gate_text(gates: Sequence[str | None], thresholds: Sequence[float | None]) -> str:
    """Return the gate, how many layers may replay, and the range of their thresholds; None: a layer never replays."""
    if not any(gates):
        return "none: the dense decoder"
    values = sorted(v for gate, v in zip(gates, thresholds, strict=True) if gate is not None and v is not None)
    ends = " to ".join(dict.fromkeys(f"{value:.4g}" for value in (*values[:1], *values[-1:])))
    limits = f", threshold {ends}" if ends else ""
    return f"{next(filter(None, gates))} in {len(values)} of {len(gates)} layers{limits}"


def explain(sections: Sections, layer: int | None = None) -> str:
    """Return per layer what was matched and where, what replay inserted, what is cached and offloaded, and why.

    Raises:
        InputError: the decoder has no layer of this number.
    """
    config, layers = sections.decoder.config, sections.layers.layers
    if layer is not None:
        layer = whole("the layer", layer, 0)
        if layer >= len(layers):
            raise InputError(f"there is no layer {layer}", hint=f"layers are 0 .. {len(layers) - 1}")
    rows = rows_text(config.batch_size, config.rows)
    sizes = f"hidden {config.hidden_size}, {rows}, {config.max_seq_len} positions"
    head = f"decoder of {count_text(config.num_layers, 'layer')}, {sizes}, {config.tokens_per_frame} tokens per frame\n"
    if (order := order_text(sections.options)) != RASTER:
        head += f"order: {order}\n"
    head += f"pipeline: {sections.pipeline.passes}\n"
    texts: list[str] = []
    for part in layers if layer is None else [layers[layer]]:
        own = [t for t in sections.decoder.state if t.layer == part.layer]
        offload = _offload(sections.accelerator, part.layer, f"layer_{part.layer}")
        used = sections.thresholds_in_use[part.layer]
        texts.append(_layer(part, own, config.tokens_per_frame, used) + offload)
    if layer is None and (rest := _offload(sections.accelerator, None, None)):
        texts.append(f"outside of the layers:\n{rest}")
    return head + _step(sections.accelerator) + _sparse(sections) + _windows(sections) + "\n".join(texts)


@dataclass(frozen=True)
class OwnWindow:
    """A layer that sees the last `window` tokens only, over caches of `cache_rows` rows."""

    layer: int
    window: int
    cache_rows: int


def _sparse(sections: Sections) -> str:
    """Return a line about sparse attention; empty where attention is to all positions."""
    config = sections.decoder.config
    ring = config.ring
    if ring is None:
        return ""
    kept, full = kv_bytes(sections)
    where = "inside the cache" if ring.positions == "cache" else "absolute"
    return (
        f"  sparse    {ring.sinks} sinks and the last {ring.window} tokens, rotary positions {where}; "
        f"{ring.capacity} rows of keys and values instead of {config.max_seq_len}, "
        f"{size_text(kept)} instead of {size_text(full)}\n"
    )


def own_windows(sections: Sections) -> list[OwnWindow]:
    """Return the layers whose model sees a sliding window only, where sparse attention does not bound them more."""
    ring = sections.decoder.config.ring
    option = None if ring is None else (ring.sinks, ring.window)
    sites = ((s.layer, s.attention) for s in sections.layers.layers)
    bounded = ((layer, a) for layer, a in sites if (a.sinks, a.window) != option)
    return [OwnWindow(layer, a.window, a.cache_rows) for layer, a in bounded if a.window is not None]


def _windows(sections: Sections) -> str:
    """Return lines about the model's own windows; layers that are alike share a line."""
    alike: dict[tuple[int, int], list[int]] = {}
    for one in own_windows(sections):
        alike.setdefault((one.window, one.cache_rows), []).append(one.layer)
    longest = sections.decoder.config.max_seq_len
    return "".join(
        f"  window    the last {window} tokens in layers {', '.join(map(str, layers))}, as the model has it; "
        f"{rows} rows of keys and values instead of {longest}\n"
        for (window, rows), layers in alike.items()
    )


def kv_bytes(sections: Sections) -> tuple[int, int]:
    """Return the bytes of the key and value caches, and of caches of max_seq_len rows."""
    decoder = sections.decoder
    caches = [s for s in decoder.state if s.role in ATTENTION_ROLES]
    return sum(s.nbytes for s in caches), sum(s.nbytes // s.shape[2] * decoder.config.max_seq_len for s in caches)


def _step(accelerator: AcceleratorSection | None) -> str:
    """Return a line about a launch of the accelerator, where it runs whole decode steps."""
    if accelerator is None or accelerator.step is None:
        return ""
    return (
        f"  offload   the whole decode step, one launch per token: {accelerator.step.instructions} instructions of "
        f"{accelerator.table}; the host embeds and samples; a position of a prompt is a launch, too\n"
    )


def _offload(accelerator: AcceleratorSection | None, layer: int | None, mlp: str | None) -> str:
    """Return lines about the accelerator's and the host's part of one layer (None: outside of the layers)."""
    if accelerator is None:
        return ""
    whole = accelerator.step is not None
    one, rows = ("one instruction", "all rows") if whole else ("one call", "all rows, sequenced by the host")
    lines, controller = list[str](), accelerator.controller
    if layer in controller.gated_layers:
        text = "the TAS unit decides from q and the cached key; threshold, chain limit and coupling are"
        lines.append(f"  offload  gate: {text} in the DRS table (version {controller.table_version})")
    if mlp is not None:
        lines.append(f"  offload  {mlp}: the MLP, {one}, rows by the DRS table")
    for call in accelerator.linears:
        if call.layer == layer:
            channels = " + ".join(str(n) for n in call.channels)
            lines.append(f"  offload  {call.name}: {', '.join(call.paths)}; {call.inputs} -> {channels}, {one}, {rows}")
    if f"layer_{layer}.draft" in accelerator.design.drafts:
        lines.append(f"  offload  layer_{layer}.draft: the draft, {one}, two rows of the array for each that replays")
    lines += [f"  on host  {item.path}: {item.reason}" for item in accelerator.on_host if item.layer == layer]
    return "".join(f"{line}\n" for line in lines)


def _layer(part: LayerSite, state: Sequence[State], stride: int, threshold: float | None) -> str:
    attention, mlp, replay = part.attention, part.mlp, part.replay
    product = " * linear" if mlp.gated else ""
    lines = [
        f"layer {part.layer}: {part.module_path} ({part.source})",
        f"  found    attention {attention.node}: {attention.num_heads} query heads, {attention.num_kv_heads} key/value "
        f"heads of {attention.head_dim}, scale {attention.scale:.6g}; query {attention.query}, "
        f"key cache {attention.key_cache}",
        f"  found    MLP {mlp.input} -> {mlp.output}: linear -> {mlp.activation}{product} -> linear, "
        f"{mlp.hidden} -> {mlp.intermediate} -> {mlp.hidden}; "
        f"closed by {part.exit} = {part.residual} + {part.region_output}",
    ]
    if part.parallel:
        lines.append(f"  found    attention and MLP in parallel: both read {part.entry}")
    if replay is None:
        lines.append("  inserted nothing: this layer was compiled without a threshold, so its MLP always computes")
    else:
        lines += _replay_lines(part, replay, stride, threshold)
    if replay is not None and replay.gate_units is not None:
        size = weight_bytes(replay.gate_units, mlp.hidden)
        names = ", ".join(gate_parameter(name, part.layer) for name in PARAMETERS)
        lines.append(f"  weights  of the gate, {replay.gate_units} units: {names}, {size_text(size)}")
    if replay is not None and replay.draft is not None:
        read = f"a row that replays reads {part.draft_share:.1%} of the MLP's weights"
        lines.append(f"  draft    {replay.draft}: {read}")
    lines += [f"  state    {s.name}: {s.dtype} {list(s.shape)}, {size_text(s.nbytes)}, {s.role}" for s in state]
    return "\n".join(lines) + "\n"


def _replay_lines(part: LayerSite, replay: ReplayFacts, stride: int, threshold: float | None) -> list[str]:
    layer, gate = part.layer, gate_named(replay.gate, replay.heads, rotary=replay.rotary)
    around = "MLP, and its norm where attention reads another" if part.parallel else "norm and MLP"
    if gate.caches_input:
        around = "MLP (the gate reads the norm before it)"
    read = f"query {part.attention.query}, {stride} positions back, " if gate.reads_query else ""
    kept = f", and keeps the MLP input of every computed visit (gate_cache_{layer})" if gate.caches_input else ""
    rule = "never replaying" if threshold is None else f"replaying at a score {gate.comparison.value} {threshold:g}"
    if threshold != replay.threshold:
        rule += f" as calibrated, compiled with {replay.threshold:g}"
    gets = "keeps the MLP output of" if replay.draft is None else "gets the draft's output, and what is left of that of"
    return [
        f"  inserted gate {gate.name}: {gate.describe()}; {read}"
        f"{rule}{kept}; "
        f"cond around {around} (replay_branch_{layer} | compute_branch_{layer})",
        f"  why      a row whose score passes {gets} {stride} forwards ago; the MLP is skipped when every row does",
    ]


def write_report(writer: ArtifactWriter, sections: Sections) -> None:
    """Write sizes, memory, MLP share and the replay ceiling of an artifact."""
    writer.write_text(REPORT_JSON, json.dumps(build_report(sections), sort_keys=True, indent=2) + "\n")


def build_report(sections: Sections) -> dict[str, Any]:
    """Return the report as JSON."""
    config, data = sections.decoder.config, sections.model_dump(mode="json")
    forwards = config.max_seq_len - 2
    share = mlp_weight_share(sections)
    ceiling = max(0.0, (forwards - config.tokens_per_frame) / forwards) if forwards > 0 else 0.0
    return {
        "decoder": data["decoder"]["config"],
        "target": sections.target.name,
        "quant": sections.options.quant,
        "pipeline": sections.pipeline.passes,
        "layers": data["layers"]["layers"],
        "weight_bytes": sections.decoder.weight_bytes,
        "state_bytes": sections.decoder.state_bytes(),
        "rewind_bytes_per_token": sections.decoder.token_bytes(),
        "gate": _gate(sections),
        "sparse_attention": _report_sparse(sections),
        "windows": [asdict(window) for window in own_windows(sections)],
        "mlp_share_of_block_weights": share,
        "max_replay_ratio": ceiling,
        "ceiling_speedup_at_max_replay": 1 / (1 - share * ceiling),
        "accelerator": data["accelerator"],
    }


def _gate(sections: Sections) -> dict[str, Any] | None:
    """Return the gate's definition, its cache beside the MLP outputs, and its weights; None: a dense decoder."""
    options = sections.options.replay
    if options is None:
        return None
    gate, gated = gate_named(options.gate), [(s.replay, s.mlp.hidden) for s in sections.layers.layers]
    learned = [(r.gate_units, hidden) for r, hidden in gated if r is not None and r.gate_units is not None]
    return {
        "name": gate.name,
        "replays_where": f"score {gate.comparison.value} threshold",
        "cache_bytes": sections.decoder.state_bytes().get(StateRole.GATE_CACHE, 0),
        "weights": None if options.gate_weights is None else options.gate_weights.name,
        "weight_bytes": sum(weight_bytes(units, hidden) for units, hidden in learned),
        "units": [units for units, _ in learned],
        "draft": None if options.draft is None else options.draft.name,
        "draft_share": sum(s.draft_share for s in sections.layers.layers) / len(sections.layers.layers),
        "max_chain": options.max_chain,
        "refresh_every": options.refresh_every,
    }


def _report_sparse(sections: Sections) -> dict[str, Any] | None:
    """Return the positions that attention sees, and the bytes of its caches; None where it sees all positions."""
    ring = sections.decoder.config.ring
    if ring is None:
        return None
    kept, full = kv_bytes(sections)
    options = {name: getattr(ring, name) for name in ("sinks", "window", "positions")}
    return options | {"cache_rows": ring.capacity, "kv_bytes": kept, "kv_bytes_of_full_cache": full}


def mlp_weight_share(sections: Sections) -> float:
    """Return the share of the MLPs in the weights of all blocks (as docs/explanation/replay.md counts)."""
    layers = sections.layers.layers
    mlp = sum(s.mlp.hidden * s.mlp.intermediate * (3 if s.mlp.gated else 2) for s in layers)
    heads = [(s.mlp.hidden, s.attention) for s in layers]
    attention = sum(2 * hidden * (a.num_heads + a.num_kv_heads) * a.head_dim for hidden, a in heads)
    return mlp / (mlp + attention)
