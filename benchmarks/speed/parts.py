"""Where the time of our decode step goes: kernels timed within real steps, by the part of the decoder they belong to.

    python -m speed.parts JOB

TVM's virtual machine calls a hook before and after each kernel. What the hook itself takes is in every time, so the
least kernel's time is subtracted from all. The rest of an unhooked step is the virtual machine and Python.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fastcar_compile as fc
from fastcar_compile.gates import gate_class
from fastcar_compile.runtime.backends.cpu import CpuStepper, Library, library_of
from fastcar_compile.runtime.tvm_runtime import Machine
from speed.sizes import Job, Sizes

STEPS = 200

ATTENTION, LINEARS, MLP, HEAD = (
    "attention",
    "its norms, linears and RoPE",
    "MLPs with their norms",
    "head with its norm",
)
KV, GATE, INPUT, OTHER = "appending keys and values", "gate and replay caches", "embedding and RoPE tables", "residuals"
CALLS = "virtual machine and Python"
PARTS: tuple[str, ...] = (ATTENTION, LINEARS, MLP, HEAD, KV, GATE, INPUT, OTHER, CALLS)

_BY_ARGUMENT = (
    (("lm_head", "model.norm"), HEAD),
    ((".mlp.", "post_attention_layernorm"), MLP),
    (("mlp_cache", "chain_count", "thresholds"), GATE),
    ((".self_attn.", "input_layernorm"), LINEARS),
    (("embed_tokens", "inv_freq"), INPUT),
)
"""Parts of the names of arguments -> part; the first that fits."""

_BY_KERNEL = (
    (("attend",), ATTENTION),
    (("append",), KV),
    (
        ("temporal_", "relative_change", "gate_network", "decide", "row_of_earlier_key", "read_", "write_", "split"),
        GATE,
    ),
    (("activate",), MLP),
    (("rotate", "quantize_rows"), LINEARS),
    (("take", "cos", "sin"), INPUT),
)
"""Parts of the names of kernels without such an argument -> part. All others are `OTHER`."""


def part_of(kernel: str, arguments: set[str]) -> str:
    """Return the part that a kernel belongs to: by what it reads and writes, else by its name."""
    for words, part in _BY_KERNEL[:3]:
        if kernel.startswith(words):
            return part
    for words, part in _BY_ARGUMENT:
        if any(word in name for word in words for name in arguments):
            return part
    return next((part for words, part in _BY_KERNEL if any(word in kernel for word in words)), OTHER)


@dataclass
class _Call:
    part: str
    seconds: list[float]


class _Hook(AbstractContextManager[None]):
    """What the virtual machine calls: times the kernels that run within it, whose order is the same each time."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names, self.calls, self._at, self._began = names, list[_Call](), -1, 0.0

    def __enter__(self) -> None:
        self._at = 0

    def __exit__(self, *_: object) -> None:
        self._at = -1

    def __call__(self, _function: Any, name: str, before: bool, _result: Any, *arguments: Any) -> int:
        """Time one kernel; the builtins of the virtual machine are no kernels."""
        if name.startswith("vm.") or self._at < 0:
            return 0
        if before:
            if self._at == len(self.calls):
                self.calls.append(_Call(part_of(name, self._named(arguments)), []))
            self._began = time.perf_counter()
        else:
            self.calls[self._at].seconds.append(time.perf_counter() - self._began)
            self._at += 1
        return 0

    def _named(self, arguments: tuple[Any, ...]) -> set[str]:
        places = [a.data_ptr() for a in arguments if hasattr(a, "data_ptr")]
        return {self._names[place] for place in places if place in self._names}


@dataclass(frozen=True)
class _OpenedLibrary(Library):
    """A library that keeps the machines it opened."""

    machines: list[Machine] = field(default_factory=list[Machine])

    def open(self) -> Machine:
        """Load the library."""
        self.machines.append(super().open())
        return self.machines[-1]


Run = Callable[[CpuStepper, AbstractContextManager[object]], list[float]]
"""Decodes several times alike, each within the context, and returns the seconds of each."""


def parts_of(artifact: fc.Artifact, threads: int, runs: Mapping[str, Run]) -> dict[str, dict[str, float]]:
    """Return for each run milliseconds by part of what it repeats."""
    found = library_of(artifact)
    library = _OpenedLibrary(found.content, found.programs)
    stepper = CpuStepper(library, artifact.manifest.decoder, artifact.arrays(), threads)
    program = stepper._decode
    names = {a.data_ptr(): name for name, a in zip(program.names, program.arguments, strict=True)}
    whole: dict[str, float] = {}
    for name, run in runs.items():
        run(stepper, nullcontext())
        whole[name] = statistics.median(run(stepper, nullcontext()))
    result = {}
    for name, run in runs.items():
        hook = _Hook(names)
        library.machines[0].function("set_instrument")(hook)
        run(stepper, hook)
        result[name] = _by_part(hook.calls, whole[name])
    return result


def _steps(sizes: Sizes, threshold: float, stepper: CpuStepper, counted: AbstractContextManager[object]) -> list[float]:
    """Return the seconds of each of STEPS steps at the end of a full window."""
    thresholds, token = np.full(sizes.layers, threshold, np.float32), np.zeros((1, 1), np.int64)
    first, seconds = sizes.context - sizes.block, []
    for number in range(STEPS):
        token[...] = number % sizes.vocab
        with counted:
            start = time.perf_counter()
            stepper.decode(token, first + number % sizes.block, sizes.tokens_per_frame + number, thresholds)
            seconds.append(time.perf_counter() - start)
    return seconds


DENSE, REPLAYED = "dense", "all replayed"


def measure(job: Job, threads: int, modes: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return milliseconds by part, of a dense step and of one that replays every layer."""
    artifact = fc.load(Path(job.folder) / "artifact")
    (gate,) = {name for name in artifact.manifest.layers.gates if name is not None}
    rule = gate_class(gate).comparison
    limits = {DENSE: rule.never, REPLAYED: rule.always}
    return parts_of(artifact, threads, {mode: partial(_steps, job.sizes, limits[mode]) for mode in modes})


def _by_part(calls: list[_Call], whole: float) -> dict[str, float]:
    """Return milliseconds by part. `whole` is the seconds of a step without the hook."""
    medians = [statistics.median(call.seconds) for call in calls]
    sums = dict.fromkeys(PARTS, 0.0)
    for call, seconds in zip(calls, medians, strict=True):
        sums[call.part] += (seconds - min(medians)) * 1e3
    sums[CALLS] = whole * 1e3 - sum(sums.values())
    return sums


def main() -> None:
    """Print the parts of a job's artifact as JSON, with one thread and with all threads of the job.

    With several threads only the dense step is measured. A step that replays every layer has one parallel kernel. The
    hook holds it up for so long that the other threads sleep when it begins.
    """
    job = Job.from_json(json.loads(sys.argv[1]))
    threads = job.sizes.threads
    several = {str(threads): measure(job, threads, [DENSE])} if threads > 1 else {}
    print(json.dumps({**several, "1": measure(job, 1, [DENSE, REPLAYED])}))


if __name__ == "__main__":
    main()
