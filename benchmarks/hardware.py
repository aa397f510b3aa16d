"""The hardware model's figures: of designs that the compiler emits, and of DRS against static mapping.

    python benchmarks/hardware.py --docs        # tables of docs/measurements/hardware_table.md, docs/images/drs*.png
    python benchmarks/hardware.py --json out.json

All figures are predictions: nothing here ran on a board. The recorded traces are replay decisions of the shipped
decoder on this machine's CPU: of 16 held-out videos, and of 8 guidance pairs (rows b and b + 8).
"""

import argparse
import json
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import MEASUREMENTS, ROOT, markdown, write_table

import fastcar_compile as fc
from fastcar_compile.codegen.hls.design.exploration import explore
from fastcar_compile.codegen.hls.design.memory import measured_cap, peak_bandwidth
from fastcar_compile.codegen.hls.design.usage import memory
from fastcar_compile.codegen.hls.model import DecoderShape, Estimate, Workload, estimate, load_shape
from fastcar_compile.codegen.hls.model.engine import Call, CallPart, Engine, EngineCall
from fastcar_compile.codegen.hls.model.question import Decisions, Draw, ask, draw_decisions
from fastcar_compile.codegen.hls.model.step import STREAMING
from fastcar_compile.codegen.hls.model.system import SystemRun
from fastcar_compile.codegen.hls.model.workload import GateModel
from fastcar_compile.config.targets import load_target

sys.path.insert(0, str(ROOT / "examples" / "moving_shapes"))

from drs_pictures import draw_active_rows, draw_cores, typical_forward
from evaluate import HELD_OUT_SEED, load_model
from video import SIZE, TOKENS_PER_FRAME, make_videos, tokenize, with_bos

ROWS, CORES = 16, 4
"""Rows of the recorded traces. A core per row leaves nothing to balance; four cores show what balancing gains."""

THRESHOLDS = (-40.0, -24.0, -16.0)
REPLAY = 0.8
PUBLISHED = (
    ("llama2-7b", "w4a8", "kv260", 4.9, "arXiv 2502.10659 (W4A16, KV8)"),
    ("llama3-8b", "w4a8", "kv260", 4.8, "arXiv 2507.03308 (W4, KV8)"),
    ("tinyllama-1.1b", "w8a8", "zcu102", 1.5, "arXiv 2409.11424 (W8A8)"),
)
FASTCAR = {0.0: 689.7, 0.2: 556.8, 0.5: 475.3, 0.8: 390.7}
"""Replay ratio -> seconds per video of 2048 tokens on a U280 (arXiv 2505.14709)."""

TOKENS = 2048
WHOLE = ("zcu102", "kv260")
EIGHTH, GAME_EIGHTH = 0.156, 0.139
"""Shares of a draft with an eighth of the neurons and of the hidden size, of VILA-U and of the game decoder."""

GAME = DecoderShape(
    name="game", layers=5, hidden=256, intermediate=1536, heads=4, kv_heads=1, head_dim=64, vocab=1024,
    tokens_per_frame=65, source="examples/doom/decoder.py",
)  # fmt: skip
GAME_WINDOW = 16 * 65
SEVEN_BILLION = (("zcu102", "w4a8"), ("kv260", "w4a8"), ("u280", "w4a8"), ("u280", "w8a8"))


def predict(shape: DecoderShape, quant: str, board: str, context: int, **options: Any) -> Estimate:
    """Return one estimate of an emitted design."""
    return estimate(Workload(shape, quant, context, **options), load_target(board), what_if=True)


def published() -> list[dict[str, Any]]:
    """Return our prediction for each published board, context 512: whole steps, and linears alone."""
    rows = []
    for name, quant, board, figure, source in PUBLISHED:
        shape = load_shape(name)
        whole, linears = (predict(shape, quant, board, 512, offload=offload) for offload in ("all", "linears"))
        ceiling = peak_bandwidth(load_target(board)) / shape.weight_bytes(quant)
        rows.append(
            {
                "decoder": name, "quant": quant, "board": board, "whole_steps": whole.tokens_per_second,
                "published": figure, "ceiling": ceiling, "of_ceiling": whole.tokens_per_second / ceiling,
                "of_measured_bandwidth": whole.measured_utilisation, "gb_per_step": whole.bytes_per_step / 1e9,
                "power_w": whole.power_w,
                "linears": linears.tokens_per_second, "their_attention": linears.shares["attention"],
                "their_launches": linears.shares["launch"], "source": source,
            }
        )  # fmt: skip
    return rows


