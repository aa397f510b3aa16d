"""What training gates gives, as a file; and a training that was interrupted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import UserError
from fastcar_compile.gates.gate_file import HINT, read_gate_file, replace_file, write_gate_file
from fastcar_compile.gates.weights import GateWeights

SAVE_EVERY = 10
"""Steps between two states of an interrupted training."""


@dataclass(frozen=True, eq=False)
class TrainedGate:
    """A trained gate of every layer of one decoder. Its thresholds are calibrated afterwards.

    Attributes:
        gate: "learned" or "tas".
        layers: per layer the tensors, float32: of "learned" w1 [units, 2 H], b1 [units], w2 [units], b2 [1]; of "tas"
            heads [Hq].
        thresholds: per layer that at which it was trained; calibration finds better ones, and those for other shares.
        target: the share of the forwards t >= F that it was trained to replay.
        replay, nll, nll_dense: share, and nats per token with and without replay, over the last steps of the training.
        price: relative NLL that one more share of replay cost at the end; a later training goes on from it.
        inputs: SHA-256 of weights, options and videos.
    """

    gate: str
    layers: tuple[dict[str, Tensor], ...] = field(repr=False)
    thresholds: tuple[float, ...]
    target: float
    replay: float
    nll: float
    nll_dense: float
    price: float
    inputs: str

    def heads(self) -> list[dict[int, float]] | None:
        """Of "tas", as `ReplayConfig` takes them; None for another gate."""
        if self.gate != "tas":
            return None
        return [dict(enumerate(layer["heads"].tolist())) for layer in self.layers]

    def replay_config(self, **options: Any) -> ReplayConfig:
        """With the trained thresholds; `options` as `ReplayConfig` takes them (max_chain, threshold, …)."""
        trained: dict[str, Any] = {"threshold": self.thresholds}
        if self.gate == "tas":
            trained["heads"] = self.heads()
        else:
            trained["gate_weights"] = GateWeights.of(dict(enumerate(self.layers)))
        return ReplayConfig(gate=self.gate, **{**trained, **options})

    def facts(self) -> dict[str, Any]:
        """Everything but the weights, JSON-safe; the heads of "tas" too."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        named = {"gate": self.gate, "inputs": self.inputs, "heads": self.heads(), "thresholds": self.thresholds}
        return named | numbers

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with tensors `layer.{l}.{name}`; same gate, same bytes."""
        tensors = {f"layer.{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.items()}
        facts = {name: repr(getattr(self, name)) for name in _NUMBERS}
        metadata = {"gate": self.gate, "inputs": self.inputs, **facts}
        metadata["thresholds"] = json.dumps(self.thresholds)
        write_gate_file(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file written by `save`.

        Raises:
            UserError: missing, malformed, or another format or version.
        """
        metadata, tensors = read_gate_file(path)
        layers: dict[int, dict[str, Tensor]] = {}
        try:
            for name, tensor in tensors.items():
                _, index, part = name.split(".")
                layers.setdefault(int(index), {})[part] = tensor
            numbers = {name: float(metadata[name]) for name in _NUMBERS}
            thresholds = tuple(json.loads(metadata["thresholds"]))
            ordered = tuple(layers[i] for i in range(len(layers)))
            return cls(metadata["gate"], ordered, thresholds, inputs=metadata["inputs"], **numbers)
        except (ValueError, KeyError) as error:
            raise UserError(f"the gate is malformed: {error!r}", where=str(path), hint=HINT) from error


_NUMBERS = ("target", "replay", "nll", "nll_dense", "price")


class TrainingState:
    """Weights, optimiser and log of a training, so that it goes on where it was interrupted.

    Args:
        path: the file; None: nothing is kept. key: hash of all that the training depends on; a file with another key
            is started anew.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key

    def load(self, scorers: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Put weights and optimiser back; the log as it was saved, None where there is nothing to go on from."""
        if self._path is None or not self._path.exists():
            return None
        with safe_open(self._path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != self._key:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        scorers.load_state_dict({n[2:]: t for n, t in tensors.items() if n.startswith("s/")})
        state: dict[int, dict[str, Tensor]] = {}
        for name in (n for n in tensors if n.startswith("o/")):
            _, index, part = name.split("/")
            state.setdefault(int(index), {})[part] = tensors[name]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        return json.loads(metadata["log"])

    def save(self, scorers: nn.Module, optimizer: torch.optim.Optimizer, log: dict[str, Any]) -> None:
        """Replace the file as a whole."""
        if self._path is None:
            return
        tensors = {f"s/{name}": t.detach().clone().contiguous() for name, t in scorers.state_dict().items()}
        for index, values in optimizer.state_dict()["state"].items():
            tensors |= {f"o/{index}/{part}": t.clone() for part, t in values.items()}
        replace_file(self._path, save(tensors, {"key": self._key, "log": json.dumps(log)}))
