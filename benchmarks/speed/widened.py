"""Widen a trained decoder without changing its function: its weights come from memory, and it still makes its videos.

    python benchmarks/speed/widened.py --repeat 8 --neurons 4 build/widened
    python benchmarks/speed/widened.py --decoder examples/crafter/world/decoder build/widened

Every element of the residual stream is there r times, so its RMS stays, and what a linear reads of it is divided by r.
Heads are there r times too, so `o_proj` sums r equal heads and is divided by r, and keys and values serve the same
share of the queries. Neurons are there s times, and `down_proj` is divided by s. Copies follow each other as wholes, so
that a group of quantised weights is one of the narrow decoder's. With powers of two no weight is rounded.
The game decoder, 256 x 1536, becomes one of 2048 x 6144 with 245 million parameters.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastcar_compile.gates.weights import GateWeights

GAME = Path(__file__).parents[2] / "examples" / "doom" / "world" / "decoder"


def _wider(name: str, weight: Tensor, repeat: int, neurons: int) -> Tensor:
    """Return a weight of the wide decoder; name: of its module."""
    rows, columns = {
        "embed_tokens": (1, repeat),
        "lm_head": (1, repeat),
        "gate_proj": (neurons, repeat),
        "up_proj": (neurons, repeat),
        "down_proj": (repeat, neurons),
        "q_norm": (1, 1),
        "k_norm": (1, 1),
    }.get(name, (repeat, repeat))
    if weight.ndim == 1:  # the gains of a norm
        return weight.repeat(rows)
    return weight.repeat(rows, columns) / (1 if name == "embed_tokens" else columns)


def widened(output: Path, decoder: Path = GAME, repeat: int = 8, neurons: int = 4) -> Path:
    """Write the folder of a wide decoder, which `fc.compile` takes, and return it.

    Args:
        decoder: folder of a Qwen3 or Llama without biases whose head is not tied. repeat: r. neurons: s.
    """
    output.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = json.loads((decoder / "config.json").read_text("utf-8"))
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
        config[key] *= repeat
    config["intermediate_size"] *= neurons
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    weights = load_file(decoder / "model.safetensors")
    wide = {key: _wider(key.split(".")[-2], weight, repeat, neurons) for key, weight in weights.items()}
    save_file(wide, output / "model.safetensors", {"format": "pt"})
    return output


def widened_gate(weights: GateWeights, repeat: int = 8) -> GateWeights:
    """Return the weights of gate `learned` for the wide decoder: x and its change are there r times."""
    wide = {number: dict(own.params()) for number, own in weights.layers.items()}
    for layer in wide.values():
        layer["w1"] = torch.cat([half.repeat(1, repeat) / repeat for half in layer["w1"].chunk(2, 1)], 1)
    return GateWeights.of(wide)


def main() -> None:
    """Write the folder of a wide decoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--decoder", type=Path, default=GAME)
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--neurons", type=int, default=4)
    options = parser.parse_args()
    print(widened(options.output, options.decoder, options.repeat, options.neurons))


if __name__ == "__main__":
    main()
