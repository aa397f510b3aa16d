"""The decoder, and the token sequences that it is trained on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from autoencoder import Autoencoder
from data import load_shard, shard_paths, write_atomically
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM
from world_format import CONTEXT_FRAMES, FIRST_ACTION, TOKENS_PER_FRAME, VOCAB_SIZE

SCENARIOS = ("health_gathering_supreme", "my_way_home", "deadly_corridor")
"""What the decoder is trained on: three maps. The tokenizer has seen more."""

LAYERS = 5
LONGEST_SESSION = 4096
"""Frames that `max_position_embeddings` allows. The window makes positions relative, so training needs fewer."""


def build_model() -> Qwen3ForCausalLM:
    """Return the decoder with random weights.

    Every layer has a sliding window of CONTEXT_FRAMES frames. Four query heads share one key/value head.
    """
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=LONGEST_SESSION * TOKENS_PER_FRAME,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=True,
        sliding_window=CONTEXT_FRAMES * TOKENS_PER_FRAME,
        layer_types=["sliding_attention"] * LAYERS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # pyright: ignore[reportCallIssue]
        dtype="float32",
    )
    config.tokens_per_frame = TOKENS_PER_FRAME
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class TokenSplit:
    """All frames of a split as tokens.

    Attributes:
        tokens: int16 [T, 65]: the action that led to the frame, then its image tokens in raster order.
        kinds: uint8 [T], index into `game.KINDS`.
        bounds: int64 [E, 2], first and one past the last frame of each episode.
        scenarios: name of each episode's scenario.
    """

    tokens: np.ndarray
    kinds: np.ndarray
    bounds: np.ndarray
    scenarios: tuple[str, ...]

    def sequences(self, length: int) -> np.ndarray:
        """Return int64 [N]: every frame that begins `length` frames of one episode."""
        return np.concatenate([np.arange(first, max(first, end - length + 1)) for first, end in self.bounds])

    def take(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return int64 [N, length * 65]: the sequences that begin at `starts`."""
        frames = self.tokens[starts[:, None] + np.arange(length)]
        return frames.reshape(len(starts), -1).astype(np.int64)


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
    return TokenSplit(np.concatenate(tokens), np.concatenate(kinds), np.concatenate(bounds), tuple(scenarios))


def load_decoder(path: Path) -> Qwen3ForCausalLM:
    """Return the decoder in a folder, float32, in evaluation mode."""
    model = Qwen3ForCausalLM.from_pretrained(path, local_files_only=True, dtype=torch.float32)
    return model.eval()
