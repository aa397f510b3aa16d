"""report.json and, from it, report.html."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from fastcar_compile.artifact.explain import kv_bytes
from fastcar_compile.artifact.store import ArtifactWriter
from fastcar_compile.gates import gate_named
from fastcar_compile.gates.weights import weight_bytes
from fastcar_compile.ir.program import DecoderProgram, StateRole


def write_report(writer: ArtifactWriter, program: DecoderProgram, sections: Mapping[str, Any]) -> None:
    """Sizes, memory, MLP share and the replay ceiling of an artifact; JSON first, HTML from it."""
    report = build_report(program, sections)
    writer.write_text("report.json", json.dumps(report, sort_keys=True, indent=2) + "\n")
    environment = Environment(
        loader=PackageLoader("fastcar_compile.artifact"), autoescape=select_autoescape(), trim_blocks=True
    )
    writer.write_text("report.html", environment.get_template("report.html.j2").render(report=report) + "\n")


def build_report(program: DecoderProgram, sections: Mapping[str, Any]) -> dict[str, Any]:
    """The report as JSON."""
    config = program.config
    forwards = config.max_seq_len - 2
    state = {str(r): sum(s.nbytes for s in program.state if s.role == r) for r in StateRole}
    share = mlp_weight_share(program)
    ceiling = max(0.0, (forwards - config.tokens_per_frame) / forwards) if forwards > 0 else 0.0
    return {
        "decoder": sections["decoder"],
        "target": sections["target"]["name"],
        "quant": sections["config"]["quant"],
        "pipeline": sections["pipeline"],
        "sites": sections["sites"],
        "weight_bytes": program.params.nbytes(),
        "state_bytes": {k: v for k, v in state.items() if v},
        "gate": _gate(program, sections["config"]["replay"]),
        "sparse_attention": _sparse(program),
        "mlp_share_of_block_weights": share,
        "max_replay_ratio": ceiling,
        "ceiling_speedup_at_max_replay": 1 / (1 - share * ceiling),
        "accelerator": sections["accelerator"],
    }


def _gate(program: DecoderProgram, replay: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The gate's definition, what it caches beside the MLP outputs and its weights; None for a dense decoder."""
    if replay is None:
        return None
    gate = gate_named(replay["gate"])
    learned = [(s.mlp.hidden, s.replay.gate_units) for s in program.sites if s.replay and s.replay.gate_units]
    extra = sum(s.nbytes for s in program.state if s.role == StateRole.GATE_CACHE)
    return {
        "name": gate.name,
        "replays_where": f"score {gate.comparison.value} threshold",
        "cache_bytes": extra,
        "weights": replay.get("gate_weights"),
        "weight_bytes": sum(weight_bytes(units, hidden) for hidden, units in learned),
        "units": [units for _, units in learned],
        "max_chain": replay["max_chain"],
        "refresh_every": replay["refresh_every"],
    }


def _sparse(program: DecoderProgram) -> dict[str, Any] | None:
    """What attention sees, and the bytes of its caches; None where it is to all positions."""
    ring = program.config.ring
    if ring is None:
        return None
    kept, full = kv_bytes(program.config, program.state)
    return {
        "sinks": ring.sinks,
        "window": ring.window,
        "positions": ring.positions,
        "cache_rows": ring.capacity,
        "kv_bytes": kept,
        "kv_bytes_of_full_cache": full,
    }


def mlp_weight_share(program: DecoderProgram) -> float:
    """Share of the MLPs in the weights of all blocks (docs/explanation/replay.md counts LLaMA-2-7B like this)."""
    mlps, attentions = zip(*((s.mlp, s.attention) for s in program.sites), strict=True)
    mlp = sum(m.hidden * m.intermediate * (3 if m.gated else 2) for m in mlps)
    heads = sum((a.num_heads + a.num_kv_heads) * a.head_dim for a in attentions)
    attention = 2 * program.config.hidden_size * heads
    return mlp / (mlp + attention)