def fastcar_line() -> tuple[float, float]:
    """Return the line through FastCar's figures with replay: seconds without any, and what all of it would spare."""
    ratios = [ratio for ratio in FASTCAR if ratio]
    slope, start = np.polyfit(ratios, [FASTCAR[ratio] for ratio in ratios], 1)
    return float(start), -float(slope)


def vila_u_on_u280() -> list[dict[str, Any]]:
    """Return seconds of a video by replay ratio beside FastCar's. Context 1024 is the mean of a video."""
    shape, (start, spared), rows = load_shape("vila-u-7b"), fastcar_line(), []
    for ratio, seconds in FASTCAR.items():
        result = predict(shape, "w8a8", "u280", 1024, replay=ratio)
        rows.append(
            {
                "replay": ratio, "seconds": TOKENS * result.seconds_per_step, "speedup": result.speedup_over_dense,
                "fastcar_seconds": seconds, "fastcar_line": start - spared * ratio,
                "fastcar_speedup": FASTCAR[0.0] / seconds,
            }
        )  # fmt: skip
    return rows


def vila_u_on_zcu102() -> list[dict[str, Any]]:
    """Return dense speed and the speedup at 80 % replay in w4a8, by context and offload."""
    shape, rows = load_shape("vila-u-7b"), []
    for offload in ("mlp", "linears"):
        for context in (64, 256, 512, 1024):
            dense = predict(shape, "w4a8", "zcu102", context, offload=offload)
            replayed = predict(shape, "w4a8", "zcu102", context, offload=offload, replay=REPLAY)
            rows.append(
                {
                    "offload": offload, "context": context, "positions_per_second": dense.tokens_per_second,
                    "replay_positions_per_second": replayed.tokens_per_second, "speedup": replayed.speedup_over_dense,
                    "launches": replayed.shares["launch"], "attention": replayed.shares["attention"],
                }
            )  # fmt: skip
    return rows


def linears() -> list[dict[str, Any]]:
    """Return a dense step of VILA-U 7B whose linears are in the fabric: clocks, the weight stream, what bounds it."""
    rows = []
    for board, quant in SEVEN_BILLION:
        target = load_target(board)
        result = estimate(Workload(load_shape("vila-u-7b"), quant, 512, offload="linears"), target)
        engine = sum(s.seconds for s in result.step.segments if s.unit in STREAMING)
        streamed = sum(s.bytes for s in result.step.segments if s.unit in STREAMING)
        waits = {unit: share for unit, share in result.shares.items() if unit in STREAMING}
        rows.append(
            {
                "board": board, "quant": quant, "clocks": clocks(result), "ms": 1e3 * result.seconds_per_step,
                "engine_ms": 1e3 * engine, "of_measured_bandwidth": streamed / engine / measured_cap(target),
                "engine_waits_for": max(waits, key=lambda unit: waits[unit]),
            }
        )  # fmt: skip
    return rows


def clocks(result: Estimate) -> int:
    """Return the clocks of the fabric in a step."""
    return round(result.seconds_per_step * result.design["budget"]["clock_mhz"] * 1e6)


def whole_steps() -> list[dict[str, Any]]:
    """Return VILA-U 7B in w4a8 with the whole step in the fabric: dense, and with 80 % replay."""
    shape, rows = load_shape("vila-u-7b"), []
    for board in WHOLE:
        for context in (512, TOKENS):
            result = predict(shape, "w4a8", board, context, offload="all")
            replayed = predict(shape, "w4a8", board, context, offload="all", replay=REPLAY)
            rows.append(
                {
                    "board": board, "context": context, "positions_per_second": result.tokens_per_second,
                    "clocks": clocks(result), "of_measured_bandwidth": result.measured_utilisation,
                    "attention": result.shares["attend"], "vector": result.shares["vector"],
                    "replay_positions_per_second": replayed.tokens_per_second,
                    "speedup": replayed.speedup_over_dense,
                }
            )  # fmt: skip
    return rows


class Resident(Engine):
    """An engine whose drafts stay on chip, and come at a word per port and clock: no kernel that is emitted has it."""

    def parts(self, call: Call) -> tuple[CallPart, ...]:
        """Return the spans of a call."""
        if not isinstance(call, EngineCall) or call.last_load is None:
            return super().parts(call)
        kept = self.memory
        self.memory = replace(kept, rate=float(self.design.ports), latency=0, refresh_interval=0.0, refresh=0.0)
        found = super().parts(call)
        self.memory = kept
        return tuple(replace(part, bytes=0.0) for part in found)


