"""Several sessions in one process: throughput at once against one after the other, what closed ones leave, the guard.

    python benchmarks/sessions.py --artifact build/demo/artifact --sessions 1000 --json out.json

Without --artifact a Llama of 8 layers of hidden size 512 is compiled first, float32. Each session has a thread of its
own. Rounds of both ways alternate, and the least time of each counts. Run it on an idle machine.
"""

import argparse
import gc
import json
import os
import tempfile
import time
import timeit
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import fastcar_compile as fc
from fastcar_compile.runtime.guard import Guard

GUARD_CALLS = 200_000
WARM = 20
"""Sessions that are opened and closed before those that are counted: allocators and caches fill first."""


@dataclass(frozen=True)
class Shared:
    """Sessions of `threads` threads each: milliseconds per step one after the other, and at once."""

    backend: str
    sessions: int
    threads: int
    in_turn: float
    at_once: float

    @property
    def ratio(self) -> float:
        """Throughput at once over that of one after the other."""
        return self.in_turn / self.at_once


@dataclass(frozen=True)
class Left:
    """What each of many closed sessions left: KiB of anonymous memory; and all of them together."""

    backend: str
    sessions: int
    anonymous: float
    descriptors: int
    threads: int
    mappings: int


@dataclass(frozen=True)
class Load:
    """What is measured: how many sessions of how many threads, rounds of both ways, steps of one session in a round."""

    backend: str
    sessions: int
    threads: int
    rounds: int
    steps: int


def shared(artifact: fc.Artifact, load: Load) -> Shared:
    """Measure sessions, each in its own thread, which stays the same."""
    token = np.full(artifact.manifest.decoder.config.batch_size, 3)
    sessions = [artifact.session(load.backend, threads=load.threads) for _ in range(load.sessions)]
    pools = [ThreadPoolExecutor(1) for _ in sessions]

    def decode(session: fc.Session) -> None:
        session.reset()
        for _ in range(load.steps):
            session.step(token)

    def run(groups: Sequence[Sequence[int]]) -> float:
        start = time.perf_counter()
        for group in groups:
            for running in [pools[i].submit(decode, sessions[i]) for i in group]:
                running.result()
        return (time.perf_counter() - start) / (load.sessions * load.steps) * 1e3

    alone, together = [[i] for i in range(load.sessions)], [range(load.sessions)]
    run(alone)
    times = [(run(alone), run(together)) for _ in range(load.rounds)]
    for pool, session in zip(pools, sessions, strict=True):
        pool.shutdown()
        session.close()
    return Shared(load.backend, load.sessions, load.threads, *(min(column) for column in zip(*times, strict=True)))


def left(artifact: fc.Artifact, backend: str, sessions: int) -> Left:
    """Open, use and close sessions; return what they left."""
    prompt = np.ones((artifact.manifest.decoder.config.batch_size, 2), np.int64)

    def use(count: int) -> list[int]:
        for _ in range(count):
            with artifact.session(backend) as session:
                session.generate(prompt, 2)
        gc.collect()
        rollup = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
        anonymous = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
        folders = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
        return [anonymous, *folders, len(Path("/proc/self/maps").read_text("utf-8").splitlines())]

    memory, *rest = (after - before for before, after in zip(use(WARM), use(sessions), strict=True))
    return Left(backend, sessions, memory / sessions, *rest)


def guard_nanoseconds() -> float:
    """Return the CPU time of one entry and exit of the check that every call makes."""
    guard = Guard()

    def guarded() -> None:
        with guard:
            pass

    def bare() -> None:
        pass

    least = [min(timeit.repeat(f, number=GUARD_CALLS, repeat=9, timer=time.thread_time)) for f in (guarded, bare)]
    return (least[0] - least[1]) / GUARD_CALLS * 1e9


def compiled(folder: Path) -> fc.Artifact:
    """Compile the decoder of the docstring."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=513,
    )
    model = LlamaForCausalLM(config).eval()
    return fc.compile(model, "cpu", tokens_per_frame=16, output=folder / "artifact")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--backends", nargs="+", default=["cpu", "onnxruntime"])
    parser.add_argument("--at-once", nargs="+", type=int, default=[2], help="sessions")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = fc.load(options.artifact) if options.artifact else compiled(Path(folder))
        pairs = [
            shared(artifact, Load(backend, count, threads, options.rounds, options.steps))
            for backend in options.backends
            for count in options.at_once
            for threads in options.threads
        ]
        leaks = [left(artifact, backend, options.sessions) for backend in options.backends if options.sessions]
    guard = guard_nanoseconds()
    print("| backend | sessions | threads each | one after the other, ms per step | at once | throughput |")
    print("|---|---|---|---|---|---|")
    for p in pairs:
        print(f"| {p.backend} | {p.sessions} | {p.threads} | {p.in_turn:.3f} | {p.at_once:.3f} | {p.ratio:.2f}x |")
    print("\n| backend | sessions | KiB each | descriptors | threads | mappings |\n|---|---|---|---|---|---|")
    for n in leaks:
        print(f"| {n.backend} | {n.sessions} | {n.anonymous:.2f} | {n.descriptors} | {n.threads} | {n.mappings} |")
    print(f"\nthe guard takes {guard:.0f} ns per call")
    if options.json:
        found = {"shared": [asdict(p) for p in pairs], "left": [asdict(n) for n in leaks], "guard_ns": guard}
        options.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
