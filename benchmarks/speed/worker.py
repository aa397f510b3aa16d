"""A worker process: prepares one engine's files, or opens the engine and decodes blocks on request.

    python -m speed.worker prepare|run JOB

The protocol is one JSON object per line. `run` first writes {"ready": …}. The answer to {"variant": …} is
{"seconds": [per token], "replay": ratio, "skipped": ratio}. Our engine answers {"read": n} with {"gigabytes": [n
figures]}, and {"multiply": n} with {"gigamacs": [n figures]}. The parent stops the process (SIGSTOP) between blocks,
so that no idle thread spins on the cores of the next engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from speed.engines import OURS, engine_class
from speed.sizes import DECODE, DENSE, Job, tokens_of
from speed.work import PEAKS

if TYPE_CHECKING:
    from speed.base import Engine

CHECK_TOKENS = (3, 1, 4, 1, 5)
"""Tokens decoded from an empty cache. The last logits show whether all engines compute the same function."""


def first_logits(engine: Engine, job: Job) -> list[float]:
    """Return the logits of all rows after CHECK_TOKENS, or after a prompt."""
    engine.select(DENSE, len(CHECK_TOKENS))
    engine.rewind(0)
    logits = np.zeros(0)
    job = replace(job, coupled=False)  # the same tokens for every engine
    for position, token in enumerate(CHECK_TOKENS if job.prompt == 1 else CHECK_TOKENS[:1]):
        logits = engine.step(tokens_of(job, token), position)
    return logits.ravel().tolist()


def block(engine: Engine, job: Job, variant: str) -> dict[str, Any]:
    """Time the last tokens before `sizes.context`, after `sizes.warm_up` tokens at the same positions, or prompts."""
    prompts = job.prompt > 1
    tokens = job.sizes.block
    engine.select(variant, tokens)
    start, seconds = 0 if prompts else job.sizes.context - tokens, []
    for count in (job.sizes.warm_up, tokens):
        engine.rewind(start)
        seconds = []
        for i in range(count):
            if prompts:
                engine.rewind(0)
            given = tokens_of(job, i)
            before = time.perf_counter()
            engine.step(given, start if prompts else start + i)
            seconds.append(time.perf_counter() - before)
    return {"seconds": seconds, "replay": engine.replayed(), "skipped": engine.skipped()}


def serve(job: Job, replies: TextIO) -> None:
    """Open the engine and answer requests until the parent closes stdin."""
    engine = engine_class(job.engine)(job)
    reader = peak = None
    if job.engine == OURS:
        from speed.bandwidth import ReadBandwidth
        from speed.peak import Peak

        reader = ReadBandwidth(job.sizes.threads, host_cpu=job.host_cpu)
        peak = Peak(PEAKS[job.precision], job.sizes.threads, job.host_cpu)

    def say(reply: dict[str, Any]) -> None:
        print(json.dumps(reply), file=replies, flush=True)

    facts = {"notes": engine.notes, "version": version(engine.package), "traffic": asdict(engine.traffic())}
    logits = first_logits(engine, job)
    if job.workload == DECODE:  # else a block's own untimed steps are enough, and steps take long
        block(engine, job, job.variants[0])
    say({"ready": {"logits": logits, **facts}})
    for line in sys.stdin:
        request = json.loads(line)
        if "read" in request:
            assert reader is not None
            say({"gigabytes": reader.gigabytes_per_second(request["read"])})
        elif "multiply" in request:
            assert peak is not None
            say({"gigamacs": peak.gigamacs_per_second(request["multiply"])})
        else:
            say(block(engine, job, request["variant"]))


def main() -> None:
    """Run the command line. Other output goes to stderr, because stdout belongs to the protocol."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job.from_json(json.loads(sys.argv[2]))
    if sys.argv[1] == "prepare":
        engine_class(job.engine).prepare(job)
    else:
        serve(job, replies)


if __name__ == "__main__":
    main()
