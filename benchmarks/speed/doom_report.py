"""The page of benchmarks/doom.py: a table of all engines, sentences about ratios, and the parts of our step."""

import statistics
from collections.abc import Mapping, Sequence

from speed.doom_plan import BITS
from speed.engines import OURS
from speed.parts import PARTS
from speed.report import Row
from speed.sizes import DENSE, PLAY

Parts = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Threads -> "dense" or "all replayed" -> part -> milliseconds."""

CLOSEST = ("w8a8", "float16")
"""Our precision and KV type whose parts are shown, and which stands for 8 bit in comparisons with peers."""


def frames_per_second(row: Row, tokens_per_frame: int) -> float:
    """Return the frames that a second has at the row's time per token, of whole frames."""
    return 1e3 / (row["ms_per_token"] * tokens_per_frame)


def within_rounds(slower: Row, faster: Row) -> float:
    """Return the median over rounds of how many times as fast the second row is."""
    return statistics.median(a / b for a, b in zip(slower["rounds_ms"], faster["rounds_ms"], strict=True))


def _dense_of(row: Row, rows: Sequence[Row]) -> Row:
    same = ("engine", "precision", "kv")
    return next(r for r in rows if r["variant"] == DENSE and all(r[k] == row[k] for k in same))


def table(rows: Sequence[Row], tokens_per_frame: int) -> str:
    """Return all rows in Markdown, and the missing engines with their reasons."""
    lines = ["| engine | weights | KV | replayed | ms per token | min - max | frames/s | against its dense step |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    measured = [r for r in rows if "missing" not in r]
    for r in measured:
        share = "dense" if r["variant"] == DENSE else f"{r['replay_achieved']:.0%}" + " (play)" * (r["variant"] == PLAY)
        ratio = "" if r["variant"] == DENSE else f"{within_rounds(_dense_of(r, measured), r):.2f}x"
        times = f"{r['ms_per_token']:.3f} | {r['ms_min']:.3f} - {r['ms_max']:.3f}"
        fps = f"{frames_per_second(r, tokens_per_frame):.1f}"
        lines.append(f"| {r['engine']} | {r['precision']} | {r['kv']} | {share} | {times} | {fps} | {ratio} |")
    reasons = [f"Missing: {r['engine']} {r['precision']}: {r['missing']}" for r in rows if "missing" in r]
    for reason in dict.fromkeys(reasons):
        lines += ["", reason]
    return "\n".join(lines) + "\n"


def against_peers(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each width of weights: our dense step and the fastest peer, within a round."""
    dense = [r for r in rows if "missing" not in r and r["variant"] == DENSE]
    lines = []
    for bits in sorted({BITS[r["precision"]] for r in dense}, reverse=True):
        own, peers = (
            [r for r in dense if BITS[r["precision"]] == bits and (r["engine"] == OURS) == mine]
            for mine in (True, False)
        )
        if own and peers:
            fastest = min(peers, key=lambda r: r["ms_per_token"])
            named = [r for r in own if (r["precision"], r["kv"]) == CLOSEST] or own
            mine = named[0]
            lines.append(
                f"{bits} bit: {mine['precision']} with {mine['kv']} KV is {within_rounds(fastest, mine):.2f}x as fast "
                f"as the fastest peer, {fastest['engine']} {fastest['precision']}."
            )
    return lines


def parts_table(parts: Parts) -> str:
    """Return milliseconds by part, a column for each number of threads and mode."""
    columns = [(threads, mode) for threads in sorted(parts) for mode in parts[threads]]
    heads = [f"{threads} thread{'s' * (threads != '1')}, {mode}" for threads, mode in columns]
    lines = [f"| part | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for part in PARTS:
        lines.append(f"| {part} | {' | '.join(f'{parts[t][m][part]:.3f}' for t, m in columns)} |")
    totals = (f"{sum(parts[t][m].values()):.3f}" for t, m in columns)
    return "\n".join([*lines, f"| the step | {' | '.join(totals)} |"]) + "\n"
