"""The tables of the inspection page: layers and their replays, the memories, and the estimate of a decode step."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.artifact.accelerator_section import AcceleratorSection
from fastcar_compile.artifact.explain import rows_text
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.design.memory import HOST_RESERVE, bank_map, capacity
from fastcar_compile.codegen.hls.model.question import SYNTHETIC_FORWARDS, Draw, ask, draw_decisions
from fastcar_compile.codegen.hls.model.system import Estimate, estimate_question, trace_events
from fastcar_compile.codegen.hls.model.workload import design_of, program_of, workload_of
from fastcar_compile.config.targets import MEASURED
from fastcar_compile.errors import UserError, count_text, size_text
from fastcar_compile.gates import gate_named
from fastcar_compile.ir.tensor_files import Array, TensorSpec
from fastcar_compile.ir.types import LayerSite, ReplayFacts
from fastcar_compile.report.page.graphs import Json, facts_of, given

Decisions = NDArray[np.bool_]

DIGITS = 4
"""Decimals of a share on the page."""


def replay_page(manifest: Manifest, decisions: Decisions | None) -> Json:
    """Return every layer, the gate's facts, and the heat map of recorded decisions bool [forwards, layers, rows]."""
    stride = manifest.decoder.config.tokens_per_frame
    heat = None if decisions is None else heat_map(decisions, stride)
    measured = _measured(decisions, stride)
    layers = [_layer(manifest, part, measured) for part in manifest.layers.layers]
    return {"facts": _replay_facts(manifest, heat), "layers": layers, "heat": heat}


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


def _replay_facts(manifest: Manifest, heat: Json | None) -> list[Json]:
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


_CONNECTION = re.compile(r"^sp=(\w+)_1\.(\w+):(\S+)$", re.MULTILINE)
"""A line of `link.cfg`: kernel, argument, port or banks."""


def memory_page(
    manifest: Manifest, arrays: Mapping[str, Array], layer_of: Mapping[str, int | None], link: str = ""
) -> Json:
    """Return the memory map: memories and banks, buffers of the kernels, state, parameters.

    Args:
        arrays: every parameter of the rewritten graph. layer_of: parameter -> its layer.
        link: text of the linker's configuration, which connects the arguments of kernels to memory.
    """
    accelerator = manifest.accelerator
    states = [s.model_dump(mode="json", exclude={"sinks"}) | {"bytes": s.nbytes} for s in manifest.decoder.state]
    return {
        "bars": [_whole(manifest), *([] if accelerator is None else _banks(manifest, accelerator))],
        "buffers": [] if accelerator is None else [*_buffers(accelerator, link)],
        "state": states,
        "weights": [_weight(name, array, layer_of.get(name)) for name, array in sorted(arrays.items())],
    }


def _whole(manifest: Manifest) -> Json:
    """Return parameters and state of the decoder, against the memory that it runs from."""
    target, sizes = manifest.target, {"weights": manifest.decoder.weight_bytes} | manifest.decoder.state_bytes()
    pieces = [{"name": name, "bytes": size} for name, size in sizes.items()]
    if target.kind == "cpu":
        return given(name=target.name, note="the machine's own memory", pieces=pieces)
    names = ", ".join(memory.name for memory in target.weight_memories)
    reserve = f"without {size_text(HOST_RESERVE)} for the operating system"
    note = reserve if target.shares_memory else "memory of the card"
    return given(name=f"{target.name}: {names}", note=note, capacity=capacity(target), pieces=pieces)


