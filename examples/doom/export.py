"""Write a world: decoder, tokenizer, its pixel decoder as ONNX, starting contexts, and world.toml."""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

import numpy as np
import torch
from autoencoder import Autoencoder, load_autoencoder, to_frames
from common.world_files import WorldToml, write_world
from common.worlds import load_decoder
from decoder import SCENARIOS, TokenSplit, load_tokens
from safetensors.torch import save_file as save_tensors
from torch import Tensor, nn
from world_format import (
    ACTIONS,
    BUTTONS,
    CODES,
    CONTEXT_FRAMES,
    FRAMES_PER_SECOND,
    GRID,
    SIZE,
)

STARTS_PER_SCENARIO = 2


class TokensToFrames(nn.Module):
    """Image codes int64 [N, 8, 8] to frames uint8 [N, 64, 64, 3]: a table of vectors, then the decoder."""

    def __init__(self, model: Autoencoder) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(model.quantizer.indices_to_codes(torch.arange(CODES)[None])[0])
        self.decoder = model.decoder

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the frames."""
        return to_frames(self.decoder(self.table(tokens).permute(0, 3, 1, 2)))


def starting_contexts(split: TokenSplit, per_scenario: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return contexts int64 [16, 65] from `per_scenario` episodes of each scenario by name."""
    rng = np.random.default_rng(seed)
    contexts = {}
    for scenario in sorted(set(split.scenarios)):
        episodes = [
            bounds
            for bounds, name in zip(split.bounds.tolist(), split.scenarios, strict=True)
            if name == scenario and bounds[1] - bounds[0] >= CONTEXT_FRAMES
        ]
        for number, episode in enumerate(rng.permutation(len(episodes))[:per_scenario], 1):
            first, end = episodes[episode]
            start = int(rng.integers(first, end - CONTEXT_FRAMES + 1))
            contexts[f"{scenario} {number}"] = split.tokens[start : start + CONTEXT_FRAMES].astype(np.int64)
    return contexts


def world_toml() -> WorldToml:
    """Return the content of world.toml."""
    return WorldToml(
        name="Doom",
        codes=CODES,
        grid=(GRID, GRID),
        size=(SIZE, SIZE),
        aspect=(4, 3),
        context_frames=CONTEXT_FRAMES,
        frames_per_second=FRAMES_PER_SECOND,
        top_k=40,
        buttons=BUTTONS,
        actions=[(action.name, action.buttons) for action in ACTIONS],
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decoder", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--tokenizer", type=Path, default=Path("build/doom/tokenizer.safetensors"))
    parser.add_argument("--data", type=Path, default=Path("build/doom/data"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "world")
    options = parser.parse_args()
    split = load_tokens(options.data, "held_out", SCENARIOS)
    autoencoder, starts = load_autoencoder(options.tokenizer), starting_contexts(split, STARTS_PER_SCENARIO)
    write_world(options.out, world_toml(), load_decoder(options.decoder), TokensToFrames(autoencoder), starts)
    weights = {name: tensor.contiguous() for name, tensor in autoencoder.state_dict().items()}
    save_tensors(weights, options.out / "tokenizer.safetensors")


if __name__ == "__main__":
    main()
