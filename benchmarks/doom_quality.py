"""What replay costs the game decoder of examples/doom in quality: docs/measurements/doom.md and its pictures.

    python benchmarks/doom_quality.py --data build/doom/data STAGE …

Stages, in this order; those with a gate or split may run in processes of their own, and all go on after a kill:

    train:tas  train:learned     trains a gate of examples/doom/gates
    tune                         tunes a copy of the decoder with its gate, into WORK/tuned
    calibrate:DECODER:GATE       chooses thresholds; gate: tas, tas_heads, input_delta, learned
    measure:DECODER:SPLIT        measures on held_out, or on held_out_scenario
    precisions:DECODER           measures w8a8, w4a8 and int8 keys and values
    similarity                   how well scores predict the change of MLP outputs
    rollouts:DECODER             generates frames, dense and with replay
    docs                         writes the page of the stages that were run

DECODER: trained, or tuned. `examples/doom/data.py` and `train.py` record and tokenise the data. Two processes with
--threads 1 are faster than one process with two threads, and all are with the GLIBC_TUNABLES of
docs/reference/gates.md.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from replay_doom import stages
from replay_doom.document import write_document
from replay_doom.rollouts import rollouts
from replay_doom.setup import DELTA, DOOM, HEADS, LEARNED, MEAN, ROOT, TINY, Counts, Decoder, Setup
from replay_doom.similarity import similarity

GATES = {"tas": MEAN, "tas_heads": HEADS, "input_delta": DELTA, "learned": LEARNED}


def run(setup: Setup, stage: str, docs: Path) -> None:
    """Run one stage. docs: where the page and its pictures go."""
    name, *parts = stage.split(":")
    decoder = _decoder(setup, parts[0]) if name in ("calibrate", "measure", "precisions", "rollouts") else None
    actions: dict[str, Callable[[], object]] = {
        "train": lambda: stages.train(setup, parts[0]),
        "tune": lambda: stages.tune(setup),
        "similarity": lambda: _keep(setup, setup.dense, "similarity", similarity(setup, setup.dense)),
        "docs": lambda: write_document(setup, docs),
    }
    if decoder is not None:
        actions |= {
            "calibrate": lambda: stages.calibrate(setup, decoder, GATES[parts[1]]),
            "measure": lambda: stages.measure(setup, decoder, parts[1]),
            "precisions": lambda: stages.precisions(setup, decoder),
            "rollouts": lambda: _keep(setup, decoder, "rollouts", rollouts(setup, decoder)),
        }
    actions[name]()


def _decoder(setup: Setup, name: str) -> Decoder:
    return next(decoder for decoder in (setup.dense, setup.tuned) if decoder.name == name)


def _keep(setup: Setup, decoder: Decoder, name: str, found: object) -> None:
    folder = setup.work / decoder.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE")
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "doom" / "data")
    parser.add_argument("--world", type=Path, default=DOOM / "world", help="folder of export.py")
    parser.add_argument("--out", type=Path, default=DOOM, help="folder of gates and cases")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "doom" / "quality", help="journals, results, the tuned decoder"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the page and its pictures go")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="counts with which every stage takes a minute")
    parser.add_argument("--count", action="append", default=[], metavar="NAME=N", help="one of the counts, differently")
    return parser.parse_args()


def main() -> None:
    """Run the requested stages."""
    options = parsed()
    torch.set_num_threads(options.threads)
    counts = replace(
        TINY if options.tiny else Counts(), **{k: int(n) for k, n in (c.split("=") for c in options.count)}
    )
    options.work.mkdir(parents=True, exist_ok=True)
    for stage in options.stages:
        began, processor = time.perf_counter(), time.process_time()
        say: Callable[[str], None] = lambda line, stage=stage: print(f"{stage}: {line}", flush=True)  # noqa: E731
        setup = Setup(options.data, options.world, options.out, options.work, counts, say)
        run(setup, stage, options.docs)
        say(f"{time.perf_counter() - began:.0f} s, {time.process_time() - processor:.0f} s of a core")


if __name__ == "__main__":
    main()
