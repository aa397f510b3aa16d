"""A dense decoder on whole videos, whose MLPs can be watched and replaced."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.tune.evaluator import of_prefill, with_rows
from fastcar_compile.tune.rule import Layer, Replace, Stages


class WholeVideos(ABC):
    """A decoder on whole videos of one length.

    Args:
        program: with a prefill graph. length: input tokens, prompt included. prompt: tokens before decoding starts.

    Attributes:
        rows: videos per batch. frame: F. frames: number of frames of decoded tokens. The last one may be incomplete.

    Raises:
        InputError: a decoder without head, with cross-attention, or without a prefill graph.
    """

    def __init__(self, program: DecoderProgram, length: int, prompt: int) -> None:
        config = program.config
        if config.takes_embeddings or config.vocab_size is None:
            raise InputError("a headless decoder has no likelihood to train on", hint="train with its head")
        if config.context is not None:
            raise InputError("the decoder has cross-attention, and training reads videos without their contexts")
        if program.prefill is None:
            hint = "compile it with a prefill chunk, or give the decoder"
            raise InputError("the artifact has no prefill graph, which would read the videos", hint=hint)
        self.program, self.prefill, self.rows = program, program.prefill, config.batch_size
        self.length, self.frame, self.prompt = length, config.tokens_per_frame, prompt
        self.layers, self.hidden = config.num_layers, config.hidden_size
        self.frames = -(-(length - prompt) // self.frame)
        self._padding = self.frames * self.frame - (length - prompt)

    @abstractmethod
    def run(self, tokens: Tensor, hooks: Sequence[Any]) -> Tensor:
        """Return the logits float32 [rows, length, V]; hooks: as `rule.Replace`, one per layer, or None."""

    def dense(self, tokens: Tensor) -> Tensor:
        """Return the logits float32 [rows, length, V] of tokens int64 [rows, length], without replay."""
        return self.run(tokens, [None] * self.layers)

    def framed(self, flat: Tensor) -> Tensor:
        """Return [rows, length, …] as [rows, frames, F, …] without the prompt. Zeros fill the last frame."""
        flat = flat[:, self.prompt :]
        filled = torch.nn.functional.pad(flat, (0, 0) * (flat.dim() - 2) + (0, self._padding))
        return filled.view(flat.shape[0], self.frames, self.frame, *flat.shape[2:])


class CompiledDecoder(WholeVideos):
    """The decoder of an artifact, in its number format and without gradients, chunk by chunk.

    Args:
        artifact: with a head and a prefill graph. rows: videos per batch, more where it was compiled for more. length,
            prompt: as for `WholeVideos`.

    Raises:
        InputError: as of `WholeVideos`, or it was compiled for shorter videos.
    """

    def __init__(self, artifact: Artifact, rows: int, length: int, prompt: int) -> None:
        super().__init__(with_rows(of_prefill(artifact.program), rows), length, prompt)
        if length > (most := self.program.config.max_seq_len):
            what = f"the artifact was compiled for {count_text(most, 'token')}, and the videos have {length + 1}"
            raise InputError(what, hint="give shorter videos, or the decoder")
        self._stages = Stages(self.prefill, self.program.prefill_outputs, in_place=True)

    def run(self, tokens: Tensor, hooks: Sequence[Any]) -> Tensor:
        """Return the logits; arguments as for `WholeVideos`. A hook sees the tokens of all chunks at once."""
        stages, chunk = self._stages, self.program.config.prefill_chunk
        places, known = stages.placeholders, list[dict[fx.Node, Any]]()
        for start in range(0, self.length, chunk):
            part = tokens[:, start : start + chunk]
            part = torch.nn.functional.pad(part, (0, chunk - part.shape[1]))
            given = {"tokens": part, "position": torch.tensor([start])}
            known.append({places[name]: value for name, value in given.items() if name in places})
        for stage, hook in enumerate(hooks):
            state = {s.name: s.zeros() for s in self.program.state if s.layer == stage and s.name in places}
            found = list[dict[fx.Node, Any]]()
            for values in known:
                found.append(stages.body(stage, values | {places[name]: cache for name, cache in state.items()}))
                state = {name: found[-1][stages.results[name]] for name in state}
            if hook is not None:
                self._replace(stages.layers[stage], found, hook)
            for values, own in zip(known, found, strict=True):
                done = stages.tail(stage, own)
                values |= {node: done[node] for node in stages.crossing[stage]}
        logits = [stages.run(self.layers, values, None)[stages.results["logits"]] for values in known]
        return torch.cat(logits, 1)[:, : self.length].float()

    def _replace(self, layer: Layer, found: list[dict[fx.Node, Any]], hook: Replace) -> None:
        """Change the MLP's output in the values of all chunks."""
        query = torch.cat([values[layer.query] for values in found], 2)[:, :, : self.length]
        x, output = (
            torch.cat([values[node].reshape(self.rows, -1, self.hidden) for values in found], 1)[:, : self.length]
            for node in (layer.x, layer.output)
        )
        y = hook(query, found[-1][layer.key_cache], x, output)
        for values, part in zip(found, y.split(self.program.config.prefill_chunk, 1), strict=True):
            own = values[layer.output].clone()
            own.view(self.rows, -1, self.hidden)[:, : part.shape[1]] = part
            values[layer.output] = own
