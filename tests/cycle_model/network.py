"""What is simulated: processes, the FIFOs and blocks between them, and the memories that they read and write.

A process is a sequence of actions. `Run` is a pipelined loop: `trips` iterations, one every `ii` clocks, whose results
appear `latency` clocks after their operands went in. An iteration takes one token of every FIFO that it reads, and puts
one into every FIFO that it writes. Blocks are what lies between two processes of an HLS DATAFLOW region: an array in
several copies (two: a ping-pong buffer). Claim and Post are its writer's ends, Take and Free its reader's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fastcar_compile.codegen.hls.model.engine import EngineMemory


@dataclass(frozen=True)
class Run:
    """A pipelined loop.

    Args:
        loop: its name. trips: iterations, at least 1. ii: clocks from one to the next.
        latency: clocks from an iteration's operands to its results; at least 1.
        reads, writes: FIFOs. memory: that every iteration reads or writes `words` words of; None: none.
        flat: whether the process's next loop is the same pipeline: it starts an interval after the last iteration.
    """

    loop: str
    trips: int
    ii: float = 1.0
    latency: int = 1
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    memory: str | None = None
    words: float = 1.0
    flat: bool = False


@dataclass(frozen=True)
class Claim:
    """Wait for an empty block, to write it."""

    blocks: str


@dataclass(frozen=True)
class Post:
    """The block that was claimed is full."""

    blocks: str


@dataclass(frozen=True)
class Take:
    """Wait for a full block, to read it."""

    blocks: str


@dataclass(frozen=True)
class Free:
    """The block that was taken is empty."""

    blocks: str


Action = Run | Claim | Post | Take | Free


@dataclass(frozen=True)
class Fifo:
    """A stream: `depth` tokens, one writer, one reader (names of processes)."""

    depth: int
    writer: str
    reader: str


@dataclass(frozen=True)
class Blocks:
    """An array between two processes, in `copies` copies."""

    copies: int
    writer: str
    reader: str


@dataclass(frozen=True)
class Network:
    """Everything that runs between two barriers: one call of a kernel."""

    processes: Mapping[str, Iterable[Action]]
    fifos: Mapping[str, Fifo] = field(default_factory=dict)
    blocks: Mapping[str, Blocks] = field(default_factory=dict)
    memories: Mapping[str, EngineMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessResult:
    """When a process was done, and the first start of every loop by name."""

    starts: dict[str, float]
    end: float


@dataclass(frozen=True)
class Result:
    """What a network did.

    Attributes:
        clocks: until the last process was done.
        words: moved by each memory.
    """

    clocks: float
    processes: dict[str, ProcessResult]
    words: dict[str, float]
