"""The hardware model against published boards, and DRS against static mapping on recorded traces.

    python benchmarks/hardware.py --docs        # writes docs/measurements/hardware_table.md and docs/images/drs.png
    python benchmarks/hardware.py --json out.json

All figures are predictions: nothing here ran on a board. The traces are replay decisions of the shipped decoder on 16
held-out videos, recorded on this machine's CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastcar_compile as fc
from fastcar_compile.codegen.hls.design.dram import peak_bandwidth
from fastcar_compile.codegen.hls.design.exploration import explore
from fastcar_compile.estimate import DecoderShape, Estimate, Workload, estimate, load_shape
from fastcar_compile.estimate.plot import pyplot
from fastcar_compile.targets import load_target

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples" / "moving_shapes"))

from evaluate import HELD_OUT_SEED, load_model  # noqa: E402
from video import make_videos, tokenize, with_bos  # noqa: E402

ROWS = 16
BATCHES = (2, 4, 8, 16)
DRS_CORES = 2
"""One core per row leaves nothing to balance. Two cores show what balancing gains."""

THRESHOLDS = (-np.inf, -40.0, -30.0, -24.0, -16.0, -8.0)
PUBLISHED = (
    ("llama2-7b", "w4a8", "kv260", 4.9, "arXiv 2502.10659 (W4A16, KV8)"),
    ("llama3-8b", "w4a8", "kv260", 4.8, "arXiv 2507.03308 (W4, KV8)"),
    ("llama3-8b", "w4a8", "zcu104-sodimm", 8.6, "arXiv 2507.03308 (W4, KV8, PS + PL memory)"),
    ("tinyllama-1.1b", "w8a8", "zcu102", 1.5, "arXiv 2409.11424 (W8A8)"),
)
FASTCAR = {0.0: 689.7, 0.2: 556.8, 0.5: 475.3, 0.8: 390.7}
"""Replay ratio -> seconds per video of 2048 tokens on a U280 (arXiv 2505.14709)."""

FASTCAR_SINK_WINDOW = {(4, 256): 354.5, (4, 16): 324.3}
"""(sinks, window) -> the same at 87 % replay."""


def predict(shape: DecoderShape, quant: str, board: str, context: int, **options: Any) -> Estimate:
    """Return one estimate without a check that the decoder fits the board's memory."""
    return estimate(Workload(shape, quant, context, **options), load_target(board), what_if=True)


def published() -> list[dict[str, Any]]:
    """Return our prediction for each published board: context 512, attention in the fabric over an int8 cache."""
    rows = []
    for name, quant, board, figure, source in PUBLISHED:
        shape = load_shape(name)
        result = predict(shape, quant, board, 512)
        ceiling = peak_bandwidth(load_target(board)) / shape.weight_bytes(quant)
        rows.append(
            {
                "decoder": name, "quant": quant, "board": board, "predicted": result.tokens_per_second,
                "published": figure, "ceiling": ceiling, "bandwidth": result.bandwidth_utilisation,
                "power_w": result.power_w, "source": source,
            }
        )  # fmt: skip
    return rows


def vila_u_on_u280() -> list[dict[str, Any]]:
    """Return the speedup by replay ratio with FastCar's. Context 1024 is the mean of a video."""
    shape, rows = load_shape("vila-u-7b"), []
    dense = predict(shape, "w8a8", "u280", 1024)
    for ratio, seconds in FASTCAR.items():
        result = predict(shape, "w8a8", "u280", 1024, replay=ratio)
        rows.append(_beside(result, dense, ratio, "", FASTCAR[0.0] / seconds))
    for window, seconds in FASTCAR_SINK_WINDOW.items():
        result = predict(shape, "w8a8", "u280", 1024, replay=0.87, sink_window=window)
        rows.append(_beside(result, dense, 0.87, f"{window[0]} + {window[1]}", FASTCAR[0.0] / seconds))
    return rows


def _beside(result: Estimate, dense: Estimate, ratio: float, window: str, paper: float) -> dict[str, Any]:
    return {
        "replay": ratio,
        "sink_window": window,
        "seconds_per_video": 2048 * result.seconds_per_step,
        "speedup": dense.seconds_per_step / result.seconds_per_step,
        "fastcar": paper,
        "ceiling": 1 / (1 - 0.668 * ratio),
    }


def vila_u_on_zcu102() -> list[dict[str, Any]]:
    """Return dense bandwidth and the speedup at 80 % replay in w4a8, by context and offload."""
    shape, rows = load_shape("vila-u-7b"), []
    for offload in ("mlp", "linears", "all"):
        for context in (64, 256, 512, 1024):
            dense = predict(shape, "w4a8", "zcu102", context, offload=offload)
            replayed = predict(shape, "w4a8", "zcu102", context, offload=offload, replay=0.8)
            rows.append(
                {
                    "offload": offload, "context": context, "tokens_per_second": dense.tokens_per_second,
                    "weight_stream": dense.weight_stream_utilisation,
                    "replay_tokens_per_second": replayed.tokens_per_second, "speedup": replayed.speedup_over_dense,
                }
            )  # fmt: skip
    return rows


