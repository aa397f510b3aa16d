"""The cost of exact numerics in likelihood: docs/measurements/exact.md.

    python benchmarks/exact.py [--doom FOLDER --data FOLDER] [--docs]

Every decoder is measured in w8a8 and w4a8 with int8 keys and values, with native numerics and with exact ones, on
held-out videos that are predicted from the true past. The game decoder needs the tokens that
`examples/doom/data.py` records. Finished rows are kept in build/exact, so an interrupted run continues.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from replay_quality.decoders import BY_NAME, HELD_OUT_SEED, ROOT
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

INTRODUCTION = """\
# Exact numerics

This page measures what [exact numerics](../reference/numerics.md#a-decode-step-bit-for-bit) cost in likelihood.
`python benchmarks/exact.py --docs` writes it; do not edit it by hand.

Both columns have the same weights and `kv="int8"`. With *native* numerics, attention, norms and rotary positions are
float32. The videos are held out, and every token is predicted from the true past. NLL is in nats per token from the
second frame on. *Agreement* is the share of tokens with the same most likely symbol.

| decoder | weights | tokens | NLL, native | NLL, exact | change | agreement |
|---|---|---|---|---|---|---|"""

PAGE = ROOT / "docs" / "measurements" / "exact.md"


@dataclass(frozen=True)
class Subject:
    """A decoder and its held-out videos int64 [N, T]."""

    name: str
    model: Callable[[], Any]
    videos: Callable[[], np.ndarray]


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


def shipped(name: str) -> Subject:
    """Return a decoder of examples/."""
    decoder = BY_NAME[name]
    return Subject(name, decoder.model, lambda: decoder.videos(VIDEOS[name], HELD_OUT_SEED))


def game(folder: Path, data: Path) -> Subject:
    """Return the game decoder with sequences of held-out episodes, spread evenly."""
    sys.path.insert(0, str(ROOT / "examples" / "doom"))
    decoder = import_module("decoder")

    def videos() -> np.ndarray:
        split = decoder.load_tokens(data, "held_out")
        starts = split.sequences(DOOM_FRAMES)
        return split.take(starts[np.linspace(0, len(starts) - 1, VIDEOS["doom"]).astype(int)], DOOM_FRAMES)

    return Subject("doom", lambda: import_module("common.worlds").load_decoder(folder), videos)


def measured(subject: Subject, quant: str) -> Row:
    """Return the row of a decoder and a quantisation."""
    model, videos = subject.model(), subject.videos()
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


def page(rows: list[Row]) -> str:
    """Return the text of the page."""
    lines = [INTRODUCTION]
    for row in rows:
        numbers = f"{row.native:.5f} | {row.exact:.5f} | {row.change:+.2%} | {row.agreement:.2%}".replace("%", " %")
        lines.append(f"| {row.decoder} | `{row.quant}` | {row.tokens:,} | {numbers} |")
    return "\n".join(lines) + "\n"


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doom", type=Path, default=ROOT / "examples" / "doom" / "world" / "decoder")
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "doom" / "data", help="recorded tokens")
    parser.add_argument("--decoder", choices=list(VIDEOS), help="default: all")
    parser.add_argument("--docs", action="store_true", help="write docs/measurements/exact.md")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "exact", help="folder of finished rows")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def subjects(options: argparse.Namespace) -> list[Subject]:
    """Return the decoders; without recorded tokens, all but the game decoder."""
    found = [shipped("moving_shapes"), shipped("bouncing_digits")]
    if options.data.is_dir():
        return [*found, game(options.doom, options.data)]
    missing = f"{options.data} is missing: examples/doom/README.md says how it is recorded"
    if options.docs:
        raise SystemExit(missing)
    print(missing)
    return found


def main() -> None:
    """Measure what is not measured yet."""
    options = parsed()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for subject in subjects(options):
        for quant in QUANTS:
            kept = options.work / f"{subject.name}-{quant}.json"
            if not kept.exists():
                if options.decoder not in (None, subject.name):
                    continue
                start = time.monotonic()
                kept.write_text(json.dumps(asdict(measured(subject, quant)), indent=1) + "\n")
                print(f"{subject.name} {quant}: {time.monotonic() - start:.0f} s", flush=True)
            rows.append(Row(**json.loads(kept.read_text())))
    text = page(rows)
    print(text)
    if options.docs:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
