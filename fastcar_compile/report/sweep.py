"""The results of a matrix as CSV and as one self-contained page, with the rows that no other row beats."""

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Rows = Sequence[Mapping[str, Any]]

_COLUMNS = {
    "model": "decoder",
    "target": "target",
    "quant": "weights",
    "offload": "offload",
    "gate": "gate",
    "target_replay": "replay asked",
    "replay_ratio": "replay measured",
    "nll_of_dense": "NLL of dense",
    "tokens_per_second": "tokens/s",
    "over_dense": "over dense",
    "bound_by": "bound by",
    "problem": "problem",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>
:root {{ color-scheme: light dark; font: 14px/1.45 system-ui, sans-serif; }}
body {{ margin: 1.5rem auto; max-width: 72rem; padding: 0 1rem; }}
figure {{ background: #fff; margin: 1rem 0; overflow-x: auto; }} svg {{ height: auto; max-width: 100%; }}
.wide {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ border-bottom: 1px solid #8886; padding: .25rem .6rem; text-align: left; white-space: nowrap; }}
td.problem {{ white-space: normal; }}
tr.front {{ font-weight: 600; }} tr.front td:first-child::before {{ content: "★ "; }}
</style></head><body><h1>{title}</h1><p>{text}</p><figure>{svg}</figure><div class="wide">{table}</div></body></html>
"""


def front(rows: Rows) -> list[int]:
    """Return the rows that no other one beats in both tokens/s and quality, the fastest first; none has a problem."""
    able = [i for i, row in enumerate(rows) if not row["problem"]]
    found, best = list[int](), float("inf")
    for i in sorted(able, key=lambda i: (-rows[i]["tokens_per_second"], _loss(rows[i]))):
        if _loss(rows[i]) < best:
            found.append(i)
            best = _loss(rows[i])
    return found


def _loss(row: Mapping[str, Any]) -> float:
    """Return what is to be small: the NLL, or where nothing was measured the share that replays."""
    return float(row.get("nll", row["target_replay"]))


def table(rows: Rows) -> str:
    """Return the rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def page(rows: Rows, title: str) -> str:
    """Return the page: a plot and a table. The same rows give the same bytes.

    Raises:
        UserError: matplotlib is missing.
    """
    best = front(rows)
    measured = any("nll" in row for row in rows)
    text = f"{len(rows)} combinations. ★: no other one is both faster and better by its "
    text += "NLL on the held-out videos." if measured else "share that replays; quality was not measured."
    text += " Tokens/s are at the replay that was asked for: predicted for a board, measured on a CPU."
    shown = {name: label for name, label in _COLUMNS.items() if any(row.get(name) for row in rows)}
    head = "".join(f"<th>{label}</th>" for label in shown.values())
    lines = "".join(_line(row, i in best, shown) for i, row in enumerate(rows))
    parts = {"title": escape(title), "text": text, "svg": _plot(rows, best, measured)}
    return _PAGE.format(**parts, table=f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>")


def _line(row: Mapping[str, Any], best: bool, shown: Mapping[str, str]) -> str:
    cells = "".join(f'<td class="{name}">{escape(_cell(row.get(name)))}</td>' for name in shown)
    return f'<tr class="front">{cells}</tr>' if best else f"<tr>{cells}</tr>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)


def _plot(rows: Rows, best: Sequence[int], measured: bool) -> str:
    """Return an SVG: a colour for each decoder, precision and gate, a marker for each target; the front is a line."""
    from fastcar_compile.support.packages import pyplot

    plt, text = pyplot(), io.StringIO()
    with plt.rc_context({"svg.hashsalt": "fastcar", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(9.6, 4.8), layout="constrained")
        able = [row for row in rows if not row["problem"]]
        series: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Mapping[str, Any]]] = {}
        for row in able:
            kind, board = (row["model"], row["quant"], row["gate"]), (row["target"], row["offload"])
            series.setdefault((kind, board), []).append(row)
        kinds, boards = (list(dict.fromkeys(pair[i] for pair in series)) for i in (0, 1))
        for (kind, board), own in series.items():
            marker, colour = "osD^vP*X"[boards.index(board) % 8], f"C{kinds.index(kind) % 10}"
            points = [[r["tokens_per_second"] for r in own], [_loss(r) for r in own]]
            axes.plot(*points, marker=marker, color=colour, linestyle=":", label=", ".join((*kind, *board)))
        axes.plot([rows[i]["tokens_per_second"] for i in best], [_loss(rows[i]) for i in best], color="#444", zorder=0)
        axes.set_xlabel("tokens/s")
        axes.set_ylabel("NLL per token, held-out" if measured else "share of t ≥ F that replays")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
