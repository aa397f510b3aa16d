"""The onnxruntime backend: the artifact's ONNX model, state handed from call to call by name."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from weakref import WeakSet

import ml_dtypes
import numpy as np

from fastcar_compile.artifact.layout import weight_files
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection, OnnxSection
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.backends.base import Array, BackendOptions, Numbers, ValueStepper, each_threshold
from fastcar_compile.runtime.guard import thread_count

onnxruntime: Any = import_module("onnxruntime")  # it has no types
_value = onnxruntime.OrtValue.ortvalue_from_numpy
_typed_value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type

_BFLOAT16 = 16
"""bfloat16 in onnx.TensorProto; a session has no onnx."""

_NOWHERE = "/proc/self/no-such-folder"
"""Folder in which onnxruntime looks for weights that are not in memory; by default it takes the working directory."""

_SPIN_US = "100"
"""Microseconds that an idle thread waits for work before it sleeps: about the time between two parallel operators.
onnxruntime's own default is longer than a decode step, for which it would take a core from other sessions."""


_open: WeakSet[Any] = WeakSet()
"""The inference sessions of this process."""


def _keep_open_in_child() -> None:
    """Keep the parent's sessions from ever being closed in a forked child, where closing one waits for its threads.

    Their threads sleep, and a child does not have these threads.
    """
    for session in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


os.register_at_fork(after_in_child=_keep_open_in_child)


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> OrtStepper:
    """Open an artifact in onnxruntime; see OpenStepper."""
    section = artifact.manifest.onnx
    if section is None:
        if artifact.manifest.options.numerics == "exact":
            what = "this artifact has exact numerics, and onnxruntime rounds quantised linears in its own way"
            raise BackendError(what, hint="use backend 'cpu' or 'eager', or compile with numerics='native'")
        raise BackendError("this artifact has no ONNX model", hint="compile the model again")
    weights = {name: artifact.files.mapped(name) for name in weight_files(artifact.manifest.files)}
    names = [name for name in (section.model, section.context) if name is not None]
    model, *context = (OnnxModel(name, artifact.files.data(name), weights) for name in names)
    return OrtStepper(model, artifact.manifest.decoder, options.threads, *context)


@dataclass(frozen=True)
class OnnxModel:
    """A model.

    Args:
        name: name of its file, for error texts. content: bytes of the file.
        weights: files that may hold the weights, uint8 [N], by the names that the model has for them.
    """

    name: str
    content: bytes = field(repr=False)
    weights: Mapping[str, Array] = field(default_factory=dict[str, Array], repr=False)


class OrtStepper(ValueStepper):
    """Decode through onnxruntime on the CPU; the prompt goes through the same graph, token by token.

    Args:
        model: the decode step. threads: None: every core that the process may use.
        context: the model that makes the states that cross-attention reads.

    Raises:
        BackendError: onnxruntime cannot load a model.
    """

    prefill_chunk = 1

    def __init__(
        self, model: OnnxModel, decoder: DecoderSection, threads: int | None, context: OnnxModel | None = None
    ) -> None:
        self._session = _loaded(model, threads)
        self._context = None if context is None else _loaded(context, threads)
        self._inputs: set[str] = {i.name for i in self._session.get_inputs()}
        self._outputs: list[str] = [o.name for o in self._session.get_outputs()]
        super().__init__(decoder.config, decoder.state)

    def _value(self, array: Array) -> Any:
        # onnxruntime has to be told the type of an array that numpy itself lacks.
        return _value(array) if array.dtype.isbuiltin == 1 else _typed_value(array, _BFLOAT16)

    def _array(self, value: Any) -> Array:
        if value.element_type() != _BFLOAT16:
            return value.numpy()
        bits = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_uint16))
        return np.ctypeslib.as_array(bits, value.shape()).view(ml_dtypes.bfloat16)

    def _contexts(self, given: Mapping[str, Array]) -> Sequence[Any]:
        assert self._context is not None
        feeds = {i.name: _value(given[i.name]) for i in self._context.get_inputs()}
        return self._context.run_with_ort_values(list(self._context_state), feeds)

    def _forward(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> dict[str, Array]:
        given = {"position": np.atleast_1d(position), "step": np.atleast_1d(step)}
        given |= {self._config.input_name: inputs, "thresholds": each_threshold(self._config, thresholds)}
        feeds = {k: _value(v) for k, v in given.items() if k in self._inputs}
        feeds |= {k: v for k, v in (self._state | self._context_state).items() if k in self._inputs}
        values = self._session.run_with_ort_values(self._outputs, feeds)
        results: dict[str, Any] = dict(zip(self._outputs, values, strict=True))
        # States stay OrtValues from call to call: no copy to numpy is made of a cache.
        self._state = {s.name: results.pop(OnnxSection.output_name(s.name)) for s in self._specs}
        return {name: value.numpy() for name, value in results.items()}


def _loaded(model: OnnxModel, threads: int | None) -> Any:
    """Return an inference session. It has its own copy of the weights, and opens no file."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = thread_count(threads)
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", _NOWHERE)
    files = list(model.weights)
    buffers = [model.weights[name] for name in files]
    try:
        options.add_external_initializers_from_files_in_memory(files, buffers, [b.nbytes for b in buffers])
        session = onnxruntime.InferenceSession(model.content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no public base class
        raise BackendError(f"onnxruntime cannot load the model: {error}", where=model.name) from error
    _open.add(session)
    return session


def _exit_at_once() -> None:
    """End a forked child without destructors of libraries: onnxruntime's destructor waits for a thread of the parent.

    Python itself has ended by then: its files are flushed, and the exit status stays.
    """
    # `on_exit` passes the exit status to `_exit`. The handler that was registered last runs first.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)


os.register_at_fork(after_in_child=_exit_at_once)
