"""The rewritten graph in eager PyTorch: the reference that every other backend is checked against.

This is the one backend that imports the compiler's representation, and torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, fx

import fastcar_compile.ir.ops as _ops  # registers the operators  # noqa: F401  # pyright: ignore[reportUnusedImport]
from fastcar_compile.artifact.programs import read_program, states_of
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import placeholder_names
from fastcar_compile.ir.types import ATTENTION_ROLES
from fastcar_compile.runtime.backends.base import Array, BackendOptions, Numbers, ValueStepper, each_threshold
from fastcar_compile.runtime.guard import forks


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> EagerStepper:
    """Open an artifact in eager PyTorch, which has its own threads; see OpenStepper.

    In a forked child it has one thread: PyTorch's other threads stayed in the parent.
    """
    if forks():
        torch.set_num_threads(1)
    return EagerStepper(read_program(artifact))


def open_perturbed(artifact: StoredArtifact, options: BackendOptions) -> EagerStepper:
    """Open the reference with every float32 vector, such as the weight of a norm, moved by one unit in the last place.

    What it gives differs from the reference by what rounding explains. The directions are drawn from a fixed seed.
    """
    stepper = open_stepper(artifact, options)
    stepper.perturb(seed=0)
    return stepper


class EagerStepper(ValueStepper):
    """Runs the decode and prefill graphs of a program with torch, one operator at a time."""

    def __init__(self, program: DecoderProgram) -> None:
        self._program, self._names = program, cache(placeholder_names)
        self.prefill_chunk = program.config.prefill_chunk if program.prefill is not None else 1
        self.video_chunk = 0 if program.prefill is None or program.config.rows is None else self.prefill_chunk
        super().__init__(program.config, states_of(program))

    def perturb(self, seed: int) -> None:
        """Move every element of the float32 vectors to its neighbour above or below, the same one in both graphs."""
        draw = torch.Generator().manual_seed(seed)
        moved: dict[str, Tensor] = {}
        for graph in self._program.graphs():
            for name, value in graph.named_buffers():
                if value.dtype == torch.float32 and value.dim() == 1:
                    signs = torch.randint(0, 2, value.shape, generator=draw) * 2.0 - 1.0
                    # Both graphs share a parameter's name, and get the same moved tensor.
                    value.data = moved.setdefault(name, torch.nextafter(value, signs * torch.inf))

    def _array(self, value: Tensor) -> Array:
        if value.dtype == torch.bfloat16:  # torch makes no numpy array of it
            return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()

    def _value(self, array: Array) -> Tensor:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.as_tensor(array.view(np.int16)).view(torch.bfloat16)
        return torch.as_tensor(array)

    def _contexts(self, given: Mapping[str, Array]) -> Sequence[Tensor]:
        graph = self._program.context
        assert graph is not None
        with torch.inference_mode():
            return graph(*[torch.as_tensor(given[n]) for n in self._names(graph)])

    def prefill(self, inputs: Array, position: int) -> Array:
        """Run one prefill chunk; without a prefill graph, one decode forward whose replay state is put back."""
        program = self._program
        if program.prefill is None:
            return super().prefill(inputs, position)
        if self.video_chunk:
            return np.concatenate([self.prefill_video(x[None], position, v) for v, x in enumerate(inputs)])
        return self._run(program.prefill, program.prefill_outputs, self._feeds(inputs, position))["logits"]

    def prefill_video(self, inputs: Array, position: int, video: int) -> Array:
        """Run one prefill chunk of one video; see Stepper.prefill_video."""
        program, own = self._program, slice(video, video + 1)
        assert program.prefill is not None
        kept = {s.name: self._state[s.name] for s in self._specs if s.role in ATTENTION_ROLES}
        feeds = self._feeds(inputs, position) | {name: value[own] for name, value in kept.items()}
        logits = self._run(program.prefill, program.prefill_outputs, feeds)["logits"]
        written = {name: self._array(self._state[name]) for name in kept}
        self._state |= kept
        self.write((name, own, array) for name, array in written.items())
        return logits

    def _forward(self, inputs: Array, position: Numbers, step: Numbers, thresholds: Array) -> dict[str, Array]:
        feeds = self._feeds(inputs, position)
        feeds |= {
            "step": torch.as_tensor(np.atleast_1d(step)),
            "thresholds": torch.as_tensor(each_threshold(self._config, thresholds)),
        }
        return self._run(self._program.graph_module, self._program.outputs, feeds)

    def _feeds(self, inputs: Array, position: Numbers) -> dict[str, Tensor]:
        given = torch.as_tensor(np.ascontiguousarray(inputs))
        return {self._config.input_name: given, "position": torch.as_tensor(np.atleast_1d(position))}

    def _run(self, graph: fx.GraphModule, outputs: Sequence[str], feeds: dict[str, Tensor]) -> dict[str, Array]:
        known = self._context_state | self._state | feeds
        with torch.inference_mode():
            results = dict(zip(outputs, graph(*[known[n] for n in self._names(graph)]), strict=True))
        self._state |= {name: results.pop(name) for name in self._state if name in results}
        return {name: value.numpy() for name, value in results.items()}
