"""The estimate of a decode step: figures, shares of the units, resources, time lines."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastcar_compile.artifact.explain import rows_text
from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.codegen.hls.model.question import SYNTHETIC_FORWARDS, ask
from fastcar_compile.codegen.hls.model.rows import Draw, draw_decisions
from fastcar_compile.codegen.hls.model.system import Estimate, estimate_question
from fastcar_compile.codegen.hls.model.time_line import trace_events
from fastcar_compile.codegen.hls.model.workload import design_of, program_of, workload_of
from fastcar_compile.config.targets import MEASURED
from fastcar_compile.errors import UserError, count_text
from fastcar_compile.report.page.models import Json, facts_of, given
from fastcar_compile.report.page.replay import Decisions


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
        "facts": _facts(result, replays.text, rows_text(config.batch_size, config.rows)),
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


def _facts(result: Estimate, decided: str, rows: str) -> list[Json]:
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
