"""Tables of the workloads "batch" and "prefill", for docs/measurements/batch.md."""

from collections.abc import Callable

from pages import markdown

from speed.batch_plan import BATCH_PEERS
from speed.engines import OURS
from speed.report import Row, shown, versions
from speed.sizes import BATCH, DENSE, PREFILL

Size = tuple[str, int]


def batch_tables(rows: list[Row]) -> dict[str, str]:
    """Return what the page shows, by its marker: conditions, two summaries, and every measured time."""
    return {"machine": conditions(rows), "peers": peers(rows), "gains": gains(rows), "times": times(rows)}


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


def peers(rows: list[Row]) -> str:
    """Return ours against the fastest peer, by precision and size."""
    return _by_size("precision", sorted({_size(r) for r in rows}), [(g, mine, fastest_peer) for g, mine in _ours(rows)])


def gains(rows: list[Row]) -> str:
    """Return replay against the own dense step, by precision, share and batch."""
    lines: list[tuple[str, list[Row], Callable[[list[Row], Size], str]]] = []
    for group, mine in _ours(rows):
        for variant, coupled in sorted({(r["variant"], r["coupled"]) for r in mine if r["variant"] != DENSE}):
            name = f"{group}, {float(variant):g}, {'coupled' if coupled else 'independent'}"
            own = [r for r in mine if (r["variant"], r["coupled"]) == (variant, coupled)]
            lines.append((name, own, _gain))
    return _by_size("precision, replay", sorted({_size(r) for r in rows if r["workload"] == BATCH}), lines)


def times(rows: list[Row]) -> str:
    """Return milliseconds of all engines by size, with the share of the bound, and missing engines with reasons."""
    lines: list[tuple[str, list[Row], Callable[[list[Row], Size], str]]] = []
    for group, mine in _ours(rows):
        for engine, precision, replay in dict.fromkeys(map(_engine, mine)):
            own = [r for r in mine if _engine(r) == (engine, precision, replay)]
            lines.append((f"{group} | {engine} {precision} | {replay}", own, _milliseconds))
    text = _by_size("precision | engine | replay", sorted({_size(r) for r in rows}), lines)
    missing = [r for r in rows if "missing" in r]
    reasons = [f"Missing: {r['engine']} {r['precision']}, {_title(_size(r))}: {r['missing']}" for r in missing]
    return text + "".join(f"\n{reason}\n" for reason in dict.fromkeys(reasons))


def _ours(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Return the measured rows of each precision."""
    groups = [(g, [r for r in rows if r["group"] == g and "missing" not in r]) for g in BATCH_PEERS]
    return [(group, found) for group, found in groups if found]


def _by_size(head: str, sizes: list[Size], lines: list[tuple[str, list[Row], Callable[[list[Row], Size], str]]]) -> str:
    cells = [(*name.split(" | "), *(cell(rows, size) for size in sizes)) for name, rows, cell in lines]
    return markdown((*head.split(" | "), *map(_title, sizes)), cells)


def _engine(row: Row) -> tuple[str, str, str]:
    replay = "dense" if row["variant"] == DENSE else f"{float(row['variant']):g}" + " coupled" * row["coupled"]
    return row["engine"], row["precision"], replay


def _milliseconds(rows: list[Row], size: Size) -> str:
    row = next((r for r in rows if _size(r) == size), None)
    if row is None:
        return ""
    return shown(row["ms"]) + (f" ({row['bound_share']:.0%})" if "bound_share" in row else "")


def fastest_peer(rows: list[Row], size: Size) -> str:
    """Return the ratio to the fastest peer of a size and its name; empty if there is none."""
    peers = [r for r in rows if _size(r) == size and r["engine"] != OURS and r.get("times_ours")]
    if not peers:
        return ""
    best = min(peers, key=lambda r: r["times_ours"])
    return f"{best['times_ours']:.2f} ({best['engine']} {best['precision']})"


def _gain(rows: list[Row], size: Size) -> str:
    found = [r for r in rows if _size(r) == size and "times_dense" in r]
    if not found:
        return ""
    possible = found[0].get("times_dense_possible")
    return f"{found[0]['times_dense']:.2f}" + ("" if possible is None else f" ({possible:.2f})")


def _size(row: Row) -> Size:
    return row["workload"], row["prompt"] if row["workload"] == PREFILL else row["batch"]


def _title(size: Size) -> str:
    return f"{size[0]} {size[1]}"
