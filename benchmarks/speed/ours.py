"""Our engine: an artifact of target `cpu`, decoded by backend `cpu` with the real gate."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import fx

import fastcar_compile as fc
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.types import StateRole
from fastcar_compile.runtime.backends import BackendOptions
from fastcar_compile.runtime.backends.cpu import open_stepper
from speed.base import Engine
from speed.rows import Found, IndependentRows
from speed.sizes import BATCH, DENSE, GROUP, PLAY, Job, Traffic, tokens_of

QUANT = {"float32": "none", "bfloat16": "bf16", "w8a8": "w8a8", "w4a8": "w4a8"}
SEED = 20250514
SINKS = 16
"""Sink tokens of a window, as in FastCar."""


def schedule(ratio: float, tokens: int, layers: int, group: int = GROUP) -> np.ndarray:
    """Return which layers replay, bool [tokens, layers]. Every `group` of tokens has the same number, spread evenly."""
    generator = np.random.default_rng(SEED)
    chosen = np.zeros((tokens, layers), bool)
    wanted = round(ratio * group * layers)
    for token in range(tokens):
        at = token % group
        count = (at + 1) * wanted // group - at * wanted // group
        chosen[token, generator.permutation(layers)[:count]] = True
    return chosen


def count_traffic(program: DecoderProgram, batch: int) -> Traffic:
    """Return the bytes of a step that the decode graph reads: parameters, keys and values, replay state."""
    graph = program.graph_module.graph
    sizes = {n: program.params.spec(n).numel() * program.params.spec(n).dtype.itemsize for n in program.params}
    mlp, other = set[str](), set[str]()
    for node in graph.nodes:
        if node.op != "get_attr" or str(node.target) not in sizes:
            continue
        users = {_kind(u) for u in node.users}
        if users == {"cond"}:
            mlp.add(str(node.target))
        elif users != {"embedding"}:
            other.add(str(node.target))
    state = {s.name: s for s in program.state}
    caches = [s for s in state.values() if s.role in (StateRole.KEY_CACHE, StateRole.VALUE_CACHE)]
    keys = [s for s in caches if s.role is StateRole.KEY_CACHE]
    slots = [s for s in state.values() if s not in caches]
    per_position = sum(s.nbytes / s.shape[2] for s in caches)
    counterparts = sum(s.nbytes / s.shape[2] for s in keys)
    row = program.config.hidden_size * batch * 4  # the embedding's rows
    replay = sum(2 * s.nbytes / s.shape[0] for s in slots) + counterparts  # a slot is read and written
    ring = program.config.ring
    seen = 0 if ring is None else ring.attended
    return Traffic(sum(sizes[n] for n in other) + row, sum(sizes[n] for n in mlp), per_position, replay, seen)


def _kind(node: fx.Node) -> str:
    if node.target is torch.ops.higher_order.cond:
        return "cond"
    return "embedding" if node.target is torch.ops.aten.embedding.default else "other"


@dataclass(frozen=True)
class Step:
    """One decode forward: position and number, thresholds, and which layers replay, where that is given.

    Attributes:
        token: the token to decode; None: the caller's.
    """

    position: int
    number: int
    thresholds: np.ndarray
    wanted: np.ndarray | None  # bool [L, 1], or [L, B] where rows decide on their own
    token: int | None = None


class Ours(Engine):
    """`fc.compile` of the checkpoint. Of one video thresholds of plus and minus infinity follow the schedule.

    Rows of a batch decide on their own (`model/question.py`).
    """

    package = "fastcar_compile"

    @staticmethod
    def prepare(job: Job) -> None:
        """Compile, and count the bytes of a step."""
        replay = fc.ReplayConfig(gate=job.gate, threshold=0.0, couple_cfg=job.coupled)
        artifact = fc.compile(
            job.checkpoint,
            target="cpu",
            tokens_per_frame=job.sizes.tokens_per_frame,
            max_seq_len=job.max_seq_len,
            batch_size=job.batch,
            quant=QUANT[job.precision],
            replay=replay,
            prefill_chunk=job.chunk,
            sparse_attention=fc.SparseAttention(window=job.window, sinks=SINKS) if job.window else None,
            kv=job.kv,
            host_cpus=[job.host_cpu],
            output=Path(job.folder) / "artifact",
        )
        traffic = count_traffic(artifact.program, job.batch)
        (Path(job.folder) / "traffic.json").write_text(json.dumps(asdict(traffic)))

    def __init__(self, job: Job) -> None:
        self._job, artifact = job, fc.load(Path(job.folder) / "artifact")
        self._stepper = open_stepper(artifact, BackendOptions(job.sizes.threads))
        self._layers = job.sizes.layers
        self._steps: Iterator[Step] = iter(())
        self._variant, self._tokens, self._plays = DENSE, 0, 0
        self._decisions: list[np.ndarray] = []
        self._rows: IndependentRows | None = None
        if job.chunk > 1:
            self.notes = f"prefill in chunks of {job.chunk}"

    def select(self, variant: str, tokens: int) -> None:
        """Set the variant of a block."""
        self._variant, self._tokens = variant, tokens
        self._plays += variant == PLAY

    def rewind(self, position: int) -> None:
        """Make the steps of a block; those of "play" follow the tokens of a real context up to here."""
        self._decisions = []
        if self._variant == PLAY:
            self._steps = self._real(position)
        elif self._job.workload == BATCH and position:
            self._steps = self._independent(position)
        else:
            self._steps = self._scheduled(position)

    def _scheduled(self, position: int) -> Iterator[Step]:
        """Return steps whose layers replay by the schedule, again and again. The gate's score decides nothing."""
        ratio = 0.0 if self._variant == DENSE else float(self._variant)
        replays = schedule(ratio, self._tokens, self._layers, self._job.sizes.group)
        for at in itertools.count():
            wanted = replays[at % len(replays)]
            thresholds = np.where(wanted, np.float32(-math.inf), np.float32(math.inf)).astype(np.float32)
            yield Step(position + at, position + at, thresholds, wanted[:, None])

    def _independent(self, position: int) -> Iterator[Step]:
        """Return steps in which every row decides on its own."""
        if self._rows is None:
            self._rows = IndependentRows(self._stepper, self._job, lambda at: tokens_of(self._job, at), position)
        frame, layers = self._job.sizes.tokens_per_frame, self._layers
        if self._variant == DENSE:
            found = Found(np.full(layers, np.inf, np.float32), np.zeros((self._tokens, layers, self._job.batch), bool))
        else:
            found = self._rows.found(float(self._variant))
        self._rows.restore()
        return (Step(position + i, frame + i, found.thresholds, wanted) for i, wanted in enumerate(found.decisions))

    def _real(self, position: int) -> Iterator[Step]:
        """Read a context up to one frame before `position`, decode that frame, and return the steps after it.

        Each block has the next context. The decoded frame replays nothing, because no frame was decoded before it.
        """
        contexts = load_file(self._job.contexts)["tokens"]
        tokens = contexts[self._plays % len(contexts)].reshape(-1)
        thresholds = np.array(self._job.thresholds, np.float32)
        first = position - self._job.sizes.tokens_per_frame
        self._stepper.reset()
        for at in range(first):
            self._stepper.prefill(tokens[at].reshape(1, 1), at)
        for at in range(first, position):
            self._stepper.decode(tokens[at].reshape(1, 1), at, at - first, thresholds)
        return (Step(at, at - first, thresholds, None, int(tokens[at])) for at in range(position, len(tokens)))

    def step(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Decode tokens and return the last one's logits. Raise RuntimeError if other layers replay than scheduled."""
        if tokens.shape[1] > 1:
            return self._prompt(tokens, position)
        step = next(self._steps)
        if step.token is not None:
            tokens = np.full_like(tokens, step.token)
        result = self._stepper.decode(tokens, step.position, step.number, step.thresholds)
        if step.wanted is not None and not (result.decisions == step.wanted).all():
            raise RuntimeError(f"at position {position} other layers replayed than before, or than the schedule says")
        self._decisions.append(result.decisions.copy())
        return result.logits[:, -1]

    def _prompt(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Read a prompt in chunks."""
        logits = np.zeros(0)
        for at in range(0, tokens.shape[1], self._job.chunk):
            logits = self._stepper.prefill(tokens[:, at : at + self._job.chunk], position + at)
        return logits[:, -1]

    def replayed(self) -> float:
        """Return the share of rows and layers that replayed since the last `rewind`."""
        return float(np.mean(self._decisions)) if self._decisions else 0.0

    def skipped(self) -> float:
        """Return the share of layers in which every row replayed since the last `rewind`."""
        return float(np.mean([d.all(1) for d in self._decisions])) if self._decisions else 0.0

    def traffic(self) -> Traffic:
        """Return the bytes counted from the program."""
        return Traffic(**json.loads((Path(self._job.folder) / "traffic.json").read_text()))
