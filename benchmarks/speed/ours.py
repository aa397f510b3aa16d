"""Our engine: an artifact of target `cpu`, decoded by backend `cpu` with the real gate."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import fx

import fastcar_compile as fc
from fastcar_compile.ir.program import DecoderProgram, StateRole
from fastcar_compile.runtime.backends import BACKENDS, BackendOptions, OpenStepper, Stepper
from speed.base import Engine
from speed.sizes import DENSE, GROUP, Job, Traffic

QUANT = {"float32": "none", "bfloat16": "bf16", "w8a8": "w8a8", "w4a8": "w4a8"}
SEED = 20250514
SINKS = 16
"""Sink tokens of a window, as in FastCar."""


def schedule(ratio: float, tokens: int, layers: int) -> np.ndarray:
    """Return which layers replay, bool [tokens, layers]. Every GROUP of tokens has the same number, spread evenly."""
    generator = np.random.default_rng(SEED)
    chosen = np.zeros((tokens, layers), bool)
    wanted = round(ratio * GROUP * layers)
    for token in range(tokens):
        at = token % GROUP
        count = (at + 1) * wanted // GROUP - at * wanted // GROUP
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


class Ours(Engine):
    """`fc.compile` of the checkpoint. Thresholds of plus and minus infinity follow the schedule."""

    package = "fastcar_compile"

    @staticmethod
    def prepare(job: Job) -> None:
        """Compile, and count the bytes of a step."""
        replay = fc.ReplayConfig(gate="tas", threshold=0.0, couple_cfg=job.batch == 2)
        artifact = fc.compile(
            job.checkpoint,
            target="cpu",
            tokens_per_frame=job.sizes.tokens_per_frame,
            max_seq_len=job.max_seq_len,
            batch_size=job.batch,
            quant=QUANT[job.precision],
            replay=replay,
            prefill_chunk=1,
            sparse_attention=fc.SparseAttention(window=job.window, sinks=SINKS) if job.window else None,
            kv=job.kv,
            output=Path(job.folder) / "artifact",
        )
        traffic = count_traffic(artifact.program, job.batch)
        (Path(job.folder) / "traffic.json").write_text(json.dumps(asdict(traffic)))

    def __init__(self, job: Job) -> None:
        self._job, artifact = job, fc.load(Path(job.folder) / "artifact")
        open_stepper: OpenStepper = BACKENDS.load("cpu")
        self._stepper: Stepper = open_stepper(artifact, BackendOptions(job.sizes.threads))
        self._layers = job.sizes.layers
        self._replays = np.zeros((1, self._layers), bool)
        self._at = 0

    def select(self, variant: str, tokens: int) -> float:
        """Set the schedule of a block and return its replay ratio."""
        ratio = 0.0 if variant == DENSE else float(variant)
        self._replays, self._at = schedule(ratio, tokens, self._layers), 0
        return float(self._replays.mean())

    def rewind(self, position: int) -> None:
        """Do nothing: position and forward number are arguments of a step."""

    def step(self, token: int, position: int) -> np.ndarray:
        """Decode one token and return its logits. Raise RuntimeError if other layers replay than scheduled."""
        wanted = self._replays[self._at % len(self._replays)]
        self._at += 1
        thresholds = np.where(wanted, np.float32(-math.inf), np.float32(math.inf)).astype(np.float32)
        tokens = np.full((self._job.batch, 1), token, np.int64)
        result = self._stepper.decode(tokens, position, position, thresholds)
        if not (result.decisions == wanted[:, None]).all():
            raise RuntimeError(f"at position {position} other layers replayed than the schedule says")
        return result.logits[0, 0]

    def traffic(self) -> Traffic:
        """Return the bytes counted from the program."""
        return Traffic(**json.loads((Path(self._job.folder) / "traffic.json").read_text()))