def record(frames: int) -> dict[float, np.ndarray]:
    """Return decisions bool [forwards, 4, 16] of the shipped decoder by TAS threshold, on held-out videos."""
    tokens = torch.from_numpy(with_bos(tokenize(make_videos(ROWS, HELD_OUT_SEED))))[:, : 256 * frames]
    traces = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        artifact = fc.compile(load_model(), target="cpu", batch_size=ROWS, output=Path(folder) / "artifact")
        session = artifact.session(backend="cpu", record=True)
        for threshold in THRESHOLDS:
            session.reset()
            session.set_threshold(threshold)
            session.prefill(tokens[:, :1])
            for position in range(1, tokens.shape[1]):
                session.step(tokens[:, position])
            traces[threshold] = session.stats.decisions
            print(f"threshold {threshold:g}: {session.stats.replay_ratio:.1%} replayed", file=sys.stderr)
    return traces


def drs_over_static(traces: dict[float, np.ndarray]) -> list[dict[str, Any]]:
    """Return the speedup of DRS over static mapping by batch, trace and organisation of cores; w8a8 on zcu102."""
    small = DecoderShape(
        name="moving-shapes", layers=4, hidden=128, intermediate=352, heads=4, kv_heads=4, head_dim=32, vocab=17,
        source="examples/moving_shapes",
    )  # fmt: skip
    wide = load_shape("tinyllama-1.1b").model_copy(update={"layers": 4, "vocab": 0})
    board, rows = load_target("zcu102"), []
    for shape in (small, wide):
        for batch in BATCHES:
            work = Workload(shape, "w8a8", 1, batch)
            design = explore(work.mlp_spec(), board, work.attention(), cores=[DRS_CORES]).design
            work = Workload(shape, "w8a8", 1024, batch)
            for trace in traces.values():
                decisions = trace[:, :, :batch]
                result = estimate(work, board, decisions=decisions, design=design, what_if=True)
                versus = result.comparison
                rows.append(
                    {
                        "decoder": shape.name, "batch": batch,
                        "replay": float(decisions.mean()),
                        "drs_over_static": result.tokens_per_second / versus["static_mapping"],
                        "prefetch_gain": result.tokens_per_second / versus["no_prefetch"],
                        "over_dense": result.speedup_over_dense,
                    }
                )  # fmt: skip
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw DRS over static mapping by replay, a line per batch."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 4), constrained_layout=True)
    for batch in BATCHES:
        line = [r for r in rows if r["batch"] == batch and r["decoder"] != "moving-shapes"]
        line = sorted(line, key=lambda r: r["replay"])
        axis.plot([r["replay"] for r in line], [r["drs_over_static"] for r in line], marker="o", label=f"batch {batch}")
    axis.set_xlabel("replay ratio of the recorded trace")
    axis.set_ylabel("DRS over static mapping (predicted)")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def tables(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    parts = ["<!-- Written by `python benchmarks/hardware.py --docs`; do not edit. -->"]
    parts.append("## Published boards\n\nContext 512, int8 key and value cache, attention in the fabric.\n")
    parts.append(_markdown(report["published"]))
    parts.append("## VILA-U 7B on u280, w8a8, context 1024\n")
    parts.append(_markdown(report["vila_u_u280"]))
    parts.append("## VILA-U 7B on zcu102, w4a8: dense, and 80 % replay\n")
    parts.append(_markdown(report["vila_u_zcu102"]))
    parts.append("## DRS over static mapping, recorded traces, w8a8, two cores on zcu102\n")
    parts.append(_markdown(report["drs"]))
    return "\n\n".join(parts) + "\n"


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    for row in rows:
        lines.append("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    """Predict, print, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table and the picture named above")
    parser.add_argument("--json", type=Path, default=None, help="write the report here")
    parser.add_argument("--frames", type=int, default=8, help="frames of the recorded traces")
    options = parser.parse_args()
    report = {
        "published": published(),
        "vila_u_u280": vila_u_on_u280(),
        "vila_u_zcu102": vila_u_on_zcu102(),
        "drs": drs_over_static(record(options.frames)),
    }
    print(tables(report))
    if options.docs:
        (ROOT / "docs" / "measurements" / "hardware_table.md").write_text(tables(report))
        plot(report["drs"], ROOT / "docs" / "images" / "drs.png")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
