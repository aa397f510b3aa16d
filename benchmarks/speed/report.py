"""Rows of the results, their table, and sentences about ratios."""

import platform
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from speed.engines import OURS
from speed.plan import PEERS
from speed.runner import Result
from speed.sizes import DENSE, PLAY, Sizes

Row = dict[str, Any]
_PRODUCT = {"pytorch eager": "PyTorch", "torch.compile": "PyTorch", "llama.cpp": "llama-cpp-python"}


def rows_of(results: list[Result], reference: list[float], bandwidth: float) -> list[Row]:
    """Return one row per engine, precision and replay ratio. The numbers of a missing engine are None.

    Args:
        reference: logits to compare with. bandwidth: measured read bandwidth in GB/s.
    """
    return [_missing(r) if r.reason else _row(r, reference, bandwidth) for r in results]


def _common(result: Result) -> Row:
    job = result.job
    return {
        "engine": job.engine,
        "precision": job.precision,
        "replay": 0.0 if result.variant in (DENSE, PLAY) else float(result.variant),
        "variant": result.variant,
        "batch": job.batch,
        "context": job.sizes.context,
        "max_seq_len": job.max_seq_len or job.sizes.cache_length,
        "window": job.window,
        "kv": job.kv,
    }


def _missing(result: Result) -> Row:
    numbers = (
        *("ms_per_token", "ms_min", "ms_max", "rounds_ms"),
        *("bytes_per_token", "bandwidth_share", "bandwidth_gb_s", "cosine"),
    )
    return _common(result) | dict.fromkeys(numbers) | {"missing": result.reason}


def _row(result: Result, reference: list[float], bandwidth: float) -> Row:
    assert result.traffic is not None
    milliseconds = [s * 1e3 for s in result.samples]
    median = statistics.median(milliseconds)
    streamed = result.traffic.bytes(result.job.sizes.context, result.replay)
    return _common(result) | {
        "ms_per_token": median,
        "ms_min": min(milliseconds),
        "ms_max": max(milliseconds),
        "rounds_ms": _by_round(milliseconds, result.job.sizes.samples),
        "bytes_per_token": round(streamed),
        "bandwidth_share": streamed / (median * 1e-3) / (bandwidth * 1e9) if bandwidth else None,
        "bandwidth_gb_s": bandwidth,
        "replay_achieved": result.replay,
        # The first row of a batch decodes the tokens of the reference, which has one row.
        "cosine": cosine(result.logits[: len(reference)], reference),
        "version": result.version,
        "notes": result.notes,
    }


def _by_round(samples: list[float], each: int) -> list[float]:
    """Return the median of each round's samples."""
    return [statistics.median(samples[i : i + each]) for i in range(0, len(samples), each)]


def cosine(a: list[float], b: list[float]) -> float:
    """Return the cosine of the angle between two vectors."""
    x, y = np.array(a), np.array(b)
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown, and the missing engines with their reasons."""
    head = "| engine | precision | replay | ms per token | min - max | MB per token | bandwidth | notes | times dense |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for r in rows:
        if "missing" not in r:
            share = r["bandwidth_share"]
            times = f"{r['ms_per_token']:.3g} | {r['ms_min']:.3g} - {r['ms_max']:.3g}"
            streamed = f"{r['bytes_per_token'] / 1e6:.0f} | {'not measured' if share is None else f'{share:.0%}'}"
            own = f"| {r['engine']} | {r['precision']} | {r['replay']:g} | {times} | {streamed} |"
            lines.append(f"{own} {_remark(r)} | {_gain(r, rows)} |")
    reasons = [f"Missing: {r['engine']} {r['precision']}: {r['missing']}" for r in rows if "missing" in r]
    for reason in dict.fromkeys(reasons):
        lines += ["", reason]
    return "\n".join(lines) + "\n"


def conditions(sizes: Sizes, rows: list[Row]) -> str:
    """Return a paragraph with shape, threads, machine and versions."""
    measured = [r for r in rows if "missing" not in r]
    bandwidth = sorted({round(r["bandwidth_gb_s"], 1) for r in measured} - {0.0})
    read = f"Read bandwidth by group: {', '.join(map(str, bandwidth))} GB/s. " if bandwidth else ""
    shape = f"{sizes.layers} layers of {sizes.hidden} x {sizes.intermediate}, {sizes.heads} heads"
    return (
        f"{shape}, vocabulary {sizes.vocab}, context {sizes.context}, {sizes.threads} threads, {processor()}. "
        f"{read}Medians of {sizes.rounds * sizes.samples} samples of {sizes.group} tokens. "
        f"{', '.join(versions(measured))}.\n"
    )


def shown(value: float) -> str:
    """Return a number with three digits, or with those before its point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def versions(rows: list[Row]) -> list[str]:
    """Return peers with their versions."""
    return sorted({f"{_PRODUCT.get(r['engine'], r['engine'])} {r['version']}" for r in rows if r["engine"] != OURS})


def processor() -> str:
    """Return the name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _remark(row: Row) -> str:
    parts = []
    if row["batch"] > 1:
        parts.append(f"batch {row['batch']}, coupled")
    if row["engine"] == OURS:
        parts.append(f"context {row['context']} of {row['max_seq_len']}")
    if row["window"]:
        parts.append(f"window {row['window']}")
    if row["kv"]:
        parts.append(f"{row['kv']} KV")
    return "; ".join(parts)


def _gain(row: Row, rows: list[Row]) -> str:
    """Return how many times as fast as its own dense step a row is: the median of the rounds."""
    same = ("engine", "precision", "batch", "context", "kv")
    plain = [d for d in rows if not d["replay"] and not d["window"] and "missing" not in d]
    alike = [d for d in plain if all(d[k] == row[k] for k in same)]
    if row["engine"] != OURS or not alike or row is alike[0]:
        return ""
    rounds = [dense / own for dense, own in zip(alike[0]["rounds_ms"], row["rounds_ms"], strict=True)]
    return f"{statistics.median(rounds):.2f}x"


def speedups(rows: list[Row]) -> list[str]:
    """Return a sentence for each precision: the own dense step and the fastest peer."""
    measured = [r for r in rows if "missing" not in r]
    ours = [r for r in measured if r["engine"] == OURS]
    lines = []
    for precision, names in PEERS.items():
        dense = [r for r in ours if r["precision"] == precision and not r["replay"] and r["batch"] == 1]
        peers = [r for r in measured if (r["engine"], r["precision"]) in names and r["engine"] != OURS]
        if dense and peers:
            best = min(peers, key=lambda r: r["ms_per_token"])
            ratio = best["ms_per_token"] / dense[0]["ms_per_token"]
            lines.append(f"{precision}, dense: {ratio:.2f}x the fastest peer ({best['engine']} {best['precision']})")
    return lines
