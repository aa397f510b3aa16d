"""Time and accuracy of `fc.calibrate` on the shipped decoders: the tables of docs/measurements/calibration.md.

--table      calibrates on 32 videos and judges the thresholds and the shipped ones on others
--repeats N  calibrates on N other sets of 32 videos and says how often the share of other videos is as asked for
--speed      calibrates by turns with this checkout and with another one, and judges both on held-out videos
--videos     says how far the replay of other videos is from what was asked for, by the number of calibration videos
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from replay_quality.decoders import BY_NAME, CALIBRATION_SEED, ROOT, Decoder

import fastcar_compile as fc
from fastcar_compile.tune.calibrate import interval, program_of, rules_of, search_of
from fastcar_compile.tune.evaluator import Evaluator
from fastcar_compile.tune.search import BESIDE, Values

if TYPE_CHECKING:
    from replay_doom.played import Played

    Measured = Decoder | Played

GAME = "doom"
NAMES = ("bouncing_digits", "moving_shapes", GAME)
TARGETS = {"input_delta": 0.8, "learned": 0.8, "tas": 0.5}
GAME_TARGETS = {"input_delta": 0.4, "learned": 0.4, "tas": 0.15}
"""What the game decoder can replay within 1.10x of its dense NLL; doom.md measures it."""

POOL_SEED, POOL, REPEAT_SEED = 5000, 96, 6000
SHIFTS = (-0.12, -0.06, 0.0, 0.06, 0.12)
"""Shares by which all layers' thresholds are shifted when the replay of the pool's videos is measured."""

COUNTS, DRAWS = (4, 8, 16, 32, 48), 2000


def target_of(decoder: Measured, gate: str) -> float:
    """Return the replay that a decoder's gate is calibrated for."""
    return (GAME_TARGETS if decoder.name == GAME else TARGETS)[gate]


def options_of(decoder: Measured, gate: str) -> dict[str, Any]:
    """Return the options of `calibrate` for a decoder's gate, but for the gate itself."""
    setting = decoder.setting
    return {"target_replay": target_of(decoder, gate), "prompt": setting.prompt, "counted": setting.counted}


def one(decoder: Measured, gate: str, count: int, artifact: Path | None) -> dict[str, Any]:
    """Return thresholds, and the seconds that they took."""
    videos, options = decoder.calibration(count), options_of(decoder, gate)
    begun, used = time.perf_counter(), time.process_time()
    if artifact is None:
        found = fc.calibrate(decoder.model(), videos, replay=decoder.config(gate), **options)
    else:
        found = fc.calibrate(fc.load(artifact), videos, **options)
    seconds = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - used}
    return found.to_json() | seconds


def speed(decoder: Measured, gate: str, options: argparse.Namespace) -> None:
    """Print the rows of both checkouts, and what their thresholds do on held-out videos."""
    artifact = None
    if options.target is not None:
        artifact = options.work / f"{decoder.name}_{gate}_{options.target}"
        if not artifact.exists():
            fc.compile(decoder.model(), options.target, replay=decoder.config(gate), output=artifact)
    command = [sys.executable, __file__, "--one", "--decoder", decoder.name, "--gate", gate]
    command += ["--count", str(options.count), "--threads", str(options.threads), "--data", str(options.data)]
    command += [] if artifact is None else ["--artifact", str(artifact)]
    for number in range(options.rounds):
        for name, root in (("before", options.against), ("now", ROOT)):
            environment = os.environ | {"PYTHONPATH": str(root)}
            text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            found = json.loads(text.splitlines()[-1])
            replay, nll = judged(decoder, gate, [None if v is None else float(v) for v in found["values"]])
            figures = f"{found['seconds']:.1f} s | {found['cpu']:.1f} s | {replay:.1%} | {nll:.4f}"
            print(f"| {decoder.name} | `{gate}` | {number} | {name} | {figures} |", flush=True)


def timed(run: Callable[[], fc.Thresholds]) -> tuple[fc.Thresholds, str]:
    """Return what a calibration found, and a table's cells: CPU seconds and seconds."""
    begun, used = time.perf_counter(), time.process_time()
    found = run()
    return found, f"{time.process_time() - used:.0f} | {time.perf_counter() - begun:.0f}"


