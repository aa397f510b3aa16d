"""One picture: milliseconds per token by precision, ours and peers, and the bound of the memory bandwidth."""

from pathlib import Path
from typing import Any

from fastcar_compile.support.packages import pyplot
from speed.engines import OURS
from speed.plan import KV, PEERS
from speed.report import Row

COLOURS = {
    "pytorch eager": "#e0912f",
    "torch.compile": "#c8641e",
    "onnxruntime": "#7b52ab",
    "openvino": "#5b9a58",
    "llama.cpp": "#8c8c8c",
}
BLUES = ("#16407a", "#2f6db3", "#4f9bd9", "#8fc1ea")
TITLES = {"float32": "float32", "bfloat16": "bfloat16", "w8a8": "8 bit", "w4a8": "4 bit"}


def plot(rows: list[Row], path: Path) -> None:
    """Draw the measured rows of batch 1 at the common context. The suffix of `path` gives the format."""
    panels = [(p, _panel(rows, p)) for p in PEERS]
    panels = [(p, found) for p, found in panels if found]
    figure, axes = pyplot().subplots(1, len(panels), figsize=(3.4 * len(panels), 4.2), squeeze=False)
    for axis, (precision, found) in zip(axes[0], panels, strict=True):
        _draw(axis, TITLES[precision], found)
    axes[0][0].set_ylabel("ms per token")
    figure.text(0.5, 0.005, "dashed: the bytes of that step at the measured read bandwidth", ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    pyplot().close(figure)


def _panel(rows: list[Row], precision: str) -> list[Row]:
    """Return our rows of one precision without options, by replay ratio, then the peers."""
    plain = [r for r in rows if "missing" not in r and r["batch"] == 1 and not r["window"]]
    ours = [r for r in plain if r["engine"] == OURS and r["precision"] == precision]
    shortest = min((r["max_seq_len"] for r in ours), default=0)
    ours = [r for r in ours if r["max_seq_len"] == shortest]
    return ours + [r for r in plain if (r["engine"], r["precision"]) in PEERS[precision]]


def _draw(axis: Any, title: str, rows: list[Row]) -> None:
    for i, row in enumerate(rows):
        own = row["engine"] == OURS
        colour = BLUES[min(i, len(BLUES) - 1)] if own else COLOURS[row["engine"]]
        axis.bar(i, row["ms_per_token"], color=colour, width=0.8)
        axis.text(i, row["ms_per_token"], f"{row['ms_per_token']:.3g}", ha="center", va="bottom", fontsize=8)
        if row["bandwidth_share"]:
            limit = row["ms_per_token"] * row["bandwidth_share"]
            axis.plot([i - 0.45, i + 0.45], [limit, limit], color="black", linestyle="--", linewidth=1)
    axis.set_xticks(range(len(rows)), [_label(r) for r in rows], rotation=60, ha="right", fontsize=8)
    axis.set_title(title)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _label(row: Row) -> str:
    if row["engine"] == OURS:
        cache = f", {row['kv']} KV" if row["kv"] != KV[row["precision"]] else ""
        return (f"ours, replay {row['replay']:g}" if row["replay"] else "ours, dense") + cache
    return f"{row['engine']} {row['precision']}"
