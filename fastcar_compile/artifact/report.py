"""report.json: sizes, memory, the share of the MLPs, the largest possible speedup."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fastcar_compile.artifact.explain import kv_bytes, own_windows
from fastcar_compile.artifact.layout import REPORT_JSON
from fastcar_compile.artifact.manifest import Sections
from fastcar_compile.artifact.sections import StateRole
from fastcar_compile.artifact.writer import ArtifactWriter
from fastcar_compile.gates import gate_named
from fastcar_compile.gates.weights import weight_bytes


def write_report(writer: ArtifactWriter, sections: Sections) -> None:
    """Write sizes, memory, MLP share and the replay ceiling of an artifact."""
    writer.write_text(REPORT_JSON, json.dumps(build_report(sections), sort_keys=True, indent=2) + "\n")


def build_report(sections: Sections) -> dict[str, Any]:
    """Return the report as JSON."""
    config, data = sections.decoder.config, sections.model_dump(mode="json")
    forwards = config.max_seq_len - 2
    state = {str(r): sum(s.nbytes for s in sections.decoder.state if s.role == r) for r in StateRole}
    share = mlp_weight_share(sections)
    ceiling = max(0.0, (forwards - config.tokens_per_frame) / forwards) if forwards > 0 else 0.0
    return {
        "decoder": data["decoder"]["config"],
        "target": sections.target.name,
        "quant": sections.options.quant,
        "pipeline": sections.pipeline.passes,
        "layers": data["layers"]["layers"],
        "weight_bytes": sections.decoder.weight_bytes,
        "state_bytes": {k: v for k, v in state.items() if v},
        "gate": _gate(sections),
        "sparse_attention": _sparse(sections),
        "windows": [asdict(window) for window in own_windows(sections)],
        "mlp_share_of_block_weights": share,
        "max_replay_ratio": ceiling,
        "ceiling_speedup_at_max_replay": 1 / (1 - share * ceiling),
        "accelerator": data["accelerator"],
    }


def _gate(sections: Sections) -> dict[str, Any] | None:
    """Return the gate's definition, what it caches beside the MLP outputs and its weights; None: a dense decoder."""
    options = sections.options.replay
    if options is None:
        return None
    gate = gate_named(options.gate)
    learned = [
        (layer.replay.gate_units, layer.mlp.hidden)
        for layer in sections.layers.layers
        if layer.replay is not None and layer.replay.gate_units is not None
    ]
    return {
        "name": gate.name,
        "replays_where": f"score {gate.comparison.value} threshold",
        "cache_bytes": sum(s.nbytes for s in sections.decoder.state if s.role == StateRole.GATE_CACHE),
        "weights": None if options.gate_weights is None else options.gate_weights.name,
        "weight_bytes": sum(weight_bytes(units, hidden) for units, hidden in learned),
        "units": [units for units, _ in learned],
        "max_chain": options.max_chain,
        "refresh_every": options.refresh_every,
    }


def _sparse(sections: Sections) -> dict[str, Any] | None:
    """Return what attention sees, and the bytes of its caches; None where attention is to all positions."""
    ring = sections.decoder.config.ring
    if ring is None:
        return None
    kept, full = kv_bytes(sections)
    return {
        "sinks": ring.sinks,
        "window": ring.window,
        "positions": ring.positions,
        "cache_rows": ring.capacity,
        "kv_bytes": kept,
        "kv_bytes_of_full_cache": full,
    }


def mlp_weight_share(sections: Sections) -> float:
    """Return the share of the MLPs in the weights of all blocks (docs/explanation/replay.md counts LLaMA-2-7B so)."""
    layers = sections.layers.layers
    mlp = sum(s.mlp.hidden * s.mlp.intermediate * (3 if s.mlp.gated else 2) for s in layers)
    heads = [(s.mlp.hidden, s.attention) for s in layers]
    attention = sum(2 * hidden * (a.num_heads + a.num_kv_heads) * a.head_dim for hidden, a in heads)
    return mlp / (mlp + attention)
