"""Compile the shipped decoder for a board, decode one video dense and with replay, and show both."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from evaluate import HELD_OUT_SEED, frame_nll, load_model
from render import write_gif, write_strip
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from video import TOKENS_PER_FRAME, detokenize, make_videos, tokenize, with_bos

import fastcar_compile as fc
from fastcar_compile.evaluate import load_cases
from fastcar_compile.gates import GateWeights

GIVEN_FRAMES = 2
HERE = Path(__file__).parent
GATE, TARGET = "learned", 0.85
"""The gate, and the share of the forwards t >= F that its thresholds were calibrated for."""


def replay_config(folder: Path, gate: str, target: float) -> fc.ReplayConfig:
    """Return the trained gate with its calibrated thresholds from cases.json."""
    cases = load_cases(folder / "cases.json", GateWeights.load(folder / "gates" / "learned.safetensors"))
    found = {(c.gate, c.target): c.replay for c in cases if c.calibration == "calibrated"}
    replay = found.get((gate, target))
    if replay is None:
        raise SystemExit(f"no thresholds for {gate} at {target:g}: choose from {sorted(found)}")
    return replay


def teacher_forced(session: fc.Session, tokens: Tensor) -> tuple[float, float]:
    """Decode a video int64 [1, 2049] teacher-forced.

    Returns:
        NLL over frames 2-8 in nats per token, and tokens per second.
    """
    session.reset()
    logits = [session.prefill(tokens[:, :1])]
    start = time.perf_counter()
    for i in track(range(1, tokens.shape[1] - 1), "  teacher-forced", transient=True):
        logits.append(session.step(tokens[:, i]))
    seconds = time.perf_counter() - start
    nll = frame_nll(torch.stack(logits, 1), tokens[:, 1:])[1:].mean()
    return float(nll), (tokens.shape[1] - 2) / seconds


def generated(session: fc.Session, tokens: Tensor) -> np.ndarray:
    """Return uint8 [8, 32, 32]: two given frames, then frames 3-8 decoded greedily."""
    prompt = tokens[:, : 1 + GIVEN_FRAMES * TOKENS_PER_FRAME]
    rest = session.generate(prompt, tokens.shape[1] - prompt.shape[1], progress=True)
    return detokenize(torch.cat([prompt[:, 1:], rest], 1).numpy())[0]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--target", default="zcu102")
    parser.add_argument(
        "--folder", type=Path, default=HERE / "tuned", help=f"of model, gates and cases; {HERE.name} itself: not tuned"
    )
    parser.add_argument("--gate", default=GATE, help="of cases.json")
    parser.add_argument("--target-replay", type=float, default=TARGET, help="that its thresholds were calibrated for")
    parser.add_argument("--video", type=int, default=0, help="index of the held-out video")
    options = parser.parse_args()
    console = Console()
    truth = make_videos(options.video + 1, HELD_OUT_SEED)[options.video :]
    tokens = torch.from_numpy(with_bos(tokenize(truth)))
    with console.status("compiling") as status, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        artifact = fc.compile(
            load_model(options.folder / "model"),
            target=options.target,
            quant="w8a8",
            replay=replay_config(options.folder, options.gate, options.target_replay),
            output=options.out / "artifact",
            progress=lambda stage: status.update(f"compiling: {stage}"),
        )
    rows, results = {"truth": truth[0]}, {}
    table = Table("decode", "replay ratio", "of t >= F", "NLL, frames 2-8", "tokens/s")
    for name in ("dense", "replay"):
        session = artifact.session(backend="cpu")
        if name == "dense":
            session.set_threshold(None)
        nll, speed = teacher_forced(session, tokens)
        stats = session.stats
        table.add_row(
            name, f"{stats.replay_ratio:.1%}", f"{stats.eligible_replay_ratio:.1%}", f"{nll:.4f}", f"{speed:.0f}"
        )
        results[name] = {
            "replay_ratio": stats.replay_ratio,
            "eligible_replay_ratio": stats.eligible_replay_ratio,
            "per_layer": stats.per_layer,
            "nll": nll,
            "tokens_per_second": speed,
        }
        rows[name] = generated(session, tokens)
        write_gif(rows[name], options.out / f"{name}.gif")
    write_gif(truth[0], options.out / "truth.gif")
    write_strip(rows, options.out / "strip.png", reference="truth")
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(table)
    console.print(f"artifact {artifact.path}\nvideos   {options.out}/*.gif, {options.out}/strip.png")


if __name__ == "__main__":
    main()
