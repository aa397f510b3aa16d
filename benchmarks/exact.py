"""The cost of exact numerics in likelihood: docs/measurements/exact.md.

    python benchmarks/exact.py [--data FOLDER] [--docs]

Every decoder is measured in w8a8 and w4a8 with int8 keys and values, with native numerics and with exact ones, on
held-out videos that are predicted from the true past. The game decoder needs the tokens that
`examples/doom/data.py` records. Finished rows are kept in build/exact, so an interrupted run continues.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import MEASUREMENTS, ROOT, markdown, write_table
from subjects import DATA, GAME, HELD_OUT_SEED, Played, Subject, game_module, subject_of
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.ir.pass_manager import Pass, run_pipeline
from fastcar_compile.passes.caches import QuantizeKvCache, WindowCaches
from fastcar_compile.passes.exact_arithmetic import ExactArithmetic
from fastcar_compile.passes.pipeline import QUANTIZE
from fastcar_compile.tune.calibrate import program_of, rules_of
from fastcar_compile.tune.evaluator import Evaluator

QUANTS = ("w8a8", "w4a8")
VIDEOS = {"moving_shapes": 2, "bouncing_digits": 32, "doom": 4}
"""Held-out videos; those of moving_shapes have 2,048 tokens each."""

DOOM_FRAMES = 24
"""Frames of a sequence of the game decoder, whose window has 16."""


@dataclass(frozen=True)
class Row:
    """One decoder in one quantisation: nats per token after the first frame, and the share of equal predictions."""

    decoder: str
    quant: str
    tokens: int
    native: float
    exact: float
    agreement: float

    @property
    def change(self) -> float:
        """Relative change of the NLL."""
        return self.exact / self.native - 1


def videos_of(subject: Subject) -> np.ndarray:
    """Return held-out videos int64 [N, T]; of the game, sequences of held-out play that are spread evenly."""
    count = VIDEOS[subject.name]
    if not isinstance(subject, Played):
        return subject.drawn(count, HELD_OUT_SEED)
    split = game_module("decoder").load_tokens(subject.data, "held_out")
    starts = split.sequences(DOOM_FRAMES)
    return split.take(starts[np.linspace(0, len(starts) - 1, count).astype(int)], DOOM_FRAMES)


def measured(subject: Subject, quant: str) -> Row:
    """Return the row of a decoder and a quantisation."""
    model, videos = subject.model(), videos_of(subject)
    native, exact = (_losses(model, videos, quant, numerics) for numerics in ("native", "exact"))
    means = [float(losses.double().mean()) for losses, _ in (native, exact)]
    agreement = float((native[1] == exact[1]).double().mean())
    return Row(subject.name, quant, native[0].numel(), means[0], means[1], agreement)


def _losses(model: Any, videos: np.ndarray, quant: str, numerics: str) -> tuple[Tensor, Tensor]:
    """Return losses in nats and predicted tokens, both [N, n], from the second frame on."""
    passes: list[Pass] = [QUANTIZE[quant], WindowCaches(), QuantizeKvCache("int8")]
    passes += [ExactArithmetic()] if numerics == "exact" else []
    program = run_pipeline(program_of(model, videos.shape), passes)
    layers, frame = program.config.num_layers, program.config.tokens_per_frame
    evaluator = Evaluator(program, videos, rules_of(fc.ReplayConfig(gate="never"), layers))
    found = evaluator.details((None,) * layers)
    return found.losses[:, frame:], found.predicted[:, frame:]


def table(rows: list[Row]) -> str:
    """Return the page's table."""
    columns = ("decoder", "weights", "tokens", "NLL, native", "NLL, exact", "change", "agreement")
    lines = []
    for row in rows:
        shares = f"{row.change:+.2%}".replace("%", " %"), f"{row.agreement:.2%}".replace("%", " %")
        lines.append(
            (row.decoder, f"`{row.quant}`", f"{row.tokens:,}", f"{row.native:.5f}", f"{row.exact:.5f}", *shares)
        )
    return markdown(columns, lines)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="recorded tokens")
    parser.add_argument("--decoder", choices=list(VIDEOS), help="default: all")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/measurements/exact.md")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "exact", help="folder of finished rows")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def names(options: argparse.Namespace) -> list[str]:
    """Return the decoders; without recorded tokens, all but the game decoder."""
    if options.data.is_dir():
        return list(VIDEOS)
    missing = f"{options.data} is missing: examples/doom/README.md says how it is recorded"
    if options.docs:
        raise SystemExit(missing)
    print(missing)
    return [name for name in VIDEOS if name != GAME[0]]


def main() -> None:
    """Measure what is not measured yet."""
    options = parsed()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for name, quant in product(names(options), QUANTS):
        kept = options.work / f"{name}-{quant}.json"
        if not kept.exists():
            if options.decoder not in (None, name):
                continue
            start = time.monotonic()
            kept.write_text(json.dumps(asdict(measured(subject_of(name, options.data), quant)), indent=1) + "\n")
            print(f"{name} {quant}: {time.monotonic() - start:.0f} s", flush=True)
        rows.append(Row(**json.loads(kept.read_text())))
    print(table(rows))
    if options.docs:
        write_table(MEASUREMENTS / "exact.md", "rows", table(rows))


if __name__ == "__main__":
    main()
