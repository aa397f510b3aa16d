"""The decoder, and the token sequences that it is trained on."""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
from autoencoder import Autoencoder
from common.worlds import Format, Play, build_decoder
from data import load_shard, shard_paths, write_atomically
from safetensors import safe_open
from transformers import Qwen3ForCausalLM
from world_format import CODES, CONTEXT_FRAMES, FIRST_ACTION, TOKENS_PER_FRAME, VOCAB_SIZE

SCENARIOS = ("health_gathering_supreme", "my_way_home", "deadly_corridor")
"""What the decoder is trained on: three maps. The tokenizer has seen more."""

WORLD = Format(CODES, TOKENS_PER_FRAME, CONTEXT_FRAMES)


def build_model() -> Qwen3ForCausalLM:
    """Return the decoder with random weights."""
    return build_decoder(WORLD, VOCAB_SIZE, layers=5, intermediate=1536)


@dataclass(frozen=True)
class TokenSplit(Play):
    """All frames of a split as tokens.

    Attributes:
        kinds: uint8 [T], index into `game.KINDS`.
        scenarios: name of each episode's scenario.
    """

    kinds: np.ndarray
    scenarios: tuple[str, ...]


def frame_tokens(actions: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return int16 [T, 65] of actions uint8 [T] and image codes int64 [T, 64]."""
    return np.concatenate([FIRST_ACTION + actions[:, None].astype(np.int16), codes.astype(np.int16)], 1)


def tokenize_split(model: Autoencoder, folder: Path, split: str) -> None:
    """Write the tokens of every shard of a split beside it as NAME.tokens, unless they are there."""
    for path in shard_paths(folder, split):
        target = path.with_suffix(".tokens")
        if target.exists():
            continue
        shard = load_shard(path)
        arrays = {
            "tokens": frame_tokens(shard.actions, model.encode(shard.frames)),
            "kinds": shard.kinds,
            "bounds": np.array(list(shard.bounds())),
        }
        write_atomically(arrays, target, {"scenario": shard.scenario})
        print(f"{split}: {target.name}", flush=True)


def load_tokens(folder: Path, split: str, chosen: tuple[str, ...] | None = None) -> TokenSplit:
    """Read the tokens of a split, of all its scenarios or of the chosen ones."""
    tokens, kinds, bounds, scenarios, first = [], [], [], [], 0
    for path in shard_paths(folder, split):
        with safe_open(path.with_suffix(".tokens"), "numpy") as file:
            if chosen is not None and file.metadata()["scenario"] not in chosen:
                continue
            tokens.append(file.get_tensor("tokens"))
            kinds.append(file.get_tensor("kinds"))
            bounds.append(first + file.get_tensor("bounds"))
            scenarios += [file.metadata()["scenario"]] * len(bounds[-1])
        first += len(tokens[-1])
    return TokenSplit(np.concatenate(tokens), np.concatenate(bounds), np.concatenate(kinds), tuple(scenarios))
