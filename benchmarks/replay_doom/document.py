"""docs/measurements/doom.md from the results of the stages. Every number and verdict of the page is computed here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replay_doom import document_text as text
from replay_doom import pictures
from replay_doom.curves import Point, Row, curve, most_replay, rows_of
from replay_doom.document_tables import (
    dense_row,
    every_row,
    percent,
    precision_table,
    similarity_table,
    table,
    window_table,
)
from replay_doom.rollouts import SEEDS
from replay_doom.sequences import KINDS, RICH
from replay_doom.setup import DELTA, LEARNED, LIMITS, MEAN, RANDOMLY, TOKENS_PER_FRAME, Counts, Setup, Variant
from replay_doom.stages import GATE_TARGET, SPLITS, TUNED_RATE, TUNED_TARGET, WINDOWS, loaded, within
from replay_doom.weighting import natural_shares, weighted

GOAL = (0.8, 1.10)
"""Replay and cost that the tuned decoder is to reach."""

DRIFT_FRAMES = (1, 2, 4, 8, 16, 32, 64)
ENDS = {"low": LIMITS[0], "high": LIMITS[1]}
Rows = Sequence[Row]
Results = Mapping[str, Mapping[str, Any]]
"""Decoder -> stage -> what it found."""

SHOWN_VIDEO, STRIP_FRAMES = 1, 8


@dataclass(frozen=True)
class Page:
    """The results, and the counts that they were measured with."""

    counts: Counts
    found: Results
    shares: Mapping[str, float]
    """Of the kinds of motion in all held-out play on the seen maps."""

    def rows(self, decoder: str, split: str = "held_out") -> Rows:
        """Return rows; none where the stage was not run."""
        return self.found.get(decoder, {}).get(split) or []

    def gates(self, split: str = "held_out") -> Iterator[tuple[str, Variant, Rows]]:
        """Yield every decoder and gate with rows."""
        for decoder, stages in self.found.items():
            for variant in (*stages["variants"], RANDOMLY):
                rows = self.rows(decoder, split)
                if rows_of(rows, variant):
                    yield decoder, variant, rows


def write_document(setup: Setup, docs: Path) -> None:
    """Write the page and its pictures."""
    names = (*SPLITS, "precisions", "rollouts", "similarity")
    found: dict[str, dict[str, Any]] = {d.name: {"variants": d.variants} for d in setup.decoders}
    for decoder in setup.decoders:
        found[decoder.name] |= {name: loaded(setup, decoder, name) for name in names}
        for name in (*SPLITS, "precisions"):
            shares = natural_shares(setup.tokens("held_out" if name == "precisions" else name))
            found[decoder.name][name] = [weighted(row, shares) for row in found[decoder.name][name] or []]
    page, images = Page(setup.counts, found, natural_shares(setup.tokens("held_out"))), docs / "images" / "doom"
    images.mkdir(parents=True, exist_ok=True)
    pictures.quality({name: page.rows(name) for name in found}, images / "quality.png")
    pictures.similarity(found["trained"]["similarity"], images / "similarity.png")
    rolled = {name: stages["rollouts"] for name, stages in found.items() if stages["rollouts"]}
    if rolled:
        pictures.drift(rolled, images / "drift.png")
    for name in rolled:
        _strip(setup, name, images / f"drift_{name}.png")
    (docs / "measurements" / "doom.md").write_text("\n".join(_lines(page)) + "\n", "utf-8")


def _strip(setup: Setup, decoder: str, path: Path) -> None:
    """Draw one rollout: some of its frames."""
    frames, rows = setup.pixels(), dict[str, np.ndarray]()
    with np.load(setup.work / decoder / "rollouts.npz") as tokens:
        names = {"true": "game", "dense": "dense", LEARNED.name: LEARNED.name, MEAN.name: MEAN.name}
        for name, label in names.items():
            chosen = tokens[name][SHOWN_VIDEO : SHOWN_VIDEO + 1]
            made = frames(chosen)[0]
            rows[label] = made[np.linspace(0, len(made) - 1, min(STRIP_FRAMES, len(made))).astype(int)]
    pictures.strip(rows, path)


def _lines(page: Page) -> Iterator[str]:
    yield _head(page.counts)
    for part in (_answer, _kinds, _maps, _tas, _drift, _windows, _precisions, _everything):
        yield from part(page)


def _head(counts: Counts) -> str:
    decoded = counts.frames - counts.prompt
    return text.HEAD.format(
        **asdict(counts),
        decoded=decoded,
        measured=decoded - 1,
        rich=RICH,
        image=TOKENS_PER_FRAME - 1,
        rate=TUNED_RATE,
        tuned_target=percent(TUNED_TARGET),
        gate_target=percent(GATE_TARGET),
        **ENDS,
    )


def _answer(page: Page) -> Iterator[str]:
    yield text.ANSWER
    columns = [f"{SPLITS[split]}, {limit:.2f}x" for split in SPLITS for limit in LIMITS]
    lines, best = [], dict[str, tuple[float, str]]()
    for decoder, variant, rows in page.gates():
        cells = []
        for split in SPLITS:
            points = curve(page.rows(decoder, split), variant)
            cells += [percent(most_replay(points, limit)) if len(points) > 1 else "" for limit in LIMITS]
        lines.append([decoder, f"`{variant.name}`", *cells])
        reached = most_replay(curve(rows, variant), GOAL[1])
        best[decoder] = max(best.get(decoder, (0.0, "")), (reached, variant.name))
    yield from table(["decoder", "gate", *columns], lines)
    yield ""
    for decoder, (reached, name) in best.items():
        yield f"- Best gate of the {decoder} decoder at {GOAL[1]:.2f}x: `{name}`, {percent(reached)}."
    if "tuned" in best:
        verdict = "reached" if best["tuned"][0] >= GOAL[0] else "**not reached**"
        yield f"- Goal: {percent(GOAL[0])} at {GOAL[1]:.2f}x after tuning: {verdict}."
    yield from _dense(page)


def _dense(page: Page) -> Iterator[str]:
    """Yield the NLLs without replay, and what tuning with replay costs of the trained decoder's."""
    yield text.DENSE
    lines = []
    for split, label in SPLITS.items():
        for decoder in page.found:
            rows, first = page.rows(decoder, split), page.rows("trained", split)
            if not rows:
                continue
            dense, base = dense_row(rows), float(dense_row(first)["nll"])
            points = [Point(0.0, dense["nll"] / base)]
            points += [Point(row["replay_ratio"], float(row["nll"]) / base) for row in rows_of(rows, LEARNED)]
            most = percent(most_replay(points, LIMITS[-1])) if points[0].cost <= LIMITS[-1] else "none"
            lines.append([label, decoder, f"{dense['nll']:.3f}", f"{dense['psnr']:.2f} dB", most])
    header = ["maps", "decoder", "dense NLL", "dense PSNR", f"`learned` within {LIMITS[-1]:.2f}x of dense, trained"]
    yield from table(header, lines)
    yield ""


