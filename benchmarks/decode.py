"""Milliseconds per decoded token: eager PyTorch against the TVM backend, dense and with every MLP replayed.

    python benchmarks/decode.py --json out.json
    python benchmarks/decode.py --hidden 1024 --intermediate 2816 --heads 16

Engines take turns in blocks of tokens within one run: token by token, the idle threads of one engine's pool would spin
on the cores of the next. Every block starts with a few tokens that are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastcar_compile.config import CompileConfig, ReplayConfig
from fastcar_compile.frontend.capture import capture, step_module
from fastcar_compile.ir import DecoderProgram
from fastcar_compile.lowering.build import lower
from fastcar_compile.passes.base import run_pipeline
from fastcar_compile.passes.pipeline import analysis_pipeline, rewrite_pipeline
from fastcar_compile.runtime.backends.cpu import CpuBackend

Engine = Callable[[int], None]
"""Decodes the token at this sequence position."""
WARM_UP = 8
SETTLE_SECONDS = 0.05


@dataclass(frozen=True)
class Sizes:
    """One decoder and one measurement; lengths in tokens."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    batch: int
    max_seq_len: int
    tokens_per_frame: int
    quant: str
    position: int
    threads: int
    rounds: int
    block: int


def build_model(sizes: Sizes) -> LlamaForCausalLM:
    """A random Llama of these sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocab,
        max_position_embeddings=sizes.max_seq_len,
    )
    return LlamaForCausalLM(config).eval()


def build_program(model: LlamaForCausalLM, sizes: Sizes) -> DecoderProgram:
    """The rewritten decode step, with replay in every layer and thresholds as run-time inputs."""
    program = capture(
        model,
        batch_size=sizes.batch,
        max_seq_len=sizes.max_seq_len,
        tokens_per_frame=sizes.tokens_per_frame,
        prefill_chunk=0,
    )
    run_pipeline(program, analysis_pipeline())
    config = CompileConfig(
        target="cpu",
        tokens_per_frame=sizes.tokens_per_frame,
        max_seq_len=sizes.max_seq_len,
        batch_size=sizes.batch,
        quant=sizes.quant,  # type: ignore[arg-type]
        replay=ReplayConfig(),
        prefill_chunk=1,
    )
    return run_pipeline(program, rewrite_pipeline(config, sizes.layers))


def tvm_engine(backend: CpuBackend, sizes: Sizes, threshold: float) -> Engine:
    """Our CPU backend: +inf computes every MLP, -inf replays every MLP."""
    token = np.zeros((sizes.batch, 1), np.int64)
    thresholds = np.full(sizes.layers, threshold, np.float32)

    def step(position: int) -> None:
        backend.decode(token, position, position, thresholds)

    return step


@contextmanager
def eager_engine(model: LlamaForCausalLM, sizes: Sizes) -> Iterator[Engine]:
    """The original model's own static-cache step, without autograd."""
    token = torch.zeros(sizes.batch, 1, dtype=torch.int64)

    def step(position: int) -> None:
        module(input_ids=token, cache_position=torch.tensor([position]))

    with torch.inference_mode(), step_module(model, sizes.batch, sizes.max_seq_len) as (module, _):
        yield step


@contextmanager
def engines(sizes: Sizes) -> Iterator[dict[str, Engine]]:
    """Every engine of the comparison, by name."""
    model = build_model(sizes)
    program = build_program(model, sizes)
    with tempfile.TemporaryDirectory() as folder, eager_engine(model, sizes) as eager:
        lowered = lower(program.graph_module, program.outputs, program.sites, program.state_names())
        lowered.export(Path(folder) / "decode.so")
        programs = {"decode": {"library": "decode.so", **lowered.arguments()}}
        params = {name: tensor.detach().numpy() for name, tensor in program.params.items()}
        backend = CpuBackend(Path(folder), programs, params, program.state, program.config, sizes.threads)
        yield {
            "eager": eager,
            "cpu dense": tvm_engine(backend, sizes, float("inf")),
            "cpu replay": tvm_engine(backend, sizes, float("-inf")),
        }


def measure(sizes: Sizes) -> dict[str, list[float]]:
    """Seconds of every timed token, by engine."""
    torch.set_num_threads(sizes.threads)
    seconds: dict[str, list[float]] = {}
    with engines(sizes) as table:
        for _ in range(sizes.rounds):
            for name, engine in table.items():
                time.sleep(SETTLE_SECONDS)
                seconds.setdefault(name, []).extend(_block(engine, sizes))
    return seconds


def _block(engine: Engine, sizes: Sizes) -> list[float]:
    timed = []
    for i in range(WARM_UP + sizes.block):
        start = time.perf_counter()
        engine(sizes.position + i)
        timed.append(time.perf_counter() - start)
    return timed[WARM_UP:]


def summarise(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Median, best and 90th percentile in milliseconds, by engine."""
    return {
        name: {
            "median_ms": statistics.median(values) * 1e3,
            "best_ms": min(values) * 1e3,
            "p90_ms": statistics.quantiles(values, n=10)[-1] * 1e3,
        }
        for name, values in seconds.items()
    }


def report(sizes: Sizes, table: dict[str, dict[str, float]]) -> dict[str, object]:
    """What `--json` writes: sizes, machine, times and the MLP's share of a dense token."""
    dense, replay = table["cpu dense"]["median_ms"], table["cpu replay"]["median_ms"]
    return {
        "sizes": asdict(sizes),
        "machine": {"processor": platform.processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "engines": table,
        "mlp_share": 1 - replay / dense,
        "speedup_over_eager": table["eager"]["median_ms"] / dense,
    }


def parse() -> tuple[Sizes, Path | None]:
    """Command line; the defaults are the moving-shapes example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {
        "hidden": 128, "intermediate": 352, "layers": 4, "heads": 4, "kv-heads": 0, "vocab": 17, "batch": 1,
        "max-seq-len": 2049, "tokens-per-frame": 256, "position": 1024, "threads": 2, "rounds": 5, "block": 24,
    }  # fmt: skip
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--quant", choices=("none", "w8a8", "w4a8"), default="none")
    parser.add_argument("--json", type=Path, default=None, help="write the report here")
    values = vars(parser.parse_args())
    path = values.pop("json")
    values["kv_heads"] = values["kv_heads"] or values["heads"]
    return Sizes(**values), path


def main() -> None:
    """Measure, print, and write the report."""
    sizes, path = parse()
    result = report(sizes, summarise(measure(sizes)))
    for name, row in result["engines"].items():  # type: ignore[attr-defined]
        print(f"{name:12s} " + "  ".join(f"{key} {value:8.3f}" for key, value in row.items()))
    print(f"MLP share of a dense token {result['mlp_share']:.1%}; dense is {result['speedup_over_eager']:.2f}x eager")
    if path is not None:
        path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
