"""Train the decoder on recorded play. Open-ended and resumable.

The rate stays at its peak until the last `--cooldown` steps. Without them, training may go on from the same checkpoint.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

from common.worlds import Play, build_decoder, train_command
from recording import WORLD, load_play
from tiles import VOCAB_SIZE
from transformers import Qwen3ForCausalLM


def build_model() -> Qwen3ForCausalLM:
    """Return the decoder with random weights."""
    return build_decoder(WORLD, VOCAB_SIZE, layers=4, intermediate=1024)


def prepare(options: argparse.Namespace) -> tuple[Play, Play]:
    """Return the splits of training and evaluation."""
    return load_play(options.data, "train"), load_play(options.data, "held_out")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/crafter/data"))
    parser.add_argument("--out", type=Path, default=Path("build/crafter/decoder"))
    train_command(parser, build_model, WORLD, prepare)


if __name__ == "__main__":
    main()