def _kinds(page: Page) -> Iterator[str]:
    kinds = [kind for kind in KINDS if kind in page.rows("trained")[0]["groups"]]
    dense = dense_row(page.rows("trained"))["groups"]
    yield text.KINDS
    lines = [
        [
            kind,
            str(one["frames"]),
            percent(page.shares[kind]),
            f"{float(one['nll']):.3f}",
            f"{float(one['psnr']):.2f} dB",
        ]
        for kind, one in ((kind, dense[kind]) for kind in kinds)
    ]
    yield from table(["kind", "frames", "share of play", "dense NLL", "dense PSNR"], lines)
    yield text.KINDS_BEST.format(**ENDS)
    lines = []
    for decoder, variant, rows in page.gates():
        points = {kind: curve(rows, variant, kind) for kind in kinds}
        cells = [" / ".join(percent(most_replay(points[kind], limit)) for limit in LIMITS) for kind in kinds]
        lines.append([decoder, f"`{variant.name}`", *cells])
    yield from table(["decoder", "gate", *kinds], lines)
    yield text.KINDS_CALIBRATED.format(**ENDS)
    yield from table(["decoder", "gate", "all", *kinds], list(_calibrated(page, kinds)))
    yield ""


def _calibrated(page: Page, groups: Sequence[str]) -> Iterator[list[str]]:
    for decoder, variant, rows in page.gates():
        for row in (r for r in rows if r["calibration"] == within(variant, LIMITS[1])):
            if row["sparse_attention"] == "none":
                parts = [row, *(row["groups"][group] for group in groups)]
                cells = [f"{percent(p['replay_ratio'])}, {float(p['nll']) / p['nll_dense']:.3f}x" for p in parts]
                yield [decoder, f"`{variant.name}`", *cells]


