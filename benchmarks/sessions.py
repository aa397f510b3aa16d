"""Several sessions in one process: throughput at once against one after the other, what closed ones leave, the guard.

    python benchmarks/sessions.py --artifact build/demo/artifact --sessions 1000 --json out.json
    python benchmarks/sessions.py --batcher 8 --sessions 1000
    python benchmarks/sessions.py --algebra 64 --prompt 966 --model examples/doom/world/decoder

The second command compares a batcher of 8 sequences with 8 sessions, and counts what sequences that have left leave.
The third one times what takes a session back and copies it, behind a prompt, and steps with and without `keep`.

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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from speed.wide import wide

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


def held() -> list[int]:
    """Return what the process holds: KiB of anonymous memory, descriptors, threads and mappings."""
    gc.collect()
    rollup = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    anonymous = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
    folders = [len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")]
    return [anonymous, *folders, len(Path("/proc/self/maps").read_text("utf-8").splitlines())]


def left(artifact: fc.Artifact, backend: str, sessions: int) -> Left:
    """Open, use and close sessions; return what they left."""
    prompt = np.ones((artifact.manifest.decoder.config.batch_size, 2), np.int64)

    def use(count: int) -> list[int]:
        for _ in range(count):
            with artifact.session(backend) as session:
                session.generate(prompt, 2)
        return held()

    memory, *rest = (after - before for before, after in zip(use(WARM), use(sessions), strict=True))
    return Left(backend, sessions, memory / sessions, *rest)


def batched(model: Any, sequences: int, asked: argparse.Namespace, options: Mapping[str, Any]) -> None:
    """Print tokens/s of a batcher on two threads, and of as many sessions two at a time, with a thread each.

    Then so many sequences as `--sessions` says join and leave, and what they leave is printed.
    """
    tokens, joins = 64, asked.sessions
    with tempfile.TemporaryDirectory() as folder:
        alone = fc.compile(model, "cpu", output=Path(folder, "alone"), **options)
        sizes = {"rows": asked.rows, "batch_size": asked.places or sequences}
        rows = fc.compile(model, "cpu", output=Path(folder, "rows"), **sizes, **options)
        sessions = [alone.session("cpu", threads=1) for _ in range(sequences)]
        pools, prompt = [ThreadPoolExecutor(1) for _ in range(2)], np.zeros(asked.prompt, np.int64)
        seconds: dict[str, list[float]] = {"batcher": [], "sessions": []}

        def decode(own: Sequence[fc.Session]) -> None:
            for session in own:
                session.generate(prompt[None], tokens)

        with fc.Batcher(rows, threads=2, waiting=joins) as batcher:
            for _ in range(asked.rounds + 1):
                begin = time.perf_counter()
                for stream in [batcher.submit(prompt, tokens) for _ in range(sequences)]:
                    stream.result()
                between = time.perf_counter()
                for running in [pool.submit(decode, sessions[i::2]) for i, pool in enumerate(pools)]:
                    running.result()
                seconds["batcher"].append(between - begin)
                seconds["sessions"].append(time.perf_counter() - between)

            def join(count: int) -> list[int]:
                for stream in [batcher.submit(prompt, 2) for _ in range(count)]:
                    stream.result()
                return held()

            memory, *rest = (after - before for before, after in zip(join(WARM), join(joins), strict=True))
        print("| sequences | batcher, tokens/s | sessions | gain |\n|---|---|---|---|")
        each = [sequences * tokens / min(values[1:]) for values in seconds.values()]
        print(f"| {sequences} | {each[0]:.0f} | {each[1]:.0f} | {each[0] / each[1]:.2f}x |")
        print(f"\n{joins} joins left {memory} KiB, and descriptors, threads and mappings {rest}")
        for pool in pools:
            pool.shutdown()


def algebra(model: Any, asked: argparse.Namespace, options: Mapping[str, Any]) -> None:
    """Print the least milliseconds of opening, forking, saving and loading, and of a step with and without `keep`."""
    with tempfile.TemporaryDirectory() as folder:
        artifact, file = fc.compile(model, "cpu", output=Path(folder, "built"), **options), Path(folder, "saved")
        keep, prompt = asked.algebra, np.zeros((1, asked.prompt), np.int64)
        plain, kept = (artifact.session("cpu", threads=1, keep=n) for n in (0, keep))
        for session in (plain, kept):
            session.prefill(prompt)
        found: dict[str, list[float]] = {}

        def timed(name: str, run: Callable[[], object], per: int = 1) -> None:
            begin = time.perf_counter()
            run()
            found.setdefault(name, []).append((time.perf_counter() - begin) / per * 1e3)

        def steps(session: fc.Session) -> None:
            for _ in range(keep):
                session.step(prompt[:, 0])

        for _ in range(asked.rounds):
            timed("open", lambda: artifact.session("cpu", threads=1).close())
            timed("fork", lambda: plain.fork().close())
            timed("save", lambda: plain.save(file))
            timed("load", lambda: plain.load(file))
            timed("a step", lambda: steps(plain), keep)
            timed(f"a step, keep={keep}", lambda: steps(kept), keep)
            timed(f"rewind {keep}", lambda: kept.rewind(keep))
            plain.load(file)
        size = file.stat().st_size
    print(f"{asked.prompt} positions, one thread; a file of {size / 1e6:.2f} MB\n\n| what | ms |\n|---|---|")
    for name, times in found.items():
        print(f"| {name} | {min(times):.3f} |")


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
    parser.add_argument("--batcher", type=int, help="sequences")
    parser.add_argument("--places", type=int, help="batch_size of the batcher, more than --batcher: some stay free")
    parser.add_argument("--rows", type=int, default=1, help="of each: so many tokens of a prompt are read together")
    parser.add_argument("--prompt", type=int, default=4, help="tokens of each prompt; a batcher decodes 64")
    parser.add_argument("--algebra", type=int, help="tokens that `keep` keeps")
    parser.add_argument("--model", help="folder of a decoder for these two; without it 8 layers of 2048 x 5504")
    options = parser.parse_args()
    if options.batcher or options.algebra:
        common: dict[str, Any] = {"quant": "w8a8", "replay": None}
        common |= {} if options.model else {"tokens_per_frame": 64, "max_seq_len": 256}
        model = options.model or wide()
        if options.algebra:
            return algebra(model, options, {**common, "replay": fc.ReplayConfig()})
        return batched(model, options.batcher, options, common)
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
    return None


if __name__ == "__main__":
    main()
