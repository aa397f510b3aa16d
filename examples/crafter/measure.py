"""Measure the decoder on held-out play: loss by kind of tile and of motion, and what replay changes.

The draft and the number formats are those of the shipped page. Frames are generated dense, with other draws, and with
replay: under recorded actions, shown as strips, and under keys that are held. What replay costs, with other drafts and
with a plain gate too, is measured on other sequences than the thresholds were chosen on. Both are written as files for
`fastcar calibrate` and `fastcar evaluate`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
import torch
from common.rollout import Sampling, contexts_of, imagine, open_decoder
from common.strips import write_strip
from common.worlds import Play, load_decoder
from recording import MOVES, SEEDS, WORLD, Agent, Game, load_play
from tiles import (
    CODES,
    COLUMNS,
    CONTEXT_FRAMES,
    FIRST_ACTION,
    MAP_CODES,
    MAP_ROWS,
    NAMES,
    TOKENS_PER_FRAME,
    WALKABLE,
    Tile,
    render,
    tile_pictures,
)
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import fastcar_compile as fc
from fastcar_compile.tune.evaluate import Case, Study

SHOWN_EVERY, SHOWN_SIZE = 4, (96, 96)
"""Frames between two in a strip, and pixels of each."""

STRIPS, ROLLOUTS = 2, 16
MAP_TOKENS = MAP_ROWS * COLUMNS
SEQUENCES, SEQUENCE_FRAMES = {"calibration.npy": 6, "videos.npy": 18}, 16
"""Sequences that are written, and their frames; no frame is in both files."""

PAGE = Path(__file__).parent / "page" / "artifact" / "manifest.json"
DRAFT = Path(__file__).parent / "draft.safetensors"
LIMIT = 0.05
"""Increase of the NLL that thresholds were chosen for."""

PLAIN = fc.ReplayConfig(gate="input_delta", threshold=[0.683356, 0.611076, 0.272866, 0.304269])
"""A gate without a draft, with thresholds that were chosen on the same sequences."""

DRAWS = {"dense": 0, "dense, other draws": 1}
"""Seeds. Replay has the draws of seed 0. Other draws show how far apart two dense rollouts are."""

BEFORE, HELD = 100, 8
"""Frames that the agent plays before keys are held, and frames of each key."""

GIVEN: dict[str, Any] = {"prompt": 4 * TOKENS_PER_FRAME, "counted": (0, CODES)}
"""Of every sequence."""

SHOWN = (1, 4, 16, 64)
"""Frames whose figures are given."""

FITTED = 96
"""Sequences of training play that a draft is fitted to."""


def chosen(play: Play, length: int, count: int) -> np.ndarray:
    """Return int64 [count]: evenly spaced first frames of sequences of `length` frames."""
    every = play.sequences(length)
    return every[np.linspace(0, len(every) - 1, count).astype(np.int64)]


@torch.inference_mode()
def likelihood(model: PreTrainedModel, play: Play, count: int) -> dict[str, dict[str, float]]:
    """Return what the last frames of `count` sequences cost: the group of its tokens -> figures.

    Every frame has the true frames of its window before it. nll: nats per token. likeliest: share of tokens that the
    decoder finds likeliest. unchanged: share of tokens that the frame before has at the same place.
    """
    sequences = torch.from_numpy(play.take(chosen(play, CONTEXT_FRAMES, count), CONTEXT_FRAMES))
    nll, likeliest = [], []
    for part in sequences.split(8):
        logits = model(part[:, :-1], use_cache=False, logits_to_keep=TOKENS_PER_FRAME - 1).logits[..., :CODES]
        last = part[:, -(TOKENS_PER_FRAME - 1) :]
        nll.append(cross_entropy(logits.transpose(1, 2), last, reduction="none"))
        likeliest.append(logits.argmax(-1) == last)
    frames = sequences.reshape(count, CONTEXT_FRAMES, TOKENS_PER_FRAME)
    values = {
        "nll": torch.cat(nll).numpy(),
        "likeliest": torch.cat(likeliest).numpy(),
        "unchanged": (frames[:, -1, 1:] == frames[:, -2, 1:]).numpy(),
    }
    walks = [FIRST_ACTION + number for number, name in enumerate(NAMES) if name.startswith("move_")]
    walking = np.isin(frames[:, -1, 0].numpy(), walks)
    ground = np.arange(TOKENS_PER_FRAME - 1) < MAP_TOKENS
    groups = {
        "map, walking": np.outer(walking, ground),
        "map, otherwise": np.outer(~walking, ground),
        "inventory": np.outer(np.ones(count, bool), ~ground),
        "all": np.ones((count, TOKENS_PER_FRAME - 1), bool),
    }
    return {
        group: {name: round(float(value[where].mean()), 4) for name, value in values.items()}
        for group, where in groups.items()
    }


def held_keys(frames: int) -> Play:
    """Return episodes int16 [ROLLOUTS, context + frames, 82] of other worlds than the recorded ones, in a row.

    The last frames are moves, HELD of them in a direction.
    """
    moves, length, found, seed = list(MOVES.values()), BEFORE + frames, list[np.ndarray](), SEEDS["held_out"] + 5000
    while len(found) < ROLLOUTS:
        game, turn, codes = Game(seed := seed + 1), len(found), list[np.ndarray]()
        agent = Agent(game, np.random.default_rng(seed))
        for frame in range(length):
            action = agent.choose() if frame < BEFORE else moves[((frame - BEFORE) // HELD + turn) % len(moves)]
            if game.step(action):
                break
            codes.append(np.array([FIRST_ACTION + NAMES.index(action), *game.codes()], np.int16))
        if len(codes) == length:
            found.append(np.stack(codes[-CONTEXT_FRAMES - frames :]))
    ends = np.arange(1, ROLLOUTS + 1) * len(found[0])
    return Play(np.concatenate(found), np.stack([ends - len(found[0]), ends], 1))


def moves_carried_out(context: torch.Tensor, actions: torch.Tensor, codes: np.ndarray) -> float:
    """Return the share of moves onto free ground by which the map scrolled.

    A move that would show the same either way does not count, as on a meadow.

    Args:
        context, actions: as `contexts_of` returns them. codes: int64 [N, F, 81], the frames of the actions.
    """
    last = context.reshape(len(context), -1, TOKENS_PER_FRAME)[:, -1:, 1:].numpy()
    codes = np.concatenate((last, codes), 1)
    ground = codes[..., :MAP_TOKENS].reshape(*codes.shape[:2], MAP_ROWS, COLUMNS)
    before, after = ground[:, :-1], ground[:, 1:]
    row, column = MAP_ROWS // 2, COLUMNS // 2
    counted = done = 0
    for (x, y), name in MOVES.items():
        seen = np.ones((MAP_ROWS, COLUMNS), bool)
        seen[[0, -1]] = seen[:, [0, -1]] = False
        seen[row, column] = seen[row - y, column - x] = False  # the player stands there, now or in the frame before
        scrolled, still = (
            ((after == other) & seen).sum((2, 3)) for other in (np.roll(before, (-y, -x), (2, 3)), before)
        )
        free = np.isin(before[..., row + y, column + x], [MAP_CODES[Tile(material)] for material in WALKABLE])
        asked = free & (actions.numpy() == FIRST_ACTION + NAMES.index(name)) & (scrolled != still)
        counted, done = counted + asked.sum(), done + (asked & (scrolled > still)).sum()
    return float(done / counted)


def rollouts(options: argparse.Namespace, play: Play, replay: fc.ReplayConfig) -> dict[str, dict[str, Any]]:
    """Generate frames dense and with replay, and draw strips; return the figures of each, and of the game itself.

    moves_recorded, moves_held: see `moves_carried_out`; under the recorded actions, and under held keys. equal_to_game,
    equal_to_dense: share of equal tiles under the recorded actions, by frame. replayed: share of the MLPs there.
    """
    formats = {name: json.loads(PAGE.read_text())["options"][name] for name in ("quant", "kv", "numerics")}
    held = held_keys(options.frames)
    recorded = chosen(play, CONTEXT_FRAMES + options.frames, ROLLOUTS + 2)[1:-1]
    inputs = {"held": contexts_of(held, WORLD, held.bounds[:, 0], options.frames)}
    inputs["recorded"] = contexts_of(play, WORLD, recorded, options.frames)
    runs = {name: (None, seed) for name, seed in DRAWS.items()} | {"replay": (replay.threshold, DRAWS["dense"])}
    made, found = {"game": {of: true for of, (_, _, true) in inputs.items()}}, dict[str, dict[str, Any]](game={})
    with open_decoder(options.decoder, WORLD, ROLLOUTS, options.frames, replay=replay, **formats) as session:
        for name, (thresholds, seed) in runs.items():
            session.set_threshold(thresholds)
            sampling = Sampling(top_k=CODES, seed=seed)
            made[name] = {of: imagine(session, WORLD, *each[:2], sampling) for of, each in inputs.items()}
            found[name] = {"replayed": round(session.stats.eligible_replay_ratio, 3)}
    for name, codes in made.items():
        for of, (context, actions, _) in inputs.items():
            found[name][f"moves_{of}"] = round(moves_carried_out(context, actions, codes[of]), 3)
        for other in ("game", "dense"):
            equal = (codes["recorded"] == made[other]["recorded"]).mean((0, 2))
            found[name][f"equal_to_{other}"] = {n: round(float(equal[n - 1]), 3) for n in SHOWN if n <= len(equal)}
    pictures, shown = tile_pictures(), slice(SHOWN_EVERY - 1, None, SHOWN_EVERY)
    for number in range(STRIPS):
        rows = {name: made[name]["recorded"][number] for name in ("game", "dense", "replay")}
        videos = {name: render(codes, pictures)[shown] for name, codes in rows.items()}
        write_strip(videos, SHOWN_SIZE, options.out / f"rollout_{number + 1}.png")
    return found


def fitted(options: argparse.Namespace, calibration: np.ndarray) -> dict[str, fc.ReplayConfig]:
    """Return the page's draft, a plain gate, and drafts of the shares in --drafts, with thresholds chosen alike."""
    thresholds = json.loads(PAGE.read_text())["options"]["replay"]["threshold"]
    shipped = fc.ReplayConfig(draft=fc.Draft.load(DRAFT), threshold=thresholds)
    found = {"the page's draft": shipped, PLAIN.gate: PLAIN}
    for share in options.drafts:
        play = load_play(options.data, "train")
        draft = fc.fit_draft(
            load_decoder(options.decoder),
            play.take(chosen(play, SEQUENCE_FRAMES, FITTED), SEQUENCE_FRAMES),
            share=share,
            checkpoint=options.out / "draft.checkpoint",
            **GIVEN,
        )
        draft.save(options.out / f"draft_{share:g}.safetensors")
        replay = fc.ReplayConfig(draft=draft)
        thresholds = fc.calibrate(
            load_decoder(options.decoder), calibration, replay=replay, quant="w8a8", max_nll_increase=LIMIT, **GIVEN
        )
        found[f"draft {share:g}"] = replay.model_copy(update={"threshold": thresholds.values})
        print(f"draft {share:g}: thresholds {thresholds.values}")
    return found


