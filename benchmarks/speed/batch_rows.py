"""Rows of the workloads "batch" and "prefill", and the file that keeps them between runs."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from speed.engines import OURS
from speed.report import Row, cosine, processor
from speed.runner import Result
from speed.sizes import DENSE
from speed.work import Roofline, parts_of

_KEY = ("workload", "group", "engine", "precision", "batch", "prompt", "coupled", "variant")


def merged(parts: Sequence[Sequence[Result]]) -> list[Result]:
    """Return the results of a group whose engines were opened in parts: ours, which is in every part, once."""
    found: dict[tuple[str, str, str, bool], Result] = {}
    for result in (r for part in parts for r in part):
        job = result.job
        key = (job.engine, job.precision, result.variant, job.coupled)
        first = found.setdefault(key, result)
        if first is not result:
            first.samples += result.samples
            first.gigabytes += result.gigabytes
            first.gigamacs += result.gigamacs
    return list(found.values())


def roofline_of(results: Iterable[Result]) -> Roofline | None:
    """Return the medians of what our engine measured between its blocks; None: it did not run."""
    read = [g for r in results for g in r.gigabytes]
    multiplied = [g for r in results for g in r.gigamacs]
    return Roofline(statistics.median(read), statistics.median(multiplied)) if read and multiplied else None


def ratios_to_ours(parts: Sequence[Sequence[Result]]) -> dict[tuple[str, str], float]:
    """Return (engine, precision) of a peer -> its milliseconds as a multiple of our dense ones.

    It is the median of the rounds' ratios: both blocks of a ratio follow each other within seconds.
    """
    found = {}
    for part in parts:
        dense = next((r for r in part if r.job.engine == OURS and r.variant == DENSE and not r.reason), None)
        for peer in part:
            if dense is not None and peer.job.engine != OURS and not peer.reason:
                pairs = zip(rounds_of(peer), rounds_of(dense), strict=False)
                found[peer.job.engine, peer.job.precision] = statistics.median(a / b for a, b in pairs)
    return found


def rounds_of(result: Result) -> list[float]:
    """Return the median milliseconds of each round."""
    each, samples = result.job.sizes.samples, result.samples
    return [statistics.median(samples[i : i + each]) * 1e3 for i in range(0, len(samples), each)]


def rows_of(group: str, parts: Sequence[Sequence[Result]], reference: list[float]) -> list[Row]:
    """Return one row per engine, precision and variant of a group.

    Args:
        group: our precision. parts: results of the engines that were open together. reference: logits of PyTorch.
    """
    peers = ratios_to_ours(parts)
    results = merged(parts)
    roof = roofline_of(results)
    dense = next((r for r in results if r.job.engine == OURS and r.variant == DENSE and not r.reason), None)
    rows = []
    for result in results:
        row = _common(group, result)
        if result.reason:
            rows.append(row | {"missing": result.reason})
            continue
        row |= _numbers(result, roof) | {"cosine": cosine(result.logits, reference)}
        row |= {"version": result.version, "notes": result.notes}
        if result.job.engine != OURS:
            row["times_ours"] = peers.get((result.job.engine, result.job.precision))
        elif result.variant != DENSE and dense is not None:
            row |= _gain(result, dense, roof)
        rows.append(row)
    return rows


def _common(group: str, result: Result) -> Row:
    job = result.job
    return {
        "workload": job.workload,
        "group": group,
        "engine": job.engine,
        "precision": job.precision,
        "batch": job.batch,
        "prompt": job.prompt,
        "coupled": job.coupled,
        "variant": result.variant,
        "context": job.sizes.context,
        "layers": job.sizes.layers,
        "hidden": job.sizes.hidden,
        "threads": job.sizes.threads,
        "kv": job.kv,
        "machine": processor(),
    }


def _numbers(result: Result, roof: Roofline | None) -> Row:
    assert result.traffic is not None
    job = result.job
    milliseconds = statistics.median(result.samples) * 1e3
    parts = parts_of(job, result.traffic, result.replay, result.skipped)
    streamed, macs = sum(p.bytes for p in parts), sum(p.macs for p in parts)
    row: Row = {
        "ms": milliseconds,
        "rounds_ms": rounds_of(result),
        "tokens_per_second": job.batch * job.prompt / milliseconds * 1e3,
        "bytes": round(streamed),
        "macs": round(macs),
        "macs_per_byte": macs / streamed,
        "replay_achieved": result.replay,
        "skipped": result.skipped,
    }
    if roof is not None:
        bound = roof.milliseconds(parts)
        row |= {"bound_ms": bound, "bound_by": roof.bound_by(parts), "bound_share": bound / milliseconds}
        row |= {"gigabytes": roof.gigabytes, "gigamacs": roof.gigamacs}
    return row


def _gain(result: Result, dense: Result, roof: Roofline | None) -> Row:
    """Return how much faster replay is than the dense step, and how much faster the roofline lets it be."""
    ratios = [a / b for a, b in zip(rounds_of(dense), rounds_of(result), strict=False)]
    row: Row = {"times_dense": statistics.median(ratios)}
    if roof is not None and dense.traffic is not None and result.traffic is not None:
        least = roof.milliseconds(parts_of(dense.job, dense.traffic, 0, 0))
        own = parts_of(result.job, result.traffic, result.replay, result.skipped)
        row["times_dense_possible"] = least / roof.milliseconds(own)
    return row


class Kept:
    """Rows in a file. Those of a new group replace theirs, so an interrupted run loses nothing.

    Args:
        path: None: the rows stay in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        read = json.loads(path.read_text("utf-8")) if path is not None and path.exists() else []
        self.rows: list[Row] = [r for r in read if r["machine"] == processor()]

    def add(self, rows: list[Row]) -> None:
        """Add rows of one shape, and write the file. Rows of other shapes go."""
        shapes = {_shape(r) for r in rows}
        by_key = {_key(r): r for r in (*(r for r in self.rows if _shape(r) in shapes), *rows)}
        self.rows = list(by_key.values())
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.rows, indent=1) + "\n", "utf-8")


def _key(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in _KEY)


def _shape(row: Row) -> tuple[object, ...]:
    return row["layers"], row["hidden"], row["threads"]
