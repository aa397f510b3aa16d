"""The onnxruntime backend: the artifact's ONNX model, state handed from call to call by name."""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import ATTENTION_ROLES, DecoderSection, OnnxSection
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.base import Array, BackendOptions, Stepper, StepResult
from fastcar_compile.runtime.threads import thread_count

onnxruntime: Any = import_module("onnxruntime")  # it has no types


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> OrtStepper:
    """Open an artifact in onnxruntime; see OpenStepper."""
    section = artifact.manifest.onnx
    if section is None:
        raise BackendError("this artifact has no ONNX model", hint="compile the model again")
    return OrtStepper(artifact.path / section.model, artifact.manifest.decoder, options.threads)


class OrtStepper(Stepper):
    """Decode through onnxruntime on the CPU; the prompt goes through the same graph, token by token.

    Args:
        model: the .onnx file. threads: None: every core that the process may use.

    Raises:
        BackendError: onnxruntime cannot load the model.
    """

    prefill_chunk = 1

    def __init__(self, model: Path, decoder: DecoderSection, threads: int | None) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = thread_count(threads)
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no public base class
            raise BackendError(f"onnxruntime cannot load the model: {error}", where=model.name) from error
        self._config, self._specs = decoder.config, decoder.state
        self._inputs: set[str] = {i.name for i in self._session.get_inputs()}
        self._outputs: list[str] = [o.name for o in self._session.get_outputs()]
        self.reset()

    def reset(self) -> None:
        """Set every state to zero."""
        value = onnxruntime.OrtValue.ortvalue_from_numpy
        self._state = {s.name: value(np.zeros(s.shape, s.format.numpy)) for s in self._specs}

    def prefill(self, inputs: Array, position: int) -> Array:
        """Run one token; see Stepper.prefill. The replay state that the decode step returns is dropped."""
        kept = {s.name: self._state[s.name] for s in self._specs if s.role not in ATTENTION_ROLES}
        never = np.full(self._config.num_layers, np.inf, np.float32)
        logits = self._run(inputs, position, 0, never)["logits"]
        self._state |= kept
        return logits

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode."""
        found = self._run(inputs, position, step, thresholds)
        return StepResult.of(found["logits"], found.get("decisions"), found.get("scores"), len(thresholds))

    def _run(self, inputs: Array, position: int, step: int, thresholds: Array) -> dict[str, Array]:
        """Return results by name; states are kept, not returned."""
        given = {
            self._config.input_name: inputs,
            "position": np.array([position], np.int64),
            "step": np.array([step], np.int64),
            "thresholds": thresholds,
        }
        feeds = {k: onnxruntime.OrtValue.ortvalue_from_numpy(v) for k, v in given.items() if k in self._inputs}
        feeds |= {k: v for k, v in self._state.items() if k in self._inputs}
        results: dict[str, Any] = dict(
            zip(self._outputs, self._session.run_with_ort_values(self._outputs, feeds), strict=True)
        )
        self._state = {s.name: results.pop(OnnxSection.output_name(s.name)) for s in self._specs}
        return {name: value.numpy() for name, value in results.items()}


def _exit_at_once() -> None:
    """Let a forked child end without the destructors of libraries: onnxruntime's waits for a thread of the parent.

    Python itself has ended by then: its files are flushed, and the exit status stays.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)


os.register_at_fork(after_in_child=_exit_at_once)
