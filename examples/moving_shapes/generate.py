"""Continue videos with the Hugging Face decoder, without FastCar: two true frames in, six frames out."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evaluate import HELD_OUT_SEED, MODEL, load_model
from render import write_gif, write_strip
from video import BOS, FRAMES, TOKENS_PER_FRAME, detokenize, make_videos, tokenize, with_bos


def continue_videos(
    model: Any, start: np.ndarray, frames: int = FRAMES, temperature: float = 0.0, seed: int = 0
) -> np.ndarray:
    """Return the given frames and the generated next ones, uint8 [N, frames, 32, 32].

    Args:
        model: a transformers decoder with `generate`.
        start: uint8 [N, given, 32, 32]. frames: all frames, with the given ones. temperature: 0 is greedy.
    """
    prompt = torch.from_numpy(with_bos(tokenize(start)))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    torch.manual_seed(seed)
    tokens = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=(frames - start.shape[1]) * TOKENS_PER_FRAME,
        suppress_tokens=[BOS],
        pad_token_id=BOS,
        **sampling,
    )
    assert isinstance(tokens, torch.Tensor)
    return detokenize(tokens[:, 1:].numpy())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--count", type=int, default=3, help="number of videos")
    parser.add_argument("--given", type=int, default=2, help="true frames at the start")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="of the videos")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    truth = make_videos(options.count, options.seed)
    made = continue_videos(load_model(options.model), truth[:, : options.given], temperature=options.temperature)
    options.out.mkdir(parents=True, exist_ok=True)
    for index, (true, generated) in enumerate(zip(truth, made, strict=True)):
        wrong = (true != generated).mean((1, 2))
        print(f"video {index}: wrong pixels per frame, %:", " ".join(f"{100 * share:.1f}" for share in wrong))
        write_strip({"truth": true, "generated": generated}, options.out / f"video{index}.png", reference="truth")
        write_gif(true, options.out / f"video{index}_truth.gif")
        write_gif(generated, options.out / f"video{index}_generated.gif")


if __name__ == "__main__":
    main()
