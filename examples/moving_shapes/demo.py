"""Compile the shipped decoder, decode one video dense and with replay, and show both."""

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import HELD_OUT_SEED, frame_nll
from render import write_gif, write_strip
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from video import TOKENS_PER_FRAME, VOCAB_SIZE, detokenize, make_videos, tokenize, with_bos

import fastcar_compile as fc
from fastcar_compile.gates import GateWeights, gate_class
from fastcar_compile.tune.evaluate import load_cases

GIVEN_FRAMES = 2
ROUNDS = 5
"""How often the video is decoded, by turns: speeds have the median of these and their range."""
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


def teacher_forced(sessions: dict[str, fc.Session], tokens: Tensor, progress: Progress) -> tuple[Tensor, np.ndarray]:
    """Decode a video int64 [1, 2049] teacher-forced, `ROUNDS` times, with each session.

    Sessions take turns frame by frame, so that other processes of the machine slow down all of them alike.

    Returns:
        Logits float32 [sessions, 1, 2048, V], and the mean seconds of a step behind the first frame, of which no
        forward may replay, [sessions, ROUNDS].
    """
    columns = tokens[:, :-1].T.numpy().copy()
    seconds = np.zeros((len(sessions), ROUNDS, len(columns)))  # of token 0, the prompt, there is no step
    logits = np.zeros((len(sessions), 1, len(columns), VOCAB_SIZE), np.float32)
    task = progress.add_task("  teacher-forced, by turns", total=ROUNDS * len(columns))
    for number in range(ROUNDS):
        for place, session in enumerate(sessions.values()):
            session.reset()
            logits[place, :, 0] = session.prefill(tokens[:, :1].numpy())
        for first in range(1, len(columns), TOKENS_PER_FRAME):
            frame = range(first, min(first + TOKENS_PER_FRAME, len(columns)))
            for place, session in enumerate(sessions.values()):
                for i in frame:
                    start = time.perf_counter()
                    logits[place, :, i] = session.step(columns[i])
                    seconds[place, number, i] = time.perf_counter() - start
            progress.update(task, advance=len(frame), refresh=True)
    return torch.from_numpy(logits), seconds[:, :, 1 + TOKENS_PER_FRAME :].mean(-1)


def spread(values: np.ndarray, form: str) -> str:
    """Return the median of the rounds' values, with the least and the greatest one."""
    return f"{np.median(values):{form}} ({values.min():{form}} to {values.max():{form}})"


def largest_cache() -> int | None:
    """Return the bytes of the largest cache of the first core, as Linux tells them; None where it does not."""
    units = {"K": 2**10, "M": 2**20}
    sizes = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=None)


def verdict(faster: np.ndarray, bound: np.ndarray, mlp_bytes: int, cache: int | None) -> str:
    """Return in one line what replay gains here, and where the MLPs' weights come from, which is what it saves.

    Args:
        faster: of each round, the speed with replay from the second frame on, as a multiple of the dense one. bound:
            the same where every MLP replays. mlp_bytes: of all MLPs' weights. cache: bytes of the CPU's largest; None:
            unknown.
    """
    line = f"speed    replay is {spread(faster, '.2f')} times as fast as dense; if every MLP replayed, "
    line += f"{spread(bound, '.2f')}: median and range of {len(faster)} rounds. "
    line += f"The MLPs' weights are {mlp_bytes / 2**20:.1f} MiB"
    if cache is None:
        return line
    if mlp_bytes >= cache:
        return f"{line}, read from memory: this CPU's largest cache has {cache / 2**20:.0f} MiB"
    return f"{line}, and stay in this CPU's {cache / 2**20:.0f} MiB cache; larger decoders: docs/measurements/speed.md"


def generated(session: fc.Session, tokens: Tensor) -> np.ndarray:
    """Return uint8 [8, 32, 32]: two given frames, then frames 3-8 decoded greedily."""
    prompt = tokens[:, : 1 + GIVEN_FRAMES * TOKENS_PER_FRAME]
    rest = session.generate(prompt, tokens.shape[1] - prompt.shape[1], progress=True)
    return detokenize(torch.cat([prompt[:, 1:], rest], 1).numpy())[0]


def compiled(options: argparse.Namespace, console: Console) -> fc.Artifact:
    """Compile the decoder with its gate, showing the stages."""
    logging.getLogger("fastcar_compile").setLevel(logging.ERROR)  # a board's missing linker: nothing here runs on one
    with console.status("compiling") as status:
        return fc.compile(
            options.folder / "model",
            target=options.target,
            quant="w8a8",
            replay=replay_config(options.folder, options.gate, options.target_replay),
            output=options.out / "artifact",
            progress=lambda stage: status.update(f"compiling: {stage}"),
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--target", default="cpu")
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
    artifact = compiled(options, console)
    sessions = {name: artifact.session(backend="cpu") for name in ("dense", "replay", "every MLP replays")}
    sessions["dense"].set_threshold(None)
    sessions["every MLP replays"].set_threshold(gate_class(options.gate).comparison.always)
    # Nothing is drawn while a step is timed.
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        logits, seconds = teacher_forced(sessions, tokens, progress)
    faster, bound = seconds[0] / seconds[1], seconds[0] / seconds[2]
    results: dict[str, Any] = {"replay_against_dense": faster.tolist()}
    results["every_mlp_replays_against_dense"] = bound.tolist()
    rows, table = {"truth": truth[0]}, Table("decode", "replay ratio", "of t >= F", "NLL", "tokens/s")
    table.caption = "NLL and tokens/s are those of frames 2-8"
    for place, name in enumerate(("dense", "replay")):
        stats = sessions[name].stats
        results[name] = {
            "replay_ratio": stats.replay_ratio,
            "eligible_replay_ratio": stats.eligible_replay_ratio,
            "per_layer": stats.per_layer,
            "nll": float(frame_nll(logits[place], tokens[:, 1:])[1:].mean()),
            "tokens_per_second": (1 / seconds[place]).tolist(),
        }
        figures = (results[name][key] for key in ("replay_ratio", "eligible_replay_ratio", "nll"))
        table.add_row(name, *map(format, figures, (".1%", ".1%", ".4f")), spread(1 / seconds[place], ".0f"))
        rows[name] = generated(sessions[name], tokens)
    for name, row in rows.items():
        write_gif(row, options.out / f"{name}.gif")
    write_strip(rows, options.out / "strip.png", reference="truth")
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    mlp_bytes = sum(array.nbytes for name, array in artifact.arrays().items() if ".mlp." in name)
    console.print(table)
    console.print(verdict(faster, bound, mlp_bytes, largest_cache()), soft_wrap=True)
    console.print(f"artifact {artifact.path}\nvideos   {options.out}/*.gif, {options.out}/strip.png", soft_wrap=True)


if __name__ == "__main__":
    main()
