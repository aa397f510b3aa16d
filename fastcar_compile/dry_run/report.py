"""What a dry run says: a typed report, JSON first."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, field_serializer

from fastcar_compile.artifact.sections import DecoderConfig, LayerPart, State
from fastcar_compile.artifact.sections.accelerator import ControllerPart, DesignPart, ExplorationPart
from fastcar_compile.artifact.sections.base import Part
from fastcar_compile.checked import checked
from fastcar_compile.config import CompileConfig


class Fallback(Part):
    """Something that runs in another way than the options ask for.

    Args:
        kind: of part. what: the part of the decoder. layers: where; empty: outside of the layers, or everywhere.
        instead: what happens. reason: why. where: module path or source line. hint: what would avoid it.
    """

    kind: Literal["accelerator", "gate", "linear", "numbers", "offload", "prompt", "library", "assumption"]
    what: str
    layers: tuple[int, ...] = ()
    instead: str
    reason: str
    where: str = ""
    hint: str = ""


class Placement(Part):
    """Where a part of the decode step runs.

    Args:
        layers: of this part; empty: it stands outside of the layers. calls: of the accelerator in one decode step.
        reason: why it runs there.
    """

    what: str
    unit: Literal["accelerator", "host"]
    layers: tuple[int, ...] = ()
    calls: int = 0
    reason: str


class Problem(Part):
    """What `compile` would refuse."""

    what: str
    where: str = ""
    hint: str = ""


class Bank(Part):
    """A memory, or the banks behind one port of it.

    Args:
        memory: its name in the target. tag: the banks, in the linker's words; empty: the whole memory.
        holds: what is there. used, capacity: bytes; capacity None: not known.
    """

    memory: str
    tag: str = ""
    holds: str
    used: int
    capacity: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the content is not larger than the memory."""
        return self.capacity is None or self.used <= self.capacity


class Memory(Part):
    """Bytes: of all parameters, of every role of state, and of every bank."""

    weights: int
    state: dict[str, int]
    banks: tuple[Bank, ...] = ()


class Speed(Part):
    """What the hardware model predicts for the chosen design.

    Args:
        case: "dense", or how much replays. replay_ratio: share of all MLPs that replay.
        bound_by: what takes the largest share of a step.
    """

    case: str
    replay_ratio: float
    tokens_per_second: float
    seconds_per_step: float
    bandwidth_utilisation: float
    energy_per_token_j: float
    bound_by: str


@checked()
class DryRun(Part):
    """What `compile` would do, found without code generation; nothing is written.

    Args:
        options: what was asked for, with the defaults filled in. target: name of the board or CPU.
        decoder: sizes. layers: every layer with module path, source line and gate. pipeline: the passes that ran.
        placements: what runs where. fallbacks: what runs in another way than asked for.
        problems: what `compile` would refuse; empty: it would build the artifact.
        state: what a session keeps from step to step. memory: bytes, per bank of the board.
        design, exploration, controller: the engine that was chosen; None without an accelerator.
        speed: predictions of the hardware model, dense first; empty where there is no engine to model.
    """

    options: CompileConfig
    target: str
    decoder: DecoderConfig
    layers: tuple[LayerPart, ...]
    pipeline: str
    placements: tuple[Placement, ...]
    fallbacks: tuple[Fallback, ...]
    problems: tuple[Problem, ...]
    state: tuple[State, ...]
    memory: Memory
    design: DesignPart | None = None
    exploration: ExplorationPart | None = None
    controller: ControllerPart | None = None
    speed: tuple[Speed, ...] = Field(default=())

    @property
    def ok(self) -> bool:
        """Whether `compile` would build the artifact."""
        return not self.problems

    @field_serializer("options")
    def _options(self, options: CompileConfig) -> dict[str, Any]:
        return options.to_json()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return json.loads(self.model_dump_json())
