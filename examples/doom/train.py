"""Train the decoder on tokenised frames. Open-ended and resumable.

The rate stays at its peak until the last `--cooldown` steps. Without them, training may go on from the same checkpoint.
"""

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # code that the examples share

from autoencoder import load_autoencoder
from common.worlds import train_command
from data import SPLITS
from decoder import SCENARIOS, WORLD, TokenSplit, build_model, load_tokens, tokenize_split


def prepare(options: argparse.Namespace) -> tuple[TokenSplit, TokenSplit]:
    """Tokenise what is not tokenised yet and return the splits of training and evaluation."""
    autoencoder = load_autoencoder(options.tokenizer)
    for split in SPLITS:
        if (options.data / split).is_dir():
            tokenize_split(autoencoder, options.data, split)
    return load_tokens(options.data, "train", SCENARIOS), load_tokens(options.data, "held_out", SCENARIOS)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/doom/data"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/doom/tokenizer.safetensors"))
    parser.add_argument("--out", type=Path, default=Path("build/doom/decoder"))
    train_command(parser, build_model, WORLD, prepare)


if __name__ == "__main__":
    main()