def costs(
    options: argparse.Namespace, videos: np.ndarray, gates: dict[str, fc.ReplayConfig]
) -> dict[str, dict[str, Any]]:
    """Return what each gate replays and costs on held-out sequences, each frame after true ones."""
    study = Study(load_decoder(options.decoder), videos, decoder="crafter", quant="w8a8", **GIVEN)
    rows = study.rows([Case(name, replay) for name, replay in gates.items()])
    kept = ("replay_ratio", "replay_by_layer", "mlp_weights_spared", "nll", "nll_dense", "token_agreement")
    return {row["calibration"]: {name: row[name] for name in kept} for row in rows}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/crafter/data"))
    parser.add_argument("--decoder", type=Path, default=Path(__file__).parent / "world" / "decoder")
    parser.add_argument("--out", type=Path, default=Path("build/crafter/measured"))
    parser.add_argument("--count", type=int, default=400, help="sequences of the loss")
    parser.add_argument("--frames", type=int, default=64, help="of a rollout")
    parser.add_argument("--drafts", type=float, nargs="*", default=[], help="shares of the MLPs' weights, such as 0.25")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    play = load_play(options.data, "held_out")
    starts = chosen(play, SEQUENCE_FRAMES, sum(SEQUENCES.values()))
    sequences = play.take(starts[np.argsort(np.arange(len(starts)) % 4, kind="stable")], SEQUENCE_FRAMES)
    calibration, videos = np.split(sequences, [SEQUENCES["calibration.npy"]])
    for name, part in zip(SEQUENCES, (calibration, videos), strict=True):
        np.save(options.out / name, part)
    gates = fitted(options, calibration)
    measured = {
        "likelihood": likelihood(load_decoder(options.decoder), play, options.count),
        "costs": costs(options, videos, gates),
        "rollouts": rollouts(options, play, next(iter(gates.values()))),
    }
    print(json.dumps(measured, indent=1))
    (options.out / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
