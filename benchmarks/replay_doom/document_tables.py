"""Tables of docs/measurements/doom.md."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from replay_doom.curves import WHOLE, Row
from replay_doom.sequences import KINDS

Rows = Sequence[Row]


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{100 * share:.0f} %"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for line in lines:
        yield f"| {' | '.join(line)} |"


def dense_row(rows: Rows) -> Row:
    """Return the row without replay, with full attention."""
    return next(row for row in rows if row["gate"] == "none" and row["sparse_attention"] == "none")


def name_of(row: Row) -> str:
    """Return the gate of a row, and what its thresholds were calibrated for."""
    return "dense" if row["gate"] == "none" else f"`{row['calibration']}`"


def every_row(rows: Rows) -> Iterator[str]:
    """Yield a table of all rows with full attention."""
    lines = [
        [
            name_of(row),
            f"{100 * row['replay_ratio']:.1f} %",
            " / ".join(f"{100 * share:.0f}" for share in row["replay_by_layer"]),
            f"{float(row['nll']):.4f}",
            f"{float(row['nll']) / row['nll_dense']:.3f}x",
            f"{100 * row['token_agreement']:.1f} %",
            f"{float(row['psnr']):.2f} dB",
            f"{row['ssim']:.3f}",
        ]
        for row in rows
        if row["sparse_attention"] == "none"
    ]
    header = ["gate", "replay", "by layer, %", "NLL", "cost", "agreement", "PSNR", "SSIM"]
    yield from table(header, lines)


def window_table(found: Mapping[str, Rows]) -> Iterator[str]:
    """Yield what windows cost, alone and with replay."""
    lines = []
    for decoder, rows in found.items():
        for row in (r for r in rows if r["sparse_attention"] != "none"):
            values = [
                percent(row["replay_ratio"]),
                f"{float(row['nll']):.3f}",
                f"{float(row['nll']) / row['nll_dense']:.3f}x",
            ]
            lines.append([decoder, row["sparse_attention"], name_of(row), *values])
    yield from table(["decoder", "attention", "gate", "replay", "NLL", "cost"], lines)


def precision_table(found: Mapping[str, Rows]) -> Iterator[str]:
    """Yield the dense NLL of every precision, and replay and cost of the gates in it."""
    lines = []
    for decoder, rows in found.items():
        reference = float(rows[0]["nll"])
        for row in rows:
            nll = float(row["nll"])
            costs = [f"{nll / reference:.3f}x", f"{nll / row['nll_dense']:.3f}x"]
            lines.append([decoder, row["precision"], name_of(row), percent(row["replay_ratio"]), f"{nll:.4f}", *costs])
    header = ["decoder", "precision", "gate", "replay", "NLL", "of dense float32", "of dense, same precision"]
    yield from table(header, lines)


def similarity_table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """Yield the median change of the outputs, and the mean rank correlation of every score, by kind of motion."""
    groups = [name for name in (*KINDS, WHOLE) if found[name][0]]
    names = [name for name in found[WHOLE][0] if name != "output change"]
    lines = []
    for group in groups:
        layers = found[group]
        means = [f"{np.mean([layer[name] for layer in layers]):.2f}" for name in names]
        lines.append([group, f"{np.median([layer['output change'] for layer in layers]):.2f}", *means])
    yield from table(["frames", "change of the output", *(f"`{name}`" for name in names)], lines)
