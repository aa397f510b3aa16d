"""The rewritten graph in eager PyTorch: the reference that every other backend is checked against.

This is the one backend that imports the compiler's representation, and torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, fx

import fastcar_compile.ir.ops as _ops  # registers the operators  # noqa: F401  # pyright: ignore[reportUnusedImport]
from fastcar_compile.artifact.programs import read_program
from fastcar_compile.artifact.reader import StoredArtifact
from fastcar_compile.ir.program import StateSpec
from fastcar_compile.ir.query import placeholder_names
from fastcar_compile.ir.types import REPLAY_ROLES
from fastcar_compile.runtime.backends.base import Array, BackendOptions, Stepper, StepResult
from fastcar_compile.runtime.guard import forks


def open_stepper(artifact: StoredArtifact, options: BackendOptions) -> EagerStepper:
    """Open an artifact in eager PyTorch, which has its own threads; see OpenStepper.

    In a forked child it has one thread: PyTorch's other threads stayed in the parent.
    """
    if forks():
        torch.set_num_threads(1)
    program = read_program(artifact)
    return EagerStepper(
        program.graph_module,
        program.outputs,
        program.prefill,
        program.prefill_outputs,
        program.state,
        program.config.prefill_chunk,
        context=program.context,
    )


def open_perturbed(artifact: StoredArtifact, options: BackendOptions) -> EagerStepper:
    """Open the reference with every float32 vector, such as the weight of a norm, moved by one unit in the last place.

    What it gives differs from the reference by what rounding explains. The directions are drawn from a fixed seed.
    """
    stepper = open_stepper(artifact, options)
    stepper.perturb(seed=0)
    return stepper


class EagerStepper(Stepper):
    """Runs the decode and prefill graphs with torch, one operator at a time."""

    def __init__(
        self,
        decode: fx.GraphModule,
        outputs: Sequence[str],
        prefill: fx.GraphModule | None,
        prefill_outputs: Sequence[str],
        state: Sequence[StateSpec],
        prefill_chunk: int,
        *,
        context: fx.GraphModule | None = None,
    ) -> None:
        self._decode, self._outputs = decode, list(outputs)
        self._prefill, self._prefill_outputs = prefill, list(prefill_outputs)
        self._context = context
        self._specs = [s for s in state if not s.reads_only]
        self._context_state = {s.name: s.zeros() for s in state if s.reads_only}
        self.prefill_chunk = prefill_chunk if prefill is not None else 1
        self._inputs = {id(g): placeholder_names(g) for g in (decode, prefill, context) if g is not None}
        self.reset()

    def perturb(self, seed: int) -> None:
        """Move every element of the float32 vectors to its neighbour above or below, the same one in both graphs."""
        draw = torch.Generator().manual_seed(seed)
        moved: dict[str, Tensor] = {}
        for graph in filter(None, (self._decode, self._prefill)):
            for name, value in graph.named_buffers():
                if value.dtype == torch.float32 and value.dim() == 1:
                    signs = torch.randint(0, 2, value.shape, generator=draw) * 2.0 - 1.0
                    # Both graphs share a parameter's name, and get the same moved tensor.
                    value.data = moved.setdefault(name, torch.nextafter(value, signs * torch.inf))

    def reset(self) -> None:
        """Set every state but the context's to zero."""
        self._state = {s.name: s.zeros() for s in self._specs}

    def set_context(self, context: Array, mask: Array | None) -> None:
        """Compute the states that cross-attention reads; see Stepper.set_context."""
        assert self._context is not None
        given = {"context": torch.as_tensor(context)}
        if mask is not None:
            given["context_mask"] = torch.as_tensor(mask)
        with torch.inference_mode():
            made = self._context(*[given[n] for n in self._inputs[id(self._context)]])
        self._context_state = dict(zip(self._context_state, made, strict=True))

    def prefill(self, inputs: Array, position: int) -> Array:
        """Run one prefill chunk; without a prefill graph, one decode forward whose replay state is put back."""
        feeds = self._feeds(inputs, position)
        if self._prefill is not None:
            return self._run(self._prefill, self._prefill_outputs, feeds)["logits"].numpy()
        # A forward binds new tensors to these names. So references keep the old replay state without a copy.
        kept = {s.name: self._state[s.name] for s in self._specs if s.role in REPLAY_ROLES}
        layers = next((self._width(n) for n in self._decode.graph.nodes if n.target == "thresholds"), 0)
        feeds |= {"step": torch.zeros(1, dtype=torch.int64), "thresholds": torch.full((layers,), torch.inf)}
        logits = self._run(self._decode, self._outputs, feeds)["logits"].numpy()
        self._state |= kept
        return logits

    @staticmethod
    def _width(node: fx.Node) -> int:
        return int(node.meta["val"].shape[0])

    def decode(self, inputs: Array, position: int, step: int, thresholds: Array) -> StepResult:
        """Run one decode forward; see Stepper.decode."""
        feeds = self._feeds(inputs, position)
        feeds |= {"step": torch.tensor([step]), "thresholds": torch.as_tensor(thresholds)}
        results = {n: t.numpy() for n, t in self._run(self._decode, self._outputs, feeds).items() if n in _RESULTS}
        return StepResult.of(results["logits"], results.get("decisions"), results.get("scores"), len(thresholds))

    def _feeds(self, inputs: Array, position: int) -> dict[str, Tensor]:
        value = torch.as_tensor(np.ascontiguousarray(inputs))
        return {"tokens": value, "inputs_embeds": value, "position": torch.tensor([position])}

    def _run(self, graph: fx.GraphModule, outputs: Sequence[str], feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        known = self._context_state | self._state | feeds
        with torch.inference_mode():
            results = dict(zip(outputs, graph(*[known[n] for n in self._inputs[id(graph)]]), strict=True))
        self._state |= {k: v for k, v in results.items() if k in self._state}
        return results


_RESULTS = ("logits", "decisions", "scores")
