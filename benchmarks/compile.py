"""Time and peak resident memory of a build, and of opening its artifact, by number of layers and width.

    python benchmarks/compile.py --layers 4,32 --hidden 1024 --json out.json
    python benchmarks/compile.py --layers 32 --hidden 4096 --intermediate 11008 --vocab 32000 --quant w4a8 --folder big
    python benchmarks/compile.py --layers 32 --hidden 4096 --intermediate 11008 --vocab 32000 --checkpoint big/model

The parent writes a random Llama checkpoint in bfloat16 shards, one layer at a time. One process compiles its folder, a
second one opens the artifact and decodes a few tokens. Graph seconds leave out writing and hashing weights.
With --checkpoint only the random checkpoint is written.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from compile_time import HLS, PLACING, WEIGHTS, timed_build
from safetensors.torch import save_file
from transformers import LlamaConfig

import fastcar_compile as fc

WEIGHT_STAGES = (WEIGHTS, HLS, PLACING)
"""Stages of `compile_time.py` whose time grows with the bytes of the weights. They do not count as graph seconds."""


@dataclass(frozen=True)
class Case:
    """One build. Lengths are in tokens."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    max_seq_len: int
    quant: str
    target: str


def write_checkpoint(folder: Path, case: Case) -> int:
    """Write a random bfloat16 Llama, one shard per layer, and return its bytes. One shard is in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=max(1, case.hidden // 128),
        num_key_value_heads=max(1, case.hidden // 128),
        vocab_size=case.vocab,
        max_position_embeddings=case.max_seq_len,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    weights, total = {}, 0
    shards = list(_shards(case))
    for i, shapes in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        torch.manual_seed(i)
        tensors = {n: (torch.randn(s, dtype=torch.bfloat16) * 0.02) for n, s in shapes.items()}
        save_file(tensors, folder / name)
        weights |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, sort_keys=True))
    return total


def _shards(case: Case) -> Iterator[dict[str, tuple[int, ...]]]:
    h, i = case.hidden, case.intermediate
    yield {"model.embed_tokens.weight": (case.vocab, h), "model.norm.weight": (h,)}
    for layer in range(case.layers):
        at = f"model.layers.{layer}"
        square = {f"{at}.self_attn.{n}_proj.weight": (h, h) for n in "qkvo"}
        norms = {f"{at}.{n}_layernorm.weight": (h,) for n in ("input", "post_attention")}
        mlp = {f"{at}.mlp.gate_proj.weight": (i, h), f"{at}.mlp.up_proj.weight": (i, h)}
        yield square | norms | mlp | {f"{at}.mlp.down_proj.weight": (h, i)}
    yield {"lm_head.weight": (case.vocab, h)}


def build(case: Case, folder: Path) -> dict[str, Any]:
    """Compile `folder` in this process. Return seconds by stage and the peak resident memory of the process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output = folder / "artifact"
    found = timed_build(folder / "model", case.target, output, quant=case.quant, tokens_per_frame=256)
    wall, cpu = ({name: getattr(s, kind) for name, s in found.items()} for kind in ("wall", "cpu"))
    return {
        "wall_seconds": sum(wall.values()),
        "cpu_seconds": sum(cpu.values()),
        "graph_wall_seconds": sum(v for k, v in wall.items() if k not in WEIGHT_STAGES),
        "graph_cpu_seconds": sum(v for k, v in cpu.items() if k not in WEIGHT_STAGES),
        "stages_wall_seconds": wall,
        "stages_cpu_seconds": cpu,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "rss_before_bytes": before * 1024,
        "artifact_bytes": sum(f.size for f in fc.load(output).manifest.files.values()),
    }


def decode(folder: Path, tokens: int = 8) -> dict[str, Any]:
    """Open the artifact of `build` in this process and decode. Return seconds, and memory that maps no file."""
    start = time.perf_counter()
    artifact = fc.load(folder / "artifact")
    loaded = time.perf_counter()
    session = artifact.session("cpu")
    opened = time.perf_counter()
    logits = session.prefill(torch.arange(1, 4)[None])
    seconds = [time.perf_counter()]
    for _ in range(tokens):
        logits = session.step(logits.argmax(-1))
        seconds.append(time.perf_counter())
    return {
        "check_seconds": loaded - start,
        "session_seconds": opened - loaded,
        "prefill_seconds": seconds[0] - opened,
        "step_seconds": statistics.median(b - a for a, b in itertools.pairwise(seconds)),
        "decode_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "decode_anonymous_bytes": _anonymous_bytes(),
        "finite": bool(torch.isfinite(logits).all()),
    }


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def measure(case: Case, folder: Path | None) -> dict[str, Any]:
    """Return the measurements of one case, made in child processes."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        size = write_checkpoint(Path(place) / "model", case)
        built = _child("--child", json.dumps(asdict(case)), place)
        return asdict(case) | {"checkpoint_bytes": size} | built | _child("--decode-child", place)


def _child(*arguments: str) -> dict[str, Any]:
    run = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for people."""
    names = (
        "layers",
        "hidden",
        "quant",
        "weights GB",
        "artifact GB",
        "wall s",
        "cpu s",
        "graph cpu s",
        "peak GB",
        "open s",
        "token ms",
    )
    lines = [" ".join(f"{n:>11}" for n in names)]
    for r in rows:
        sizes = (r["checkpoint_bytes"] / 1e9, r["artifact_bytes"] / 1e9)
        numbers = (*sizes, r["wall_seconds"], r["cpu_seconds"], r["graph_cpu_seconds"])
        opened = (r["check_seconds"] + r["session_seconds"], r["step_seconds"] * 1e3)
        shown = (f"{n:.2f}" for n in (*numbers, r["peak_rss_bytes"] / 1e9, *opened))
        columns = (r["layers"], r["hidden"], r["quant"], *shown)
        lines.append(" ".join(f"{c:>11}" for c in columns))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="4,8", help="numbers separated by commas")
    parser.add_argument("--hidden", default="512", help="numbers separated by commas, multiples of 128")
    parser.add_argument("--intermediate", type=int, default=0, help="default: 2.75 x hidden")
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--max-seq-len", type=int, default=2049)
    parser.add_argument("--quant", default="w8a8")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--folder", type=Path, default=None, help="folder for temporary checkpoints and artifacts")
    parser.add_argument("--checkpoint", type=Path, default=None, help="write the first case's checkpoint here and stop")
    parser.add_argument(
        "--rounds", type=int, default=1, help="builds of each case, alternating; the least graph seconds count"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    parser.add_argument("--decode-child", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the rows."""
    options = parse()
    if options.child:
        print(json.dumps(build(Case(**json.loads(options.child[0])), Path(options.child[1]))))
        return
    if options.decode_child:
        print(json.dumps(decode(options.decode_child)))
        return
    cases = [
        Case(
            *(layers, hidden, options.intermediate or hidden * 11 // 4, options.vocab),
            *(options.max_seq_len, options.quant, options.target),
        )
        for hidden in map(int, options.hidden.split(","))
        for layers in map(int, options.layers.split(","))
    ]
    if options.checkpoint:
        print(f"{write_checkpoint(options.checkpoint, cases[0])} bytes in {options.checkpoint}")
        return
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    rounds = [[measure(case, options.folder) for case in cases] for _ in range(options.rounds)]
    rows = [min(runs, key=lambda row: row["graph_cpu_seconds"]) for runs in zip(*rounds, strict=True)]
    print(table(rows))
    if options.json is not None:
        result = {"machine": {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
