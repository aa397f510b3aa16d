"""What is counted and predicted of an artifact, without running it."""

from __future__ import annotations

from typing import Any

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.estimate.artifact import design_of, workload_of
from fastcar_compile.estimate.system import estimate

PREDICTED = ("tokens_per_second", "seconds_per_step", "bytes_per_step", "energy_per_token_j", "speedup_over_dense")


def figures(artifact: StoredArtifact) -> dict[str, Any]:
    """Return bytes, and on an FPGA the estimate of the emitted design without replay's share being known."""
    manifest = artifact.manifest
    counted: dict[str, Any] = {
        "artifact_bytes": sum(entry.size for entry in manifest.files.values()),
        "weight_bytes": manifest.decoder.weight_bytes,
        "state_bytes": sum(state.nbytes for state in manifest.decoder.state),
    }
    if manifest.accelerator is None:
        return counted
    found = estimate(workload_of(manifest), manifest.target, design=design_of(manifest, manifest.target))
    predicted = {name: getattr(found, name) for name in PREDICTED}
    resources = {f"resources.{name}": entry["used"] for name, entry in found.resources.items()}
    return counted | {f"predicted.{name}": value for name, value in predicted.items()} | resources