def drafts() -> list[dict[str, Any]]:
    """Return dense, plain replay and replay with drafts, whole steps; and if the drafts were on chip."""
    vila, rows, game = load_shape("vila-u-7b"), [], {"sink_window": (0, GAME_WINDOW)}
    asked = [(vila, "w4a8", board, 512, share, REPLAY, {}) for board in WHOLE for share in (0.0, EIGHTH)]
    cases = [("zcu102", 0.0, REPLAY), ("zcu102", GAME_EIGHTH, REPLAY)]
    cases += [(board, share, replay) for board in WHOLE for share, replay in ((0.0, 0.45), (0.2, 0.85))]
    asked += [(GAME, "w8a8", board, GAME_WINDOW, share, replay, game) for board, share, replay in cases]
    for shape, quant, board, context, share, replay, options in asked:
        gate = GateModel.named("learned")
        work = Workload(shape, quant, context, offload="all", replay=replay, gate=gate, **options).with_drafts(share)
        target = load_target(board)
        found, question = estimate(work, target), ask(work, target)
        resident = SystemRun.of(question.board(Resident), question.decisions, question.attended)
        words = sum(own.port_words for own in question.design.drafts.values())
        rows.append(
            {
                "decoder": shape.name, "quant": quant, "board": board, "share": found.draft.get("share", 0.0),
                "draft_mb": work.draft_bytes / 1e6, "replay": replay, "dense": found.comparison["dense"],
                "per_second": found.tokens_per_second, "speedup": found.speedup_over_dense,
                "ports": found.design["ports"], "cores": found.design["spec"]["cores"],
                **{kind: found.resources[kind]["used"] for kind in ("lut", "dsp", "bram36", "uram")},
                "on_chip_per_second": 1 / resident.seconds if share else "",
                "on_chip_bram36": memory(128, words, question.design.ports).bram36 if share else "",
            }
        )  # fmt: skip
    return rows


def resources() -> list[dict[str, Any]]:
    """Return what kernels of whole steps take of a board's fabric: shares of the whole device, 2,048 positions."""
    rows = []
    for name in ("vila-u-7b", "llama2-7b", "llama3-8b"):
        for board in WHOLE:
            found, fabric = predict(load_shape(name), "w4a8", board, TOKENS, offload="all"), load_target(board).fabric
            counts = {kind: (part["used"], getattr(fabric, kind)) for kind, part in found.resources.items()}
            shares = {kind: used / whole for kind, (used, whole) in counts.items() if whole}
            rows.append(
                {"decoder": name, "board": board, "ports": found.design["ports"], "group": found.design["group"]}
                | {kind: f"{used} ({shares.get(kind, 0.0):.0%})" for kind, (used, _whole) in counts.items()}
                | {"least_left": 1 - max(shares.values())}
            )
    return rows


@dataclass(frozen=True)
class Recording:
    """What is recorded of the shipped decoder: tokens int64 [B, T] with their prompt.

    Args:
        title: of the rows. coupled: whether rows b and b + B / 2 replay only together.
    """

    title: str
    tokens: torch.Tensor
    prompt: int
    coupled: bool = False


