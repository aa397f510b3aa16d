"""docs/measurements/quality.md from measured rows. Every number and verdict of the page is computed here."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastcar_compile.tune.evaluate.plots import SHOWN_RATIO
from replay_quality.hindsight import HINDSIGHT_VIDEOS, Found

Row = Mapping[str, Any]
Rows = Sequence[Row]

GOALS = (("tas", 0.5, 1.18), ("learned", 0.8, 1.10), ("learned", 0.85, 1.20))
"""Goals of the calibration: (gate, replay ratio, greatest NLL relative to dense)."""

_NEAR = 0.06
"""Thresholds that replay less than others by more than this are not called better, even at a lower NLL."""

_HEAD = """# Quality

This page measures what replay costs the shipped decoders in likelihood. `python benchmarks/quality.py --docs` writes
it; do not edit it by hand. [Drafts](../explanation/drafts.md#what-it-gives) are measured on the same videos.

The decoders (`examples/moving_shapes`, `examples/bouncing_digits`) are float32. Each was trained for its videos
alone. The decoders in `tuned/` were [fine-tuned for replay](../reference/gates.md#fine-tuning-for-replay) together
with their gate `learned`. The videos are held out: no decoder, gate or threshold has seen them. Every token is
predicted from the true past (teacher-forced). Figures are of frames 2 to 8.

- *replay*: share of the eligible forwards (t >= F); in brackets, of all forwards, as the paper counts.
- *NLL*: nats per token. The dense NLL is small, so a small increase is large in proportion. Both are given.
- *agreement*: share of tokens whose most likely symbol is the dense decoder's.
- *PSNR*, *SSIM*: frames of the most likely symbols against the true frames.
- *calibrated*: thresholds per layer from [`fc.calibrate`](../reference/gates.md#calibration) on other videos.
  *uniform*: the same gate and weights, one quantile of every layer's scores. *random*: a hash decides.
- `tas` has trained head weights and `learned` is [trained](../reference/gates.md#training) as a whole, on other
  videos. Their thresholds leave a margin, because more forwards may compute on new videos: 6 % fewer compute than the
  target allows for `tas`, and 12 % fewer for `learned` (82.4 % replay for a target of 80 %).

`python benchmarks/quality.py --train` trains the gates in `gates/`. `python benchmarks/quality.py --calibrate`
chooses the thresholds in `cases.json`. After a run `build/quality/rows.json` has the rows. `fastcar evaluate`
measures your own decoder in the same way.
"""


def write_document(
    path: Path,
    found: Mapping[str, Rows],
    bounds: Mapping[str, Sequence[Found]],
    caches: Mapping[str, Mapping[str, float]],
) -> None:
    """Write the whole page. Pictures are in docs/images/quality/<decoder>/."""
    lines = [_HEAD]
    for name, rows in found.items():
        lines += [*_decoder(name, rows)]
    lines += [
        "## Goals",
        "",
        *_goals(found),
        "",
        *_tuned(found),
        "",
        *_hindsight(bounds),
        "",
        "## Calibrated against uniform and random",
        "",
        *_verdicts(found),
    ]
    lines += ["", "## Replay and sink-window", "", *_windows(found), "", *_caches(caches), ""]
    path.write_text("\n".join(lines), "utf-8")


def _decoder(name: str, rows: Rows) -> Iterator[str]:
    images = f"../images/quality/{name}"
    yield f"## {name}\n\n![NLL against replay]({images}/quality.png)\n"
    yield "| gate | thresholds | attention | replay | NLL | above dense | of dense | agreement | PSNR | SSIM |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield _line(row)
    yield "\nReplay by layer of the calibrated thresholds:\n"
    for row in rows:
        if row["calibration"] == "calibrated" and row["sparse_attention"] == "none":
            shares = " / ".join(f"{100 * share:.0f}" for share in row["replay_by_layer"])
            yield f"- `{row['gate']}` at {100 * row['target_replay']:g} %: {shares} %"
    yield f"\n![NLL by frame]({images}/drift.png)\n"
    heats = [r for r in rows if r["calibration"] == "calibrated" and r["sparse_attention"] == "none"]
    for gate in dict.fromkeys(r["gate"] for r in heats):
        targets = (r["target_replay"] for r in heats if r["gate"] == gate)
        target = min(targets, key=lambda ratio: abs(ratio - SHOWN_RATIO))
        yield f"![Where {gate} replays]({images}/heat-{gate}-calibrated-{target:g}.png)\n"
    yield f"![Frames]({images}/strips.png)\n"


def _line(row: Row) -> str:
    nll = float(row["nll"])
    cells = (
        "dense" if row["gate"] == "none" else f"`{row['gate']}`",
        "" if row["gate"] in ("none", "random") else row["calibration"],
        row["sparse_attention"] if row["sparse_attention"] != "none" else "full",
        f"{100 * row['replay_ratio']:.1f} % ({100 * row['replay_ratio_all_forwards']:.1f} %)",
        f"{nll:.4f}",
        f"{nll - row['nll_dense']:+.4f}",
        f"{nll / row['nll_dense']:.2f}x",
        f"{100 * row['token_agreement']:.2f} %",
        f"{float(row['psnr']):.1f} dB",
        f"{row['ssim']:.3f}",
    )
    return "| " + " | ".join(cells) + " |"


def _pick(rows: Rows, gate: str, calibration: str, target: float, attention: str = "none") -> Row | None:
    wanted = (gate, calibration, target, attention)
    keys = ("gate", "calibration", "target_replay", "sparse_attention")
    return next((row for row in rows if tuple(row[k] for k in keys) == wanted), None)


def _goals(found: Mapping[str, Rows]) -> Iterator[str]:
    yield "| decoder | gate | target replay | replay | NLL allowed | NLL | above dense | |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, rows in found.items():
        for gate, target, limit in GOALS:
            row = _pick(rows, gate, "calibrated", target)
            if row is None:
                continue
            ratio, nll = row["replay_ratio"], float(row["nll"])
            reached = nll <= limit * row["nll_dense"] and ratio >= target
            cells = (
                name,
                f"`{gate}`",
                f"{100 * target:g} %",
                f"{100 * ratio:.1f} %",
                f"{limit:g}x",
                f"{nll / row['nll_dense']:.2f}x",
                f"{nll - row['nll_dense']:+.4f}",
                "reached" if reached else "**not reached**",
            )
            yield "| " + " | ".join(cells) + " |"


def _tuned(found: Mapping[str, Rows]) -> Iterator[str]:
    """Yield the cost of replay in tuned decoders, counted from the original dense decoder."""
    yield "## Tuned decoders against the original ones"
    yield ""
    yield "Gate `learned`, calibrated. Tuning changes the weights, and so the NLL without replay."
    yield "This table counts the cost of replay from the dense NLL of the *original* decoder."
    yield ""
    yield "| decoder | dense | dense, tuned | target | replay | NLL | NLL, tuned | of dense, original |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, rows in found.items():
        before = found.get(name.removesuffix("/tuned"), rows)
        if before is rows:
            continue
        dense = float(before[0]["nll_dense"])
        for row in (r for r in rows if (r["gate"], r["calibration"]) == ("learned", "calibrated")):
            if row["sparse_attention"] != "none":
                continue
            old = _pick(before, "learned", "calibrated", row["target_replay"])
            nll = float(row["nll"])
            shares = f"{100 * row['target_replay']:g} % | {100 * row['replay_ratio']:.1f} %"
            known = "" if old is None else f"{float(old['nll']):.4f} at {100 * old['replay_ratio']:.1f} %"
            values = f"{known} | {nll:.4f} | {nll / dense:.2f}x"
            yield f"| {name} | {dense:.4f} | {row['nll_dense']:.4f} | {shares} | {values} |"


def _hindsight(bounds: Mapping[str, Sequence[Found]]) -> Iterator[str]:
    """Yield the goals that decisions in hindsight reach, and those that they do not."""
    yield "## A bound for every gate"
    yield ""
    yield f"Here the decisions of every token and layer are optimised one by one on {HINDSIGHT_VIDEOS} of the held-out"
    yield "videos themselves (`python benchmarks/quality.py --hindsight`). A gate does not know these videos, so it can"
    yield "hardly do better. The result is a local optimum, not a proof."
    yield ""
    yield "| decoder | target replay | replay | by layer | NLL in hindsight | NLL allowed |"
    yield "|---|---|---|---|---|---|"
    allowed = {target: limit for gate, target, limit in GOALS if gate == "learned"}
    for name, results in bounds.items():
        for one in results:
            layers = " / ".join(f"{100 * share:.0f}" for share in one.layers)
            limit, ratio = allowed[one.target], one.nll / one.nll_dense
            verdict = f"{limit:g}x" if ratio <= limit else f"{limit:g}x: **out of reach**"
            shares = f"{100 * one.target:g} % | {100 * one.replay:.1f} % | {layers} %"
            yield f"| {name} | {shares} | {ratio:.2f}x | {verdict} |"


def _verdicts(found: Mapping[str, Rows]) -> Iterator[str]:
    """Yield one line per decoder and gate: where calibrated thresholds are better, worse or not comparable."""
    yield "Thresholds are compared at one target ratio. On held-out videos all of them replay a little more or less."
    yield f"Two are not comparable where the other replays over {100 * _NEAR:g} points more at a higher NLL. With"
    yield "`learned` most tokens of a layer have the same score (no hidden unit is active), so no threshold gives every"
    yield "ratio."
    yield ""
    for name, rows in found.items():
        calibrated = [r for r in rows if r["calibration"] == "calibrated" and r["sparse_attention"] == "none"]
        for gate in dict.fromkeys(row["gate"] for row in calibrated):
            own = [row for row in calibrated if row["gate"] == gate]
            others = [text for row in own for text in _others(rows, row)]
            fine = [row for row in own if not list(_others(rows, row))]
            ratios = ", ".join(f"{100 * row['target_replay']:g}" for row in fine)
            parts = [f"calibrated is better than uniform and random at {ratios} %"] if fine else []
            yield f"- {name}, `{gate}`: {'; '.join([*parts, *others])}."


def _others(rows: Rows, row: Row) -> Iterator[str]:
    """Yield a text for each alternative that calibrated thresholds do not beat, or cannot be compared with."""
    target = row["target_replay"]
    for gate, calibration in ((row["gate"], "uniform"), ("random", "random")):
        other = _pick(rows, gate, calibration, target)
        if other is None:
            continue
        lower = float(row["nll"]) < float(other["nll"])
        comparable = row["replay_ratio"] >= other["replay_ratio"] - _NEAR
        if lower and comparable:
            continue
        shares = f"{100 * row['replay_ratio']:.1f} % against {100 * other['replay_ratio']:.1f} % replayed"
        values = f"{float(row['nll']):.4f} and {float(other['nll']):.4f}"
        what = "**not** better than" if comparable or not lower else "not comparable with"
        same = all(row[key] == other[key] for key in ("nll", "replay_by_layer"))
        what = "the same decisions as" if same else what
        yield f"{what} {calibration} at {100 * target:g} % ({values}, {shares})"


def _windows(found: Mapping[str, Rows]) -> Iterator[str]:
    """Yield whether replay with a window has a lower NLL than the window alone, in all frames or in the last one."""
    columns = ("NLL", "window alone", "last frame", "window alone", "replay is better in")
    yield f"| decoder | attention | gate | replay | {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|---|---|"
    better = total = 0
    for name, rows in found.items():
        sparse = [row for row in rows if row["sparse_attention"] != "none"]
        alone = {row["sparse_attention"]: row for row in sparse if row["gate"] == "none"}
        for row in (r for r in sparse if r["gate"] != "none"):
            won, line = _against(row, alone[row["sparse_attention"]])
            better, total = better + bool(won), total + 1
            yield f"| {name} | {row['sparse_attention']} | {line} | {' and '.join(won) or 'neither'} |"
    yield ""
    yield f"Replay with a window beats the same window alone in {better} of {total} rows. The thresholds are those of"
    yield "full attention. The pictures above show drift (NLL by frame). Small differences mean nothing: there are few"
    yield "videos."


def _against(row: Row, alone: Row) -> tuple[list[str], str]:
    nll = float(row["nll"]), float(alone["nll"])
    last = float(row["nll_by_frame"][-1]), float(alone["nll_by_frame"][-1])
    won = [what for what, (a, b) in (("NLL", nll), ("the last frame", last)) if a < b]
    cells = (f"`{row['gate']}`", f"{100 * row['replay_ratio']:.0f} %", *(f"{value:.4f}" for value in (*nll, *last)))
    return won, " | ".join(cells)


def _caches(found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield "## Keys and values in fewer bytes"
    yield ""
    yield "Dense NLL on the same videos for each KV type (`fc.compile(kv=...)`, [numbers](../reference/numerics.md))."
    yield ""
    types = list(next(iter(found.values()), {}))
    yield f"| decoder | {' | '.join(types)} |"
    yield "|---|" + "---|" * len(types)
    for name, nll in found.items():
        yield f"| {name} | {' | '.join(f'{value:.5f}' for value in nll.values())} |"