def _maps(page: Page) -> Iterator[str]:
    known = page.rows("trained")[0]["groups"]
    maps = [name for name in known if name not in KINDS]
    yield text.MAPS.format(**ENDS)
    lines = []
    for decoder, variant, rows in page.gates():
        curves = [curve(rows, variant, name) for name in maps]
        curves.append(curve(page.rows(decoder, "held_out_scenario"), variant))
        lines.append([decoder, f"`{variant.name}`"])
        lines[-1] += [" / ".join(percent(most_replay(points, limit)) for limit in LIMITS) for points in curves]
    yield from table(["decoder", "gate", *maps, "health_gathering (unseen)"], lines)
    yield ""


def _tas(page: Page) -> Iterator[str]:
    yield text.TAS
    yield from similarity_table(page.found["trained"]["similarity"])
    yield ""
    rows = page.rows("trained")
    for kind in (k for k in KINDS if k in rows[0]["groups"]):
        shares = {v: most_replay(curve(rows, v, kind), LIMITS[1]) for v in (MEAN, DELTA, LEARNED)}
        chance = most_replay(curve(rows, RANDOMLY, kind), LIMITS[1])
        values = ", ".join(f"`{v.name}` {percent(share)}{_times(share, chance)}" for v, share in shares.items())
        yield f"- {kind}: chance replays {percent(chance)} at {LIMITS[1]:.2f}x of the dense NLL, {values}."
    yield _worth(page.found["trained"]["similarity"])


def _worth(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return what the correlations say about TAS and about the change of the input."""
    first, *later = found["all"]
    values = {"turning": float(np.median([layer["output change"] for layer in found["turning"]]))}
    for name, score in (("tas", MEAN.name), ("delta", "input change")):
        values[f"{name}_first"] = first[score]
        values[f"{name}_later"] = float(np.mean([layer[score] for layer in later or [first]]))
    return text.WORTH.format(**values)


def _times(share: float, chance: float) -> str:
    """Return how many times as much replays as by chance, in brackets; nothing where chance replays nothing."""
    return f" ({share / chance:.1f}x)" if chance else ""


def _drift(page: Page) -> Iterator[str]:
    if not any(stages["rollouts"] for stages in page.found.values()):
        return
    counts = page.counts
    yield text.DRIFT.format(**asdict(counts), **ENDS)
    numbers = [n for n in DRIFT_FRAMES if n <= counts.rollout_frames]
    lines = []
    for decoder, stages in page.found.items():
        for name, result in (stages["rollouts"] or {}).items():
            for against in ("dense", "true"):
                errors = np.array(result["errors"][against])
                if not errors.any():
                    continue
                cells = [f"{-10 * np.log10(max(errors[n - 1], 1e-6)):.1f}" for n in numbers]
                what = "dense rollout" if against == "dense" else "game"
                share = percent(result["replay_ratio"]) if name not in SEEDS else ""
                lines.append([decoder, name if name in SEEDS else f"`{name}`", share, what, *cells])
    yield from table(["decoder", "rollout", "replay", "PSNR against", *(f"frame {n}" for n in numbers)], lines)
    yield ""
    for decoder in (name for name, stages in page.found.items() if stages["rollouts"]):
        yield f"![A rollout of the {decoder} decoder](../images/doom/drift_{decoder}.png)\n"


def _windows(page: Page) -> Iterator[str]:
    windows = " or ".join(str(window.window) for window in WINDOWS)
    yield text.WINDOWS.format(windows=windows, **ENDS)
    yield from window_table({name: page.rows(name) for name in page.found})
    yield ""


def _precisions(page: Page) -> Iterator[str]:
    if not any(stages["precisions"] for stages in page.found.values()):
        return
    yield text.PRECISIONS.format(**asdict(page.counts), **ENDS)
    yield from precision_table({name: p for name, stages in page.found.items() if (p := stages["precisions"])})
    yield ""


def _everything(page: Page) -> Iterator[str]:
    yield text.EVERYTHING
    for decoder in page.found:
        for split, label in SPLITS.items():
            if page.rows(decoder, split):
                yield f"\n### {decoder}, {label}\n"
                yield from every_row(page.rows(decoder, split))
