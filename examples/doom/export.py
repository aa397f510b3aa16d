"""Write a world: decoder, tokenizer, its pixel decoder as ONNX, starting contexts, and world.toml."""

import argparse
import json
from pathlib import Path

import numpy as np
import onnx
import torch
from autoencoder import Autoencoder, load_autoencoder, to_frames
from decoder import SCENARIOS, TokenSplit, load_decoder, load_tokens
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors
from torch import Tensor, nn
from transformers import PreTrainedModel
from world_format import (
    ACTIONS,
    BUTTONS,
    CODES,
    CONTEXT_FRAMES,
    FIRST_ACTION,
    FRAMES_PER_SECOND,
    GRID,
    SIZE,
    TOKENS_PER_FRAME,
)

from fastcar_compile.codegen.onnx.segments import strip

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


def write_pixels(model: Autoencoder, path: Path) -> None:
    """Write the pixel decoder as one ONNX file with a dynamic number of frames, without the exporter's paths."""
    torch.onnx.export(
        TokensToFrames(model).eval(),
        (torch.zeros(2, GRID, GRID, dtype=torch.int64),),
        path,
        dynamo=True,
        external_data=False,
        input_names=["tokens"],
        output_names=["frames"],
        dynamic_shapes={"tokens": {0: torch.export.Dim("frames")}},
        verbose=False,
    )
    proto = onnx.load(path)
    strip(proto)
    onnx.save(proto, path)


def starting_contexts(split: TokenSplit, per_scenario: int, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Return contexts int64 [S, 16, 65] from `per_scenario` episodes of each scenario, and their names."""
    rng = np.random.default_rng(seed)
    contexts, names = [], []
    for scenario in sorted(set(split.scenarios)):
        episodes = [
            bounds
            for bounds, name in zip(split.bounds.tolist(), split.scenarios, strict=True)
            if name == scenario and bounds[1] - bounds[0] >= CONTEXT_FRAMES
        ]
        for number, episode in enumerate(rng.permutation(len(episodes))[:per_scenario], 1):
            first, end = episodes[episode]
            start = int(rng.integers(first, end - CONTEXT_FRAMES + 1))
            contexts.append(split.tokens[start : start + CONTEXT_FRAMES].astype(np.int64))
            names.append(f"{scenario} {number}")
    return np.stack(contexts), names


def world_toml() -> str:
    """Return the text of world.toml."""
    lines = [
        "format = 1",
        'name = "Doom"',
        f"tokens_per_frame = {TOKENS_PER_FRAME}",
        f"context_frames = {CONTEXT_FRAMES}",
        f"frames_per_second = {FRAMES_PER_SECOND:.6f}",
        "",
        "[image]",
        "offset = 0",
        f"count = {CODES}",
        f"grid = [{GRID}, {GRID}]",
        f"size = [{SIZE}, {SIZE}]",
        "aspect = [4, 3]",
        "",
        "[sampling]",
        "temperature = 1.0",
        "top_k = 40",
        "",
        "[buttons]",
        *(f"{button} = {json.dumps(keys)}" for button, keys in BUTTONS.items()),
    ]
    for number, action in enumerate(ACTIONS):
        lines += ["", "[[actions]]", f"token = {FIRST_ACTION + number}", f'name = "{action.name}"']
        lines.append(f"buttons = {json.dumps(action.buttons)}")
    return "\n".join(lines) + "\n"


def write_world(folder: Path, model: PreTrainedModel, autoencoder: Autoencoder, split: TokenSplit) -> None:
    """Write a world's files. The decoder's weights are stored in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "world.toml").write_text(world_toml())
    model.bfloat16().save_pretrained(folder / "decoder")
    weights = {name: tensor.contiguous() for name, tensor in autoencoder.state_dict().items()}
    save_tensors(weights, folder / "tokenizer.safetensors")
    write_pixels(autoencoder, folder / "pixels.onnx")
    contexts, names = starting_contexts(split, STARTS_PER_SCENARIO)
    save_file({"tokens": contexts}, folder / "starts.safetensors", metadata={"names": json.dumps(names)})


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decoder", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--tokenizer", type=Path, default=Path("build/doom/tokenizer.safetensors"))
    parser.add_argument("--data", type=Path, default=Path("build/doom/data"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "world")
    options = parser.parse_args()
    split = load_tokens(options.data, "held_out", SCENARIOS)
    write_world(options.out, load_decoder(options.decoder), load_autoencoder(options.tokenizer), split)


if __name__ == "__main__":
    main()