def recordings(frames: int) -> list[Recording]:
    """Return B different videos, and guidance pairs of half as many: with and without their first frame as condition.

    Both rows of a pair get the tokens of one video. In the row without condition, the first frame is empty.
    """
    videos = torch.from_numpy(with_bos(tokenize(make_videos(ROWS, HELD_OUT_SEED))))[:, : TOKENS_PER_FRAME * frames]
    conditioned = videos[: ROWS // 2]
    empty = torch.from_numpy(with_bos(tokenize(np.zeros((ROWS // 2, 1, SIZE, SIZE), np.uint8))))
    pairs = torch.cat([conditioned, torch.cat([empty, conditioned[:, empty.shape[1] :]], dim=1)])
    return [
        Recording("recorded", videos, 1),
        Recording("guidance pairs", pairs, empty.shape[1]),
        Recording("coupled guidance pairs", pairs, empty.shape[1], coupled=True),
    ]


def record(frames: int) -> dict[str, Decisions]:
    """Return decisions bool [forwards, 4, 16] of the shipped decoder by title and TAS threshold, on held-out videos."""
    traces = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        for coupled in (False, True):
            replay = fc.ReplayConfig(couple_cfg=coupled)
            artifact = fc.compile(
                load_model(), target="cpu", batch_size=ROWS, replay=replay, output=Path(folder) / f"artifact_{coupled}"
            )
            for chosen in (r for r in recordings(frames) if r.coupled == coupled):
                traces |= decisions_of(artifact, chosen)
    return traces


def decisions_of(artifact: fc.Artifact, chosen: Recording) -> dict[str, Decisions]:
    """Return the decisions of one recording by title and threshold."""
    session, traces = artifact.session(backend="cpu", record=True), {}
    for threshold in THRESHOLDS:
        session.reset()
        session.set_threshold(threshold)
        session.prefill(chosen.tokens[:, : chosen.prompt])
        for position in range(chosen.prompt, chosen.tokens.shape[1]):
            session.step(chosen.tokens[:, position])
        traces[f"{chosen.title}, threshold {threshold:g}"] = session.stats.decisions
        print(f"{chosen.title}, threshold {threshold:g}: {session.stats.replay_ratio:.1%} replayed", file=sys.stderr)
    return traces


def inputs_of_drs(traces: dict[str, Decisions]) -> dict[str, Decisions]:
    """Return decisions by title: drawn row by row, drawn alike for all rows, drawn alike for pairs, and recorded."""
    shape, names = (200, 4, ROWS), {Draw.PAIRS: "independent pairs"}
    drawn = {names.get(kind, f"{kind.value} rows"): draw_decisions(shape, REPLAY, kind) for kind in Draw}
    return drawn | traces


def drs_over_static(inputs: dict[str, Decisions]) -> list[dict[str, Any]]:
    """Return passes and step time of both mappings on four cores: 16 rows, four layers of TinyLlama's sizes, zcu102."""
    shape, board = load_shape("tinyllama-1.1b").model_copy(update={"layers": 4, "vocab": 0}), load_target("zcu102")
    work = Workload(shape, "w4a8", 64, ROWS)
    design, rows = explore(work.kernel_spec(), board, cores=[CORES]).design, []
    for title, decisions in inputs.items():
        result = estimate(work, board, decisions=decisions, design=design)
        static, drs = (result.passes_by_mapping[mapping] for mapping in ("static", "drs"))
        rows.append(
            {
                "decisions": title, "replay": result.replay_ratio, "passes_static": static, "passes_drs": drs,
                "static_over_drs": static / drs,
                "step_static_over_drs": result.tokens_per_second / result.comparison["static_mapping"],
            }
        )  # fmt: skip
    return rows


def pictures(inputs: dict[str, Decisions], folder: Path) -> None:
    """Draw active rows per layer of three inputs, and the cores of one forward of rows that were drawn and recorded."""
    first = list(inputs.items())
    recorded = [item for item in first if item[0].startswith("recorded")]
    chosen = dict([*first[:2], min(recorded, key=lambda item: abs(item[1].mean() - REPLAY))])
    draw_active_rows(chosen, folder / "drs_rows.png")
    for name, title in (("drs_cores.png", first[0][0]), ("drs_cores_recorded.png", list(chosen)[2])):
        decisions = inputs[title]
        draw_cores(decisions, CORES, typical_forward(decisions, CORES), title, folder / name)


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of a report as Markdown."""
    cells = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    return markdown(list(rows[0]), cells)


def main() -> None:
    """Predict, print, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the tables and the pictures named above")
    parser.add_argument("--json", type=Path, default=None, help="write the report here")
    parser.add_argument("--frames", type=int, default=4, help="frames of the recorded traces")
    options = parser.parse_args()
    inputs = inputs_of_drs(record(options.frames))
    report = {
        "published": published(),
        "whole_steps": whole_steps(),
        "resources": resources(),
        "drafts": drafts(),
        "linears": linears(),
        "vila_u_u280": vila_u_on_u280(),
        "vila_u_zcu102": vila_u_on_zcu102(),
        "drs": drs_over_static(inputs),
    }
    for name, rows in report.items():
        print(f"{name}\n\n{table(rows)}")
        if options.docs:
            write_table(MEASUREMENTS / "hardware_table.md", name, table(rows))
    if options.docs:
        pictures(inputs, ROOT / "docs" / "images")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
