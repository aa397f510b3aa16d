"""The backend webgpu: an artifact's list of dispatches on the adapter that the package `wgpu` finds. No TVM, no torch.

A decode step is one submit. A layer that replays is decided on the GPU: a shader writes how many workgroups the MLP's
dispatches have, 0 where all rows replay. The host reads logits, decisions and scores, once a step.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any

import numpy as np

from fastcar_compile.artifact.layout import GPU_PROGRAM
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.artifact.sections import DecoderSection, State
from fastcar_compile.errors import BackendError
from fastcar_compile.ir.types import PROMPT, REPLAY_ROLES
from fastcar_compile.runtime.backends.base import (
    Array,
    BackendOptions,
    Index,
    Numbers,
    Stepper,
    StepResult,
    each_threshold,
    in_rows,
)
from fastcar_compile.support.packages import needs

VERSION = 2
NEVER = 3e38  # as in codegen/tvm/gpu/states.py
PER_WORD = {"int8": 4, "uint8": 4, "float16": 2, "bfloat16": 2}


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> WebGpuStepper:
    """Open an artifact on a GPU; see OpenStepper."""
    if GPU_PROGRAM not in artifact.manifest.files:
        hint = 'compile it with target="webgpu" (--target webgpu), or use the backend cpu'
        raise BackendError("the artifact has no program for a GPU", where=GPU_PROGRAM, hint=hint)
    program = json.loads(bytes(artifact.files.data(GPU_PROGRAM)))
    if program.get("version") != VERSION:
        raise BackendError("the artifact's program is of another version", where=GPU_PROGRAM, hint="compile it again")
    return WebGpuStepper(GpuDevice(), program, artifact.manifest.decoder, artifact.arrays())


class GpuDevice:
    """An adapter of the package `wgpu`, with what is made once: pipelines by their shader."""

    def __init__(self) -> None:
        with needs("gpu"):
            wgpu: Any = import_module("wgpu")
        self.wgpu = wgpu
        try:
            adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
            # Weights may be larger than the limits that every adapter has: the adapter's own are asked for.
            self.limits = {n: adapter.limits[n] for n in ("max-buffer-size", "max-storage-buffer-binding-size")}
            self.device: Any = adapter.request_device_sync(required_limits=self.limits)
        except (RuntimeError, ValueError, OSError) as error:
            hint = "install a Vulkan driver (Debian: mesa-vulkan-drivers has one for CPUs), or use the backend cpu"
            raise BackendError(f"there is no GPU adapter: {error}", where="wgpu", hint=hint) from error
        self.name = str(adapter.info["device"])
        self._pipelines: dict[str, Any] = {}

    def pipeline(self, code: str) -> Any:
        """Return the compute pipeline of a shader."""
        if code not in self._pipelines:
            module = self.device.create_shader_module(code=code)
            compute = {"module": module, "entry_point": "main"}
            self._pipelines[code] = self.device.create_compute_pipeline(layout="auto", compute=compute)
        return self._pipelines[code]

    def buffer(self, words: int, *, indirect: bool = False) -> Any:
        """Return a buffer of zeros. Raises BackendError where the adapter binds no buffer as large."""
        usage, most = self.wgpu.BufferUsage, min(self.limits.values())
        if 4 * words > most:
            what = f"a tensor of {4 * words} bytes is larger than the {most} bytes that {self.name} binds"
            raise BackendError(what, where="wgpu", hint="use the backend cpu, or a format of fewer bits (quant, kv)")
        flags = usage.STORAGE | usage.UNIFORM | usage.COPY_DST | usage.COPY_SRC | (usage.INDIRECT if indirect else 0)
        return self.device.create_buffer(size=4 * max(1, words), usage=flags)

    def write(self, buffer: Any, data: Array, offset: int = 0) -> None:
        """Write into a buffer from a byte on."""
        if data.nbytes:
            self.device.queue.write_buffer(buffer, offset, np.ascontiguousarray(data))


def finite(thresholds: Array) -> Array:
    """Return thresholds float32 that decide the same, NaN as never: shaders may take it that all numbers are finite."""
    return np.nan_to_num(thresholds, nan=NEVER)


def _words(array: Array, dtype: str) -> Array:
    """Return an array as the GPU has it: words of 4 bytes, rows of small types padded to whole ones."""
    if dtype in ("bool", "int64"):
        return array.astype(np.int32)
    count = PER_WORD.get(dtype, 1)
    spare = -array.shape[-1] % count if array.ndim else 0
    if spare:
        array = np.concatenate([array, np.zeros((*array.shape[:-1], spare), array.dtype)], -1)
    return np.ascontiguousarray(array).view(np.int32) if array.ndim else array


def _array(data: Any, dtype: str, shape: Sequence[int], kind: Any) -> Array:
    """Return the array of a buffer's bytes: the inverse of `_words`."""
    if dtype in ("bool", "int64"):
        return np.frombuffer(data, np.int32).reshape(shape).astype(kind)
    count = PER_WORD.get(dtype, 1)
    rows = np.frombuffer(data, kind).reshape(*shape[:-1], -(-shape[-1] // count) * count)
    return rows[..., : shape[-1]]


class WebGpuStepper(Stepper):
    """Decodes through the program of an artifact; a prompt goes through the decode step, token by token.

    Args:
        program: what `gpu/program.json` holds. params: weights by name.
    """

    row_thresholds = True

    def __init__(
        self, device: GpuDevice, program: Mapping[str, Any], decoder: DecoderSection, params: Mapping[str, Array]
    ) -> None:
        self._device, self._config, self._states = device, decoder.config, decoder.state
        states = {state.name for state in decoder.state}
        shared = dict[int, Any]()
        for place, facts in enumerate(program["buffers"]):
            parts = [part for part in facts.get("parts", [facts]) if part.get("name") in params]
            if parts or "constant" in facts:
                shared[place] = device.buffer(facts["words"])
            for part in parts:
                device.write(shared[place], _words(params[part["name"]], part["dtype"]), 4 * part.get("word", 0))
            if "constant" in facts:
                device.write(shared[place], np.frombuffer(base64.b64decode(facts["constant"]), np.int32))
        self._shared = shared
        self._open(program, states)

    def _open(self, program: Mapping[str, Any], states: set[str]) -> None:
        """Make the buffers of a session over the shared weights, and the commands of a decode step."""
        device, self._program = self._device, program
        buffers = [
            self._shared.get(place) or device.buffer(facts["words"], indirect="indirect" in facts)
            for place, facts in enumerate(program["buffers"])
        ]
        self._buffers = buffers
        named = {facts["name"]: place for place, facts in enumerate(program["buffers"]) if "name" in facts}
        self._inputs = {
            name: place for name, place in named.items() if place not in self._shared and name not in states
        }
        self._of_state = {name: buffers[place] for name, place in named.items() if name in states}
        self._calls = list[tuple[Any, Any, Sequence[int], tuple[Any, int] | None]]()
        for dispatch in program["dispatches"]:
            pipeline = device.pipeline(program["shaders"][dispatch["shader"]])
            entries = [
                {"binding": i, "resource": {"buffer": buffers[b], "offset": 0, "size": buffers[b].size}}
                for i, b in enumerate(dispatch["buffers"])
            ]
            group = device.device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
            counts = dispatch.get("counts")
            where = None if counts is None else (buffers[counts[0]], 4 * counts[1])
            self._calls.append((pipeline, group, dispatch["groups"], where))
        self._results = {n: p for n, p in program["outputs"].items() if n in ("logits", "decisions", "scores")}

    def reset(self) -> None:
        """Set every state but the context's to zero."""
        encoder = self._device.device.create_command_encoder()
        for buffer in self._of_state.values():
            encoder.clear_buffer(buffer)
        self._device.device.queue.submit([encoder.finish()])

    def prefill(self, inputs: Array, position: int) -> Array:
        """Read tokens, as many in a decode step as a video has rows; see Stepper.prefill.

        One row alone decodes forward 0, after which the replay state is put back.
        """
        config, rows = self._config, self._config.rows or 1
        never = np.full(config.num_layers, np.inf, np.float32)
        kept = dict[str, Array]()
        if config.rows is None:
            kept = {s.name: self.read(s.name, np.s_[:1]).copy() for s in self._states if s.role in REPLAY_ROLES}
        found = list[Array]()
        for first in range(0, inputs.shape[1], rows):
            part = inputs[:, first : first + rows]
            given = in_rows(config, part, position + first, 0 if config.rows is None else PROMPT)
            logits = self.decode(**given, thresholds=never).logits
            found.append(logits.reshape(config.batch_size, rows, -1)[:, : part.shape[1]])
        self.write((name, np.s_[:1], value) for name, value in kept.items())
        return np.concatenate(found, 1)

    def decode(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode."""
        given: dict[str, Any] = {self._config.input_name: inputs, "position": position, "step": step}
        given["thresholds"] = finite(each_threshold(self._config, thresholds))
        for name, place in self._inputs.items():
            facts = self._program["buffers"][place]
            value = np.broadcast_to(np.asarray(given[name]), facts["shape"])
            self._device.write(self._buffers[place], _words(np.ascontiguousarray(value), facts["dtype"]))
        device = self._device.device
        encoder = device.create_command_encoder()
        self.encode(encoder)
        found = self._read_back(encoder)
        return StepResult.of(found, len(thresholds))

    def encode(self, encoder: Any) -> None:
        """Add the dispatches of a decode step to a command encoder."""
        compute = encoder.begin_compute_pass()
        for pipeline, group, groups, where in self._calls:
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            if where is None:
                compute.dispatch_workgroups(*groups)
            else:
                compute.dispatch_workgroups_indirect(*where)
        compute.end()

    def _read_back(self, encoder: Any) -> dict[str, Array]:
        """Submit the commands; return the results that the host needs, all read with one wait."""
        usage, sizes = self._device.wgpu.BufferUsage, {n: self._buffers[p].size for n, p in self._results.items()}
        landing = self._device.device.create_buffer(size=sum(sizes.values()), usage=usage.COPY_DST | usage.MAP_READ)
        offset = 0
        for name, size in sizes.items():
            encoder.copy_buffer_to_buffer(self._buffers[self._results[name]], 0, landing, offset, size)
            offset += size
        self._device.device.queue.submit([encoder.finish()])
        landing.map_sync(self._device.wgpu.MapMode.READ)
        data = bytes(landing.read_mapped())
        landing.unmap()
        found, offset = dict[str, Array](), 0
        for name, size in sizes.items():
            facts = self._program["buffers"][self._results[name]]
            used = data[offset : offset + 4 * prod(facts["shape"])]
            found[name] = _array(used, facts["dtype"], facts["shape"], np.dtype(facts["dtype"]))
            offset += size
        return found

    def states(self) -> Sequence[State]:
        """Return what every state is; see Stepper.states."""
        return self._states

    def _state(self, name: str) -> State:
        return next(state for state in self._states if state.name == name)

    def _entries(self, name: str, index: Index) -> tuple[Array, int, Any]:
        """Return what holds a part of a state: entries of its first axis, their offset in bytes, the index there."""
        state, parts = self._state(name), index if isinstance(index, tuple) else (index,)
        places = np.arange(state.shape[0])[parts[0]]
        first, end = (int(places.min()), int(places.max()) + 1) if places.size else (0, 0)
        size = self._of_state[name].size // state.shape[0]
        data = self._device.device.queue.read_buffer(self._of_state[name], first * size, (end - first) * size)
        found = _array(data, state.dtype, (end - first, *state.shape[1:]), state.format.numpy)
        # Slices stay slices: numpy pairs the places of two arrays.
        return found, first * size, (slice(None) if isinstance(parts[0], slice) else places - first, *parts[1:])

    def read(self, name: str, index: Index) -> Array:
        """Return a part of a state; see Stepper.read."""
        found, _, own = self._entries(name, index)
        return found[own]

    def write(self, changes: Iterable[tuple[str, Index, Array]]) -> None:
        """Write parts of states; see Stepper.write."""
        for name, index, value in changes:
            found, offset, own = self._entries(name, index)
            found = found.copy()
            found[own] = value.view(found.dtype)
            self._device.write(self._of_state[name], _words(found, self._state(name).dtype), offset)

    def again(self) -> Stepper:
        """Return a stepper of the same weights whose states are zero; see Stepper.again."""
        other = object.__new__(WebGpuStepper)
        other._device, other._config, other._states, other._shared = (
            self._device, self._config, self._states, self._shared,
        )  # fmt: skip
        other._open(self._program, {state.name for state in self._states})
        return other