def table(decoder: Measured, gate: str, count: int) -> None:
    """Print a decoder's row of a gate: seconds, then share and NLL of other videos, with shipped thresholds too."""
    config, target, options = decoder.config(gate), target_of(decoder, gate), options_of(decoder, gate)
    own = decoder.calibration(count)
    found, seconds = timed(lambda: fc.calibrate(decoder.model(), own, replay=config, **options))
    assert found.expected is not None
    interval = f"{found.expected.low:.1%} to {found.expected.high:.1%}"
    others = decoder.held_out()
    search = search_of(program_of(decoder.model(), others.shape), config, others, decoder.setting)[0]
    new, shipped = search.outcome(found.values), shipped_thresholds(decoder, gate)
    old = search.outcome(shipped)
    same = search.outcome(search.shifted(shipped, new.replay))
    off = f"{(new.replay - target) * 100:+.1f}"
    cells = [decoder.name, f"`{gate}` {target:.0%}", seconds, f"{new.replay:.1%}", off]
    cells += [interval, f"{math.exp(new.loss):.3f}", f"{math.exp(same.loss):.3f} at {same.replay:.1%}"]
    cells += [f"{math.exp(old.loss):.3f} at {old.replay:.1%}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def shipped_thresholds(decoder: Measured, gate: str) -> Values:
    """Return the decoder's shipped thresholds of this gate, which quality.md or doom.md measures."""
    wanted, target = decoder.shipped(gate, target_of(decoder, gate))
    for case in json.loads((decoder.folder / "cases.json").read_text("utf-8")):
        replay: dict[str, Any] = case["replay"] or {"gate": None}
        facts = (replay["gate"], case["calibration"], case["attention"], case["target"])
        if facts == (gate, wanted, None, target):
            return tuple(None if value is None else float(value) for value in replay["threshold"])
    raise SystemExit(f"{decoder.folder}: no shipped thresholds of {gate}: {wanted}")


def repeats(decoder: Decoder, gate: str, options: argparse.Namespace) -> None:
    """Print a row: how often calibrations on other videos meet the target on the pool within two points."""
    config, target, errors, within, cpu = decoder.config(gate), TARGETS[gate], list[float](), 0, list[float]()
    pool = decoder.videos(POOL, POOL_SEED)
    program = program_of(decoder.model(), pool.shape)
    judge = Evaluator(program, pool, rules_of(config, program.config.num_layers))
    for number in range(options.repeats):
        own, used = decoder.videos(options.count, REPEAT_SEED + number), time.process_time()
        found = fc.calibrate(decoder.model(), own, replay=config, target_replay=target)
        cpu.append(time.process_time() - used)
        share = judge.measure(found.values).replay
        errors.append(share - target)
        assert found.expected is not None
        within += found.expected.low <= share <= found.expected.high
    met = sum(abs(error) <= 0.02 for error in errors)
    mean, spread = f"{np.mean(errors) * 100:+.1f} ± {np.std(errors, ddof=1) * 100:.1f}", f"{met} of {len(errors)}"
    cells = [decoder.name, f"`{gate}` {target:.0%}", mean, spread, f"{within} of {len(errors)}", f"{np.mean(cpu):.0f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def judged(decoder: Measured, gate: str, values: list[float | None]) -> tuple[float, float]:
    """Return replay and NLL of thresholds on the held-out videos."""
    videos, setting = decoder.held_out(), decoder.setting
    program = program_of(decoder.model(), videos.shape)
    rules = rules_of(decoder.config(gate), program.config.num_layers)
    found = Evaluator(program, videos, rules, setting.prompt, counted=setting.counted).measure(values)
    return found.replay, found.nll


def shares_of_videos(decoder: Decoder, gate: str) -> np.ndarray:
    """Return the replay of the pool's videos, [SHIFTS, POOL], with thresholds that some videos gave."""
    config, some = decoder.config(gate), decoder.videos(8, CALIBRATION_SEED)
    values = search_of(program_of(decoder.model(), some.shape), config, some)[0].for_replay(TARGETS[gate])
    pool = decoder.videos(POOL, POOL_SEED)
    search = search_of(program_of(decoder.model(), pool.shape), config, pool)[0]
    return np.array([search.outcome(search.moved(values, shift)).shares for shift in SHIFTS])


def errors(shares: np.ndarray, count: int, target: float) -> tuple[np.ndarray, float]:
    """Return how much more than the target all videos replay, for DRAWS calibrations on `count` videos drawn of them.

    A calibration shifts all thresholds alike until its videos meet the target. Second: how often what all videos replay
    is within the interval that the calibration gives.
    """
    random, found, within = np.random.default_rng(0), [], 0
    for _ in range(DRAWS):
        # Drawn with replacement: all videos stand for what there is, and so judge without an error of their own.
        own = shares[:, random.integers(shares.shape[1], size=count)]
        shift = float(np.interp(target, own.mean(1), SHIFTS))
        share = float(np.interp(shift, SHIFTS, shares.mean(1)))
        near = [[np.interp(s, SHIFTS, video) for video in own.T] for s in (shift, shift + BESIDE[1])]
        given = interval(np.array(near), BESIDE[1])
        found.append(share - target)
        within += given.low <= share <= given.high
    return np.array(found), within / DRAWS


def videos(decoder: Decoder, gate: str) -> None:
    """Print a row for one decoder and gate."""
    shares, target = shares_of_videos(decoder, gate), TARGETS[gate]
    middle = len(SHIFTS) // 2
    cells = [f"{decoder.name}", f"`{gate}` {target:.0%}", f"{shares[middle].std(ddof=1):.1%}"]
    for count in COUNTS:
        found, within = errors(shares, count, target)
        cells.append(f"{found.mean():+.1%} ± {found.std():.1%}, {(abs(found) <= 0.02).mean():.0%}, {within:.0%}")
    print(f"| {' | '.join(cells)} |", flush=True)


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="compare with --against")
    parser.add_argument("--table", action="store_true", help="time, held-out share and NLL")
    parser.add_argument("--repeats", type=int, default=0, help="calibrations on different videos")
    parser.add_argument("--videos", action="store_true", help="measure by the number of videos")
    parser.add_argument("--one", action="store_true", help="calibrate once, print one JSON line")
    parser.add_argument("--against", type=Path, help="root of another checkout")
    parser.add_argument("--decoder", choices=NAMES, help="default: the first two")
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "doom" / "data", help="play, recorded if missing")
    parser.add_argument("--gate", choices=TARGETS, help="default: all")
    parser.add_argument("--count", type=int, default=None, help="calibration videos; default: 32, with --speed 4")
    parser.add_argument("--target", help="compile artifacts for this target and calibrate them; default: the model")
    parser.add_argument("--artifact", type=Path, help="calibrate this one with --one")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "calibration", help="folder of artifacts")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.count = options.count or (4 if options.speed or options.one else 32)
    if options.speed and options.against is None:
        parser.error("--speed compares with another checkout: give --against FOLDER")
    if options.decoder == GAME and (options.repeats or options.videos):
        parser.error("--repeats and --videos draw videos; play is recorded")
    return options


def decoder_named(name: str, data: Path) -> Measured:
    """Return a decoder. The game decoder needs what the extra `doom` installs."""
    if name != GAME:
        return BY_NAME[name]
    from replay_doom.played import Played

    return Played(data)


def main() -> None:
    """Run the requested parts."""
    options = parsed()
    torch.set_num_threads(options.threads)
    for name in [options.decoder] if options.decoder else NAMES[:2]:
        for gate in [options.gate] if options.gate else TARGETS:
            decoder = decoder_named(name, options.data)
            if options.one:
                print(json.dumps(one(decoder, gate, options.count, options.artifact)))
            if options.speed:
                speed(decoder, gate, options)
            if options.table:
                table(decoder, gate, options.count)
            if options.repeats:
                repeats(BY_NAME[name], gate, options)
            if options.videos:
                videos(BY_NAME[name], gate)


if __name__ == "__main__":
    main()
