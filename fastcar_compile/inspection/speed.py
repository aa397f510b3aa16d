"""The estimate of a decode step: figures, shares of the units, resources, time line."""

from __future__ import annotations

from fastcar_compile.artifact.manifest import Manifest
from fastcar_compile.errors import UserError
from fastcar_compile.estimate.artifact import design_of, workload_of
from fastcar_compile.estimate.system import Estimate, estimate
from fastcar_compile.inspection.models import Fact, OffloadLine, Span, SpeedPage
from fastcar_compile.inspection.replay import Decisions


def speed_page(manifest: Manifest, decisions: Decisions | None) -> SpeedPage:
    """Return what `fastcar estimate` says of an artifact on its own board; why not, where there is no prediction.

    Args:
        decisions: recorded, bool [forwards, layers, rows]; None: nothing replays.
    """
    target, offload = manifest.target, tuple(offload_lines(manifest))
    if target.kind == "cpu":
        what = (
            f"The target {target.name} is a CPU, and the hardware model predicts boards: `fastcar estimate --target`."
        )
        return SpeedPage(missing=what)
    try:
        design = design_of(manifest, target)
        result = estimate(workload_of(manifest), target, decisions=decisions, design=design)
    except UserError as error:
        return SpeedPage(missing=f"There is no prediction: {error.what}.", offload=offload)
    return SpeedPage(
        facts=tuple(_facts(result, recorded=decisions is not None)),
        seconds=result.seconds_per_step,
        shares=result.shares,
        resources={name: (float(r["used"]), float(r["limit"])) for name, r in result.resources.items()},
        spans=tuple(Span.model_validate(span) for span in result.time_line),
        offload=offload,
    )


def offload_lines(manifest: Manifest) -> list[OffloadLine]:
    """Return the calls of the accelerator, and the linears that stay on the host; nothing where there is none."""
    accelerator = manifest.accelerator
    if accelerator is None:
        return []
    design, spec = accelerator.design, accelerator.design.spec
    mlp = OffloadLine(
        name="MLPs of the layers",
        modules=tuple(layer.module_path for layer in manifest.layers.layers[:1]),
        shape=f"{spec.hidden} → {spec.intermediate} → {spec.hidden}",
        stream_bytes=design.stream_bytes,
        cycles=design.cycles_estimate,
    )
    calls = [
        OffloadLine(
            name=call.name,
            modules=call.paths,
            shape=f"{call.inputs} → {' + '.join(map(str, call.channels))}",
            stream_bytes=design.linear_stream_bytes[call.name],
            cycles=design.linear_cycles_estimate[call.name],
        )
        for call in accelerator.linears
    ]
    kept = [OffloadLine(name="on the host", modules=(h.path,), reason=h.reason) for h in accelerator.on_host]
    return [mlp, *calls, *kept]


def _facts(result: Estimate, *, recorded: bool) -> list[Fact]:
    decided = "recorded decisions" if recorded else "nothing replays"
    design = result.design
    return [
        Fact(label="predicted", value=f"{result.tokens_per_second:,.1f} tokens/s", group="key"),
        Fact(label="one step", value=f"{result.seconds_per_step * 1e3:.3f} ms", group="key"),
        Fact(label="bound by", value=result.bound_by, group="key"),
        Fact(label="over dense", value=f"{result.speedup_over_dense:.2f}x", group="key"),
        Fact(
            label="workload", value=f"{result.quant}, batch {result.batch}, attention reads {result.attended} positions"
        ),
        Fact(label="replay", value=f"{result.replay_ratio:.1%} of all MLPs ({decided})"),
        Fact(label="in the fabric", value=result.offload),
        Fact(
            label="engine",
            value=f"{design['ports']} weight ports, {design['lanes']} lanes, {design['spec']['cores']} cores",
        ),
        Fact(label="bandwidth", value=f"{result.bandwidth_utilisation:.1%} of the memory's peak"),
        Fact(label="energy", value=f"{result.energy_per_token_j:.4f} J per token, {result.power_w:.1f} W"),
    ]