def _banks(manifest: Manifest, accelerator: AcceleratorSection) -> list[Json]:
    """Return the weight ports: the bank behind each, its part of the weight streams, and of caches."""
    design = Design.of(accelerator.design)
    ports = design.axi_weight_ports
    section = -(-design.weight_bytes // ports)
    banks = bank_map(manifest.target, ports)
    names = [f"weight port {port}" for port in range(ports)]
    if banks is not None:
        names = [f"{name}: {tag}" for name, tag in zip(names, banks.weights, strict=True)]
    room = None if banks is None else banks.bank_bytes
    # The buffers of all ports have one size.
    sizes = [a.bytes for kernel in accelerator.kernels for a in kernel.arguments if a.name in kernel.caches()[:1]]
    pieces = [{"name": "weight stream", "bytes": section}]
    pieces += [{"name": "keys and values", "bytes": size} for size in sizes]
    note = "a bank of its own" if room is not None else "a part of the same memory"
    return [given(name=name, note=note, capacity=room, pieces=pieces) for name in names]


def _buffers(accelerator: AcceleratorSection, link: str) -> Iterator[Json]:
    ports = {(kernel, argument): tag for kernel, argument, tag in _CONNECTION.findall(link)}
    for kernel, a in ((part.name, argument) for part in accelerator.kernels for argument in part.arguments):
        if a.kind != "scalar":
            port = ports.get((kernel, a.name), "")
            yield {"name": a.name, "kernel": kernel, "direction": a.kind, "port": port, "bytes": a.bytes}


def _weight(name: str, array: Array, layer: int | None) -> Json:
    spec = TensorSpec.of(array)
    return given(name=name, dtype=spec.dtype.name, shape=spec.shape, bytes=spec.nbytes, role="weight", layer=layer)


@dataclass(frozen=True)
class Replays:
    """The replay decisions of a prediction. decisions: None: no row replays. recorded: a session made them."""

    decisions: Decisions | None
    recorded: bool
    text: str


def replays_of(manifest: Manifest, recorded: Decisions | None) -> Replays:
    """Return recorded decisions; else decisions drawn for the shares of the calibration; else no decisions.

    A session records decisions of tokens. Where a video has several rows, which tokens shared a decode step is not
    known, so each row is drawn by itself for the recorded shares.
    """
    stored, config = manifest.thresholds, manifest.decoder.config
    if recorded is not None and config.decode_rows == config.batch_size:
        return Replays(recorded, True, "recorded decisions")
    if recorded is not None:
        origin, shares = "the recorded decisions", [float(share) for share in recorded.mean((0, 2))]
    elif stored is not None:
        origin, shares = "the calibration", [*stored.per_layer]
    else:
        return Replays(None, False, "nothing replays")
    options = manifest.options.replay
    kind = Draw.PAIRS if options is not None and options.couple_cfg else Draw.INDEPENDENT
    shape = (SYNTHETIC_FORWARDS, 1, config.decode_rows)
    layers = [draw_decisions(shape, share, kind, seed=layer) for layer, share in enumerate(shares)]
    return Replays(np.concatenate(layers, 1), False, f"drawn for the shares of {origin}")


def speed_page(artifact: StoredArtifact, decisions: Decisions | None) -> Json:
    """Return the prediction of `fastcar estimate` for an artifact on its own board, or why it has no prediction.

    Args:
        decisions: recorded decisions, bool [forwards, layers, rows]; None: the shares of the calibration, if any.
    """
    manifest, target, config = artifact.manifest, artifact.manifest.target, artifact.manifest.decoder.config
    offload = offload_lines(manifest)
    if target.kind == "cpu":
        return {"missing": f"The target {target.name} is a CPU, which is measured: {MEASURED}."}
    replays = replays_of(manifest, decisions)
    try:
        work, design, program = workload_of(manifest), design_of(manifest, target), program_of(artifact)
        question = ask(
            work, target, decisions=replays.decisions, design=design, recorded=replays.recorded, program=program
        )
        result = estimate_question(question)
    except UserError as error:
        return {"missing": f"There is no prediction: {error.what}.", "offload": offload}
    return {
        "facts": _speed_facts(result, replays.text, rows_text(config.batch_size, config.rows)),
        "seconds": result.seconds_per_step,
        "shares": result.shares,
        "resources": {name: (float(r["used"]), float(r["limit"])) for name, r in result.resources.items()},
        "offload": offload,
        "clock_hz": question.design.budget.clock_mhz * 1e6,
        "steps": [*step_lines(result, replays.text)],
        "unknown": replays.decisions is None and manifest.options.replay is not None,
    }


def step_lines(result: Estimate, decided: str) -> Iterator[Json]:
    """Yield the dense step; then, where a row replays, the step with replay.

    Its events are in Chrome's trace format, as `fastcar estimate --time-line` writes them.

    Args:
        decided: origin of the decisions.
    """
    lines = [("dense", "The decoder compiled without replay.", 0.0, result.dense)]
    if ratio := result.replay_ratio:
        note = f"{decided[0].upper()}{decided[1:]}. The step nearest to the mean is shown."
        lines.append((f"{ratio:.1%} replay", note, ratio, result.step))
    for title, note, replay, step in lines:
        yield {"title": title, "note": note, "replay": replay, "seconds": step.seconds, "events": trace_events(step)}


def offload_lines(manifest: Manifest) -> list[Json]:
    """Return the calls of the accelerator, and the linears that stay on the host; empty where it has no accelerator."""
    accelerator = manifest.accelerator
    if accelerator is None:
        return []
    design, spec = accelerator.design, accelerator.design.spec
    mlp = given(
        name="MLPs of the layers",
        modules=tuple(layer.module_path for layer in manifest.layers.layers[:1]),
        shape=f"{spec.hidden} → {spec.intermediate} → {spec.hidden}",
        stream_bytes=design.stream_bytes,
        cycles=design.cycles_estimate,
    )
    calls = [
        given(
            name=call.name,
            modules=call.paths,
            shape=f"{call.inputs} → {' + '.join(map(str, call.channels))}",
            stream_bytes=design.linear_stream_bytes[call.name],
            cycles=design.linear_cycles_estimate[call.name],
        )
        for call in accelerator.linears
    ]
    if accelerator.step is not None:
        count = accelerator.step.instructions
        calls.append(given(name="whole step", modules=(), reason=f"one launch of {count} instructions per token"))
    kept = [given(name="on the host", modules=(h.path,), reason=h.reason) for h in accelerator.on_host]
    return [mlp, *calls, *kept]


def _speed_facts(result: Estimate, decided: str, rows: str) -> list[Json]:
    design = result.design
    key = {
        "predicted": f"{result.tokens_per_second:,.1f} {result.unit}s/s",
        "one step": f"{result.seconds_per_step * 1e3:.3f} ms",
        "bound by": result.bound_by,
        "over dense": f"{result.speedup_over_dense:.2f}x",
    }
    further = {
        "workload": f"{result.quant}, {rows}, attention reads {result.attended} positions",
        "replay": f"{result.replay_ratio:.1%} of all MLPs ({decided})",
        "in the fabric": result.offload,
        "engine": f"{count_text(design['ports'], 'weight port')}, {count_text(design['lanes'], 'lane')}, "
        f"{count_text(design['spec']['cores'], 'core')}",
        "bandwidth": f"{result.bandwidth_utilisation:.1%} of the memory's peak",
        "energy": f"{result.energy_per_token_j:.4f} J per {result.unit}, {result.power_w:.1f} W",
    }
    return facts_of(key, "key") + facts_of(further)
