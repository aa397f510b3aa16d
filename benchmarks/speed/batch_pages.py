"""Tables of the workloads "batch" and "prefill", and docs/measurements/batch_table.md."""

from collections.abc import Callable
from pathlib import Path

from speed.batch_plan import BATCH_PEERS
from speed.batch_plot import plot_bars, plot_roofline
from speed.engines import OURS
from speed.report import Row, shown, versions
from speed.sizes import BATCH, DENSE, PREFILL

WRITTEN_BY = "<!-- Written by `python benchmarks/decode.py --workloads batch,prefill --docs`; do not edit. -->\n"
PICTURES = """![Roofline](../images/batch_roofline.png)

![Batch 8 and 32, and a prompt of 512 tokens](../images/batch_bars.png)
"""

HEAD = (
    "| size | engine | precision | replay | ms | tokens/s | MB | GMAC | MAC/byte | bound ms | of bound | against |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def batch_page(rows: list[Row], docs: Path) -> None:
    """Write the table's page and its pictures."""
    page = docs / "measurements" / "batch_table.md"
    page.write_text(f"{WRITTEN_BY}\n# Batches and prompts: table\n\n{batch_text(rows)}", "utf-8")
    plot_roofline(rows, docs / "images" / "batch_roofline.png")
    plot_bars(rows, docs / "images" / "batch_bars.png")


def batch_text(rows: list[Row]) -> str:
    """Return what the page shows: conditions, the summary, and a table per precision."""
    parts = [conditions(rows), PICTURES, summary(rows)]
    for group in BATCH_PEERS:
        found = [r for r in rows if r["group"] == group]
        if found:
            parts.append(f"## {group}\n\n{table(found)}")
    return "\n".join(parts)


def conditions(rows: list[Row]) -> str:
    """Return a paragraph with shape, threads, machine, versions and what the machine can do at most."""
    measured = [r for r in rows if "missing" not in r]
    if not measured:
        return ""
    shape = f"{measured[0]['layers']} layers, width {measured[0]['hidden']}, {measured[0]['threads']} threads"
    peaks = []
    for group in BATCH_PEERS:
        found = [r for r in measured if r["group"] == group and "gigamacs" in r]
        if found:
            read, multiplied = ([r[name] for r in found] for name in ("gigabytes", "gigamacs"))
            peaks.append(
                f"{group} {min(read):.0f} - {max(read):.0f} GB/s, {min(multiplied):.0f} - {max(multiplied):.0f} GMAC/s"
            )
    agreeing = [
        f"{group} {min(r['cosine'] for r in measured if r['group'] == group):.4f}"
        for group in BATCH_PEERS
        if any(r["group"] == group for r in measured)
    ]
    return (
        f"{shape}, {measured[0]['machine']}. Measured bandwidth and peak, lowest and highest of the groups: "
        f"{'; '.join(peaks)}. Least cosine of an engine's logits with PyTorch's in float32: {', '.join(agreeing)}. "
        f"{', '.join(versions(measured))}.\n"
    )


def summary(rows: list[Row]) -> str:
    """Return two tables: ours against the fastest peer, and replay against the own dense step."""
    sizes = sorted({_size(r) for r in rows})
    head = "| precision | " + " | ".join(_title(*s) for s in sizes) + " |\n" + "|---" * (len(sizes) + 1) + "|\n"
    replayed = [s for s in sizes if s[0] == BATCH]
    gain_head = "| precision, replay | " + " | ".join(_title(*s) for s in replayed) + " |\n"
    gain_head += "|---" * (len(replayed) + 1) + "|\n"
    peers, gains = "", ""
    for group in BATCH_PEERS:
        mine = [r for r in rows if r["group"] == group and "missing" not in r]
        if not mine:
            continue
        peers += _line(group, sizes, lambda s, mine=mine: fastest_peer(mine, s))
        for variant, coupled in sorted({(r["variant"], r["coupled"]) for r in mine if r["variant"] != DENSE}):
            name = f"{group}, {float(variant):g}, {'coupled' if coupled else 'independent'}"
            gains += _line(name, replayed, lambda s, m=mine, v=variant, c=coupled: _gain(m, s, v, c))
    return (
        "## Against the fastest peer\n\nMilliseconds of the fastest peer as a multiple of ours, both dense.\n\n"
        f"{head}{peers}\n"
        "## Replay against the own dense step\n\nMeasured, and in brackets what the roofline allows.\n\n"
        f"{gain_head}{gains}"
    )


def _line(name: str, sizes: list[tuple[str, int]], cell: Callable[[tuple[str, int]], str]) -> str:
    return f"| {name} | " + " | ".join(cell(size) for size in sizes) + " |\n"


def fastest_peer(rows: list[Row], size: tuple[str, int]) -> str:
    """Return the ratio to the fastest peer of a size and its name; empty if there is none."""
    peers = [r for r in rows if _size(r) == size and r["engine"] != OURS and r.get("times_ours")]
    if not peers:
        return ""
    best = min(peers, key=lambda r: r["times_ours"])
    return f"{best['times_ours']:.2f} ({best['engine']} {best['precision']})"


def _gain(rows: list[Row], size: tuple[str, int], variant: str, coupled: bool) -> str:
    found = [r for r in rows if _size(r) == size and r["variant"] == variant and r["coupled"] == coupled]
    if not found or "times_dense" not in found[0]:
        return ""
    possible = found[0].get("times_dense_possible")
    return f"{found[0]['times_dense']:.2f}" + ("" if possible is None else f" ({possible:.2f})")


def table(rows: list[Row]) -> str:
    """Return the rows of a precision by size in Markdown, and the missing engines with their reasons."""
    text = HEAD
    for row in sorted((r for r in rows if "missing" not in r), key=lambda r: _size(r)):
        text += _row(row)
    reasons = [
        f"Missing: {r['engine']} {r['precision']}, {_title(*_size(r))}: {r['missing']}" for r in rows if "missing" in r
    ]
    return text + "".join(f"\n{reason}\n" for reason in dict.fromkeys(reasons))


def _row(row: Row) -> str:
    replay = "dense" if row["variant"] == DENSE else f"{row['replay_achieved']:.2f}"
    replay += " coupled" if row["coupled"] else ""
    against = ""
    if row.get("times_ours"):
        against = f"{row['times_ours']:.2f}x ours"
    elif row.get("times_dense"):
        against = f"dense {row['times_dense']:.2f}x"
    bound = ["not measured", ""]
    if "bound_ms" in row:
        bound = [f"{shown(row['bound_ms'])} ({row['bound_by']})", f"{row['bound_share']:.0%}"]
    cells = [_title(*_size(row)), row["engine"], row["precision"], replay, shown(row["ms"])]
    cells += [f"{row['tokens_per_second']:.0f}", f"{row['bytes'] / 1e6:.0f}", shown(row["macs"] / 1e9)]
    return "| " + " | ".join([*cells, shown(row["macs_per_byte"]), *bound, against]) + " |\n"


def _size(row: Row) -> tuple[str, int]:
    return row["workload"], row["prompt"] if row["workload"] == PREFILL else row["batch"]


def _title(workload: str, number: int) -> str:
    return f"{workload} {number}"
