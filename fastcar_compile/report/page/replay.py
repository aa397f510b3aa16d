"""The replay sites of an artifact: layers, thresholds, and recorded decisions as a heat map."""

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.gates import gate_named
from fastcar_compile.ir.types import LayerSite, ReplayFacts
from fastcar_compile.report.page.models import Json, facts_of, given

Decisions = NDArray[np.bool_]

DIGITS = 4
"""Decimals of a share on the page."""


def replay_page(manifest: Manifest, decisions: Decisions | None) -> Json:
    """Return every layer, the gate's facts, and the heat map of recorded decisions bool [forwards, layers, rows]."""
    stride = manifest.decoder.config.tokens_per_frame
    heat = None if decisions is None else heat_map(decisions, stride)
    measured = _measured(decisions, stride)
    layers = [_layer(manifest, part, measured) for part in manifest.layers.layers]
    return {"facts": _facts(manifest, heat), "layers": layers, "heat": heat}


def heat_map(decisions: Decisions, stride: int) -> Json:
    """Return the shares of the rows that replayed, layers x frames and layers x places of the frame.

    Forward t is place t mod F of frame t / F. The first frame counts in no place, and not in the total.
    """
    forwards, layers, rows = decisions.shape
    shares = decisions.mean(-1)
    frames = [shares[start : start + stride].mean(0) for start in range(0, forwards, stride)]
    later = shares[stride:]
    places = [later[place::stride].mean(0) for place in range(min(stride, len(later)))]
    by_frame, by_place = _by_layer(frames, layers), _by_layer(places, layers)
    total = round(float(later.mean()), DIGITS) if len(later) else None
    sizes = {"forwards": forwards, "stride": stride, "rows": rows}
    return sizes | {"frames": by_frame, "tokens": by_place, "total": total}


def _by_layer(columns: list[NDArray[np.float64]], layers: int) -> list[list[float]]:
    return [[round(float(column[layer]), DIGITS) for column in columns] for layer in range(layers)]


def _measured(decisions: Decisions | None, stride: int) -> list[float] | None:
    """Return the share of every layer that replayed, of the forwards that may replay; None: no forward may replay."""
    if decisions is None or len(decisions) <= stride:
        return None
    return [round(float(share), DIGITS) for share in decisions[stride:].mean((0, 2))]


def _layer(manifest: Manifest, part: LayerSite, measured: list[float] | None) -> Json:
    attention, mlp, replay, stored = part.attention, part.mlp, part.replay, manifest.thresholds
    heads = f"{attention.num_heads} query heads, {attention.num_kv_heads} key/value heads of {attention.head_dim}"
    kind = f"{mlp.activation}{', gated' if mlp.gated else ''}"
    return given(
        layer=part.layer,
        module=part.module_path,
        source=part.source,
        attention=heads,
        mlp=f"{mlp.hidden} → {mlp.intermediate} → {mlp.hidden}, {kind}",
        gate="" if replay is None else replay.gate,
        replays=replay is not None,
        threshold="never replays" if replay is None else _threshold(replay, replay.threshold),
        draft=""
        if replay is None or replay.draft is None
        else f"{replay.draft}: {part.draft_share:.1%} of the weights",
        calibrated="" if stored is None or replay is None else _stored(replay, stored.values[part.layer]),
        expected=None if stored is None else round(stored.per_layer[part.layer], DIGITS),
        measured=None if measured is None else measured[part.layer],
        bytes=manifest.decoder.state_bytes(part.layer),
    )


def _threshold(replay: ReplayFacts, value: float) -> str:
    return f"score {gate_named(replay.gate, replay.heads).comparison.value} {value:.4g}"


def _stored(replay: ReplayFacts, value: float | str | None) -> str:
    return "never replays" if value is None else _threshold(replay, float(value))


def _facts(manifest: Manifest, heat: Json | None) -> list[Json]:
    options, stride = manifest.options.replay, manifest.decoder.config.tokens_per_frame
    if options is None:
        return facts_of({"replay": "none: this is the dense decoder"})
    gate = gate_named(options.gate, rotary=options.rotary)
    facts = {
        "gate": f"{gate.name}: {gate.describe()}",
        "a row replays": f"where its score is {gate.comparison.value} the layer's threshold",
        "it takes": f"the MLP output of {stride} forwards earlier, the same place of the previous frame",
        "replays in a row": f"at most {options.max_chain}" if options.max_chain else "no limit",
    }
    if options.draft is not None:
        facts["it takes"] = f"a draft's output, with what is left of the MLP's of {stride} forwards earlier"
    if options.refresh_every:
        facts["refresh"] = f"one frame in {options.refresh_every} computes"
    if options.couple_cfg:
        facts["guidance"] = "both rows of a pair replay together"
    if (stored := manifest.thresholds) is not None:
        cost = f"{stored.nll / stored.nll_dense:.3f}x the dense NLL" if stored.nll_dense else f"NLL {stored.nll:.4f}"
        facts["calibration"] = f"{stored.goal}: {stored.replay:.1%} replay, {cost}"
        if stored.spared is not None:
            facts["calibration"] += f"; {stored.spared:.1%} of the MLPs' weights are not read, net of the drafts"
    if heat is not None and heat["total"] is not None:
        text = f"{heat['total']:.1%} replay after the first frame; {heat['forwards']} forwards, batch {heat['rows']}"
        facts["recorded"] = text
    return facts_of(facts)
