"""Training of the shipped gates and of the decoders that are tuned with them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastcar_compile as fc
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.tune.calibrate import program_of, rules_of, search_of
from fastcar_compile.tune.evaluator import Evaluator
from fastcar_compile.tune.training.steps import FIRST_PRICE
from replay_quality.decoders import BATCH, BY_NAME, CALIBRATION_SEED, TRAINING_SEED, Decoder

SHARE = 0.6
"""Share of a layer's forwards that replay while its heads are compared."""

MOST_HEADS = 3
"""Most heads of one layer. A further head is added only if it lowers the NLL."""


def train(decoder: Decoder, folder: Path, say: Callable[[str], None]) -> None:
    """Write the decoder's trained gates, and its weights if it is tuned. Each round continues from the last one."""
    for gate, rounds in decoder.training.items():
        found = first_gate(decoder, gate, say)
        for number, one in enumerate(rounds):
            videos = decoder.videos(one.steps * BATCH, TRAINING_SEED + number)
            options: dict[str, Any] = {
                "gate": gate,
                "target_replay": one.target,
                "steps": one.steps,
                "batch": BATCH,
                "start": found,
                "softness": one.softness,
                "checkpoint": folder / f"{gate}-{number}.safetensors",
                "progress": say,
            }
            if one.rate:
                tuned = fc.tune_decoder(BY_NAME[decoder.example].model(), videos, rate=one.rate, **options)
                model: Any = tuned.model
                model.save_pretrained(decoder.folder / "model")
                found = tuned.gate
            else:
                found = fc.train_gate(decoder.model(), videos, **options)
        assert found is not None
        decoder.gate_file(gate).parent.mkdir(parents=True, exist_ok=True)
        found.save(decoder.gate_file(gate))


def first_gate(decoder: Decoder, gate: str, say: Callable[[str], None]) -> fc.TrainedGate | None:
    """Return the gate that the training starts from; None for an untrained one."""
    if gate == "learned" and decoder.tuned:
        return fc.TrainedGate.load(BY_NAME[decoder.example].gate_file(gate))
    if gate == "tas" and decoder.from_heads:
        return chosen_heads(decoder, say)
    return None


def chosen_heads(decoder: Decoder, say: Callable[[str], None]) -> fc.TrainedGate:
    """Return gate `tas` with heads chosen one by one, with thresholds for 50 % replay."""
    model, videos = decoder.model(), decoder.videos(decoder.calibration_videos, CALIBRATION_SEED)
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    program = program_of(model, videos.shape)
    chosen = [_best_heads(program, videos, layer, heads, say) for layer in range(layers)]
    weights = torch.tensor([[pairs.get(head, 0.0) for head in range(heads)] for pairs in chosen])
    weights /= weights.abs().sum(1, keepdim=True)
    replay = fc.ReplayConfig(gate="tas", heads=[dict(enumerate(row.tolist())) for row in weights])
    search, key = search_of(program, replay, videos, progress=say)
    values = search.for_replay(0.5)
    found = search.outcome(values)
    nll = search.dense_nll * math.exp(found.loss)
    thresholds = tuple(0.0 if value is None else value for value in values)
    tensors = tuple({"heads": row} for row in weights)
    return fc.TrainedGate("tas", tensors, thresholds, 0.5, found.replay, nll, search.dense_nll, FIRST_PRICE, key)


def _best_heads(
    program: DecoderProgram, videos: np.ndarray, layer: int, count: int, say: Callable[[str], None]
) -> dict[int, float]:
    """Return the heads, each with weight 1 or -1, with the least NLL when SHARE of this layer alone replays.

    The best single head comes first. Then comes the head whose sum or difference with those chosen lowers the NLL most.
    """
    best: tuple[float, dict[int, float]] = (math.inf, {})
    while len(best[1]) < min(MOST_HEADS, count):
        free = [{**best[1], head: sign} for head in range(count) if head not in best[1] for sign in (1.0, -1.0)]
        tried = min(((_nll(program, videos, layer, heads), heads) for heads in free), key=lambda found: found[0])
        if tried[0] >= best[0]:
            break
        best = tried
        say(f"heads of layer {layer}: {', '.join(f'{h}:{w:+g}' for h, w in best[1].items())}, NLL {best[0]:.4g}")
    return best[1]


def _nll(program: DecoderProgram, videos: np.ndarray, layer: int, heads: dict[int, float]) -> float:
    """Return the NLL with SHARE of the layer's dense scores above the threshold."""
    layers = program.config.num_layers
    replay = fc.ReplayConfig(gate="tas", heads=[heads if i == layer else None for i in range(layers)])
    evaluator = Evaluator(program, videos, rules_of(replay, layers))
    scores = evaluator.measure([None] * layers).scores[layer]
    # TAS replays large scores: the share below the threshold computes.
    threshold = float(scores.kthvalue(max(1, round((1 - SHARE) * len(scores)))).values)
    return evaluator.measure([threshold if i == layer else None for i in range(layers)]).nll
