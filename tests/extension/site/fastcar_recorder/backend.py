"""Device side: every decode step of the cpu backend is also a line of a file."""

import os
from pathlib import Path
from typing import Any

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends import Array, BackendOptions, Stepper, StepResult
from fastcar_compile.runtime.backends.cpu import open_stepper as open_cpu
from fastcar_recorder.section import RecorderSection

RECORD = "FASTCAR_RECORD"


class RecorderStepper(Stepper):
    """Another stepper, and the file of its decisions: 1 where a layer replayed for every row."""

    def __init__(self, inner: Stepper, record: Path, section: RecorderSection) -> None:
        self._inner, self._record = inner, record
        self.prefill_chunk = inner.prefill_chunk
        record.write_text(" ".join(section.columns) + "\n")

    def reset(self) -> None:
        """Set every state to zero; the record goes on."""
        self._inner.reset()

    def prefill(self, inputs: Array, position: int) -> Array:
        """Run one prefill chunk; nothing is recorded."""
        return self._inner.prefill(inputs, position)

    def decode(self, inputs: Array, position: Any, step: Any, thresholds: Array) -> StepResult:
        """Run one decode forward and record its decisions."""
        result = self._inner.decode(inputs, position, step, thresholds)
        with self._record.open("a") as file:
            print(*result.decisions.all(1).astype(int), file=file)
        return result


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> RecorderStepper:
    """Open an artifact that the recorder's emitter saw; see OpenStepper."""
    section = artifact.manifest.extension("recorder", RecorderSection)
    if section is None:
        raise BackendError("this artifact names no columns", hint="compile it where fastcar-recorder is installed")
    return RecorderStepper(open_cpu(artifact, options), Path(os.environ[RECORD]), section)
