"""Drafts fitted to recorded videos, without labels (docs/explanation/drafts.md), and trained further.

The steps are those of a gate's training (`train.py`), with drafts in the place of gates. The decoder is frozen, and so
are the gates, which were fitted to predict errors: on the game decoder gates that were trained with their drafts spared
less.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastcar_compile.config import ReplayConfig
from fastcar_compile.errors import CompileError, InputError, count_text
from fastcar_compile.gates.draft import Draft
from fastcar_compile.gates.tensors import read_gate_file, write_gate_file
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.support import values
from fastcar_compile.tune.calibrate import Setting, program_key, program_of, search_of
from fastcar_compile.tune.curves import Point, allocate
from fastcar_compile.tune.evaluator import check_tokens, too_short
from fastcar_compile.tune.rule import counts
from fastcar_compile.tune.search import Say
from fastcar_compile.tune.training.relaxed import LearnedScorer, Relaxation, RelaxedDecoder, Sample, Scorer
from fastcar_compile.tune.training.steps import TrainingState
from fastcar_compile.tune.training.surrogate import (
    PAIR_VALUES,
    PAIRS,
    UNITS,
    Moments,
    SurrogateMlp,
    candidates,
    sizes_of,
    surrogate,
)
from fastcar_compile.tune.training.train import Options, Setup, Training, frame_of
from fastcar_compile.tune.training.whole import CompiledDecoder, WholeVideos

STEP_TOKENS = 2048
"""A step decodes as many videos as hold about so many tokens."""

FIRST = 8
"""Videos on which the first threshold is found."""

NOISE = 0.5
"""Scale of the logistic noise on scores: drafts learn the rows of other thresholds too."""


def distilled(
    model: nn.Module,
    videos: np.ndarray,
    draft: Draft,
    options: Options,
    setup: Setup,
    rate: float,
) -> Draft:
    """Return a draft after the steps of the options.

    Args:
        videos: int64 [N, T]. setup: without a gate to start from. rate: as a share of a tensor's root mean square.

    Raises:
        InputError, CompileError: as of `fit_draft`.
    """
    frame, prompt = values.whole("tokens_per_frame", setup.tokens_per_frame, 1), setup.prompt
    decoder = RelaxedDecoder(model, min(options.batch, len(videos)), videos.shape[1] - 1, frame, prompt)
    key = program_key(decoder.program, dataclasses.asdict(options) | {"prompt": prompt, "rate": rate}, videos)
    some, setting = videos[:FIRST], Setting(prompt, options.counted)
    search = search_of(program_of(model, some.shape, frame), ReplayConfig(draft=draft), some, setting)[0]
    threshold = next(value for value in search.level(options.target) if value is not None)
    training = Distillation(decoder, torch.from_numpy(videos), options, draft, rate, threshold, key)
    place = None if setup.checkpoint is None else Path(setup.checkpoint)
    training.run(TrainingState(place, key), values.reporter(setup.progress))
    return training.draft()


class DraftScorer(LearnedScorer):
    """The gate of one layer, which stays, with its draft, which is trained.

    Args:
        sample, units, random: as for `LearnedScorer`. mlp: the layer's. draft: tensors as `LayerDraft` names them;
            none: the layer replays plainly.
    """

    def __init__(
        self, sample: Sample, units: int, random: torch.Generator, mlp: SurrogateMlp, draft: Mapping[str, Tensor]
    ) -> None:
        super().__init__(sample, units, random)
        self.requires_grad_(False)
        self._mlp, self._edges = mlp, draft.get("edges")
        self.draft = nn.ParameterDict({name: t.clone() for name, t in draft.items() if name != "edges"})

    def surrogate(self, x: Tensor) -> Tensor | float:
        """Return m(x)."""
        return surrogate(self._mlp, dict(self.draft.items()), x) if self.draft else 0.0

    def gain(self, x: Tensor, cached: Tensor) -> Tensor | float:
        """Return g(d)."""
        if self._edges is None:
            return 1.0
        change = (x - cached).abs().sum(-1) / x.abs().sum(-1).clamp(min=1e-12)
        return self._gains()[(change[..., None] >= self._edges).sum(-1)][..., None]

    def _gains(self) -> Tensor:
        # Straight-through: a gain at 0 or 1 has a gradient too.
        gains = self.draft["gains"]
        return gains + (gains.clamp(0, 1) - gains).detach()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the draft."""
        if self._edges is None:
            return {}
        found = dict(self.draft.items()) | {"gains": self.draft["gains"].clamp(0, 1), "edges": self._edges}
        return {name: t.detach().clone() for name, t in found.items()}


class Distillation(Training):
    """The training of a draft.

    Args:
        decoder, videos, options, key: as for `Training`. draft: where it begins. rate, threshold: as for `distilled`.
    """

    def __init__(
        self,
        decoder: RelaxedDecoder,
        videos: Tensor,
        options: Options,
        draft: Draft,
        rate: float,
        threshold: float,
        key: str,
    ) -> None:
        assert draft.gate is not None
        self._draft, self._rate, self._mlps = draft, rate, SurrogateMlp.all_of(decoder)
        self._gates = [{n: t.float() for n, t in draft.gate.layer(i).params().items()} for i in range(decoder.layers)]
        super().__init__(decoder, videos, options, None, key)
        for scorer, gate in zip(self._list(), self._gates, strict=True):
            scorer.assign(gate, threshold)

    def _made(self, samples: Sequence[Sample], random: torch.Generator) -> list[Scorer]:
        drafts = [self._draft.layers[i].params() if i in self._draft.layers else {} for i in range(len(samples))]
        units = [len(gate["b1"]) for gate in self._gates]
        inputs = zip(samples, units, self._mlps, drafts, strict=True)
        return [DraftScorer(sample, n, random, mlp, draft) for sample, n, mlp, draft in inputs]

    def _rates(self, rate: float) -> list[tuple[nn.ModuleList | nn.ParameterList, float]]:
        # A tensor of zeros stays.
        trained = [p for p in self.scorers.parameters() if p.requires_grad]
        return [(nn.ParameterList([p]), self._rate * float(p.detach().square().mean().sqrt())) for p in trained]

    def _relaxation(self, number: int, index: int) -> Relaxation:
        return Relaxation(NOISE, torch.Generator().manual_seed(self._options.seed * self._options.steps + number))

    def draft(self) -> Draft:
        """Return the draft as it is now."""
        own = [scorer.tensors() for scorer in self.scorers if isinstance(scorer, DraftScorer)]
        return Draft.of({i: parts | gate for i, (parts, gate) in enumerate(zip(own, self._gates, strict=True))})


_PRICED = 2
"""The size whose error gives a layer's price: an eighth."""

CHECKPOINT = "fastcar-draft-checkpoint"
"""Format of the file of an interrupted fit."""

ROWS = 8
"""Most videos that run together, and on which a layer's price is measured."""

FIT_TOKENS = 100_000
"""The first videos, of at most so many tokens, are fitted to; all of them serve the steps of a distillation."""

MEMORY = 2 << 30
"""Most bytes of moments that are kept at a time. Layers beyond them take another pass over the videos."""


def fit_draft(
    source: Artifact | nn.Module,
    videos: Any,
    *,
    share: float = 0.25,
    distill_steps: int = 0,
    distill_replay: float = 0.8,
    distill_rate: float = 0.01,
    seed: int = 0,
    tokens_per_frame: int | None = None,
    prompt: int = 1,
    counted: tuple[int, int] | None = None,
    checkpoint: str | Path | None = None,
    progress: Say | None = None,
) -> Draft:
    """Fit a draft of every layer's MLP, and a gate that predicts what a replay with it costs.

    The decoder's weights stay, and no video needs a label. Calibrate the thresholds afterwards. Deterministic for a
    seed, a PyTorch version and a number of threads. docs/explanation/drafts.md describes the method.

    Args:
        source: a decoder, as `compile` takes it, float32. Or an artifact with a head and a prefill graph: its drafts
            imitate the MLPs in its number format.
        videos: int64 [N, T], prompt included, with three whole frames behind it; not those that judge the result. The
            fit reads the first FIT_TOKENS tokens of them.
        share: weights of all drafts together, as a share of those of all MLPs; the layers share them by what they cost.
        distill_steps: steps that then train the drafts through a decoder, against the dense one. Each takes videos of
            about STEP_TOKENS tokens; none is drawn again before all were. A few videos would be learnt by heart.
        distill_replay: share of the forwards t >= F that replay in these steps.
        distill_rate: peak learning rate (Adam) of a tensor, as a share of its root mean square. Where fitted drafts err
            little, or videos are few, less is better.
        seed: of the pairs that are drawn, of the gate's first weights, and of order and noise in the steps.
        tokens_per_frame: of a decoder; default: its own. prompt: tokens before decoding starts.
        counted: the ids first .. end - 1 of the tokens that the decoder predicts; None: all.
        checkpoint: a file that keeps finished layers; one of its name, `-` and the share keeps the state of the steps.
            An interrupted fit continues from them.
        progress: called with one line after every part. The logger `fastcar_compile` has it too, at INFO.

    Raises:
        InputError: bad arguments or videos. CompileError: the model cannot be captured, or has an MLP of another form.
    """
    values.check_kind("source", source, (Artifact, nn.Module), "an artifact, or a decoder as `compile` takes it")
    share = values.number("share", share)
    if not 0 < share < 1:
        raise InputError(f"share is {share:g}", hint="give a share between 0 and 1, such as 0.25")
    tokens, prompt = values.token_table("the videos", videos), values.whole("prompt", prompt, 1)
    counted, seed = values.token_range("counted", counted), values.whole("seed", seed, 0)
    compiled = isinstance(source, Artifact)
    frame = source.program.config.tokens_per_frame if compiled else frame_of(source, tokens_per_frame)
    if tokens.shape[1] - 1 - prompt < 3 * frame:
        raise too_short(tokens.shape[1], prompt, frame, 3, 1)
    steps, say = values.whole("distill_steps", distill_steps, 0), values.reporter(progress)
    replay, rate = values.number("distill_replay", distill_replay), values.number("distill_rate", distill_rate)
    if not 0 < replay < 1:
        raise InputError(f"distill_replay is {replay:g}", hint="give a share between 0 and 1, such as 0.8")
    if not 0 < rate < 1:
        raise InputError(f"distill_rate is {rate:g}", hint="give a share between 0 and 1, such as 0.01")
    if steps and compiled:
        what = "drafts are distilled through a decoder, and an artifact has no gradients"
        raise InputError(what, hint="give the decoder, or no distill_steps")
    place = None if checkpoint is None else values.path_of("checkpoint", checkpoint)
    some = tokens[: max(1, FIT_TOKENS // tokens.shape[1])]
    decoder = _decoder_of(source, some, frame, prompt)
    check_tokens(tokens, decoder.program.config, prompt, counted)
    some = some[: len(some) // decoder.rows * decoder.rows]
    # The share is no part of the key: candidates of all sizes are kept.
    kept = Kept(place, program_key(decoder.program, {"prompt": prompt, "seed": seed}, some))
    with torch.no_grad():
        draft = Fit(decoder, torch.from_numpy(some), counted, seed, say).run(share, kept)
    if compiled or not steps:
        return draft
    batch = max(1, round(STEP_TOKENS / tokens.shape[1]))
    options = Options("learned", replay, UNITS, steps, batch, seed, start=draft.digest, counted=counted)
    state = None if place is None else place.with_name(f"{place.name}-{share:g}")
    return distilled(source, tokens, draft, options, Setup(frame, prompt, checkpoint=state, progress=say), rate)


def _decoder_of(source: Artifact | nn.Module, videos: np.ndarray, frame: int, prompt: int) -> WholeVideos:
    """Return the decoder that reads the videos int64 [N, T] in equal batches."""
    rows = next(n for n in range(min(ROWS, len(videos)), 0, -1) if len(videos) % n == 0)
    if not isinstance(source, Artifact):
        return RelaxedDecoder(source, rows, videos.shape[1] - 1, frame, prompt)
    decoder = CompiledDecoder(source, rows, videos.shape[1] - 1, prompt)
    # It may have been compiled for more rows. Videos that fill no batch are left out.
    if decoder.rows > len(videos):
        what = f"the artifact reads {count_text(decoder.rows, 'video')} together, and there are {len(videos)}"
        raise InputError(what, hint=f"give at least {decoder.rows}, or the decoder")
    return decoder


class Fit:
    """The fit of a decoder's drafts.

    Args:
        decoder: with as many rows as a batch. videos: int64 [N, T], whole batches. counted, seed: as for `fit_draft`.
    """

    def __init__(
        self, decoder: WholeVideos, videos: Tensor, counted: tuple[int, int] | None, seed: int, say: Say
    ) -> None:
        self._decoder, self._videos, self._counted, self._seed, self._say = decoder, videos, counted, seed, say
        self._mlps = SurrogateMlp.all_of(decoder)
        self._whole = (decoder.length - decoder.prompt) // decoder.frame

    def run(self, share: float, kept: Kept) -> Draft:
        """Return the drafts of a share of the MLPs' weights."""
        sizes = [sizes_of(mlp) for mlp in self._mlps]
        if small := [layer for layer, own in enumerate(sizes) if len(own) < 2]:
            what = f"the MLP of layer {small[0]} is too small for a draft"
            raise CompileError(what, hint="replay plainly: leave the draft out")
        missing = [layer for layer in range(len(self._mlps)) if layer not in kept.layers]
        order = self._important() if missing else []
        for group in self._groups(missing, order):
            for layer, moments in zip(group, self._moments(group, order), strict=True):
                kept.add(layer, candidates(moments, sizes[layer], self._random(layer)))
                self._say(f"layer {layer} is fitted in {len(sizes[layer])} sizes")
        prices = [
            self._price(layer, kept.layers[layer][min(_PRICED, len(sizes[layer]) - 1)])
            for layer in range(len(self._mlps))
        ]
        curves = [
            [
                Point(number, 1 - mlp.share(size), price * float(found["error"]))
                for number, (size, found) in enumerate(zip(own, kept.layers[layer], strict=True))
            ]
            for layer, (mlp, own, price) in enumerate(zip(self._mlps, sizes, prices, strict=True))
        ]
        chosen = [int(point.threshold or 0) for point in allocate(curves, 1 - share)]
        layers = dict[int, dict[str, Tensor]]()
        for layer, (number, price) in enumerate(zip(chosen, prices, strict=True)):
            parts = {name: t for name, t in kept.layers[layer][number].items() if name != "error"}
            # Scores of all layers mean the same: the logarithm of what a replay costs.
            layers[layer] = parts | {"b2": parts["b2"] + math.log(price)}
            size = sizes[layer][number]
            self._say(f"layer {layer}: {size}, {self._mlps[layer].share(size):.1%} of the weights")
        return Draft.of(layers)

    def _random(self, layer: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed * len(self._mlps) + layer)

    def _batches(self) -> Iterator[Tensor]:
        """Yield the inputs of whole batches, int64 [rows, T - 1]."""
        for start in range(0, len(self._videos), self._decoder.rows):
            yield self._videos[start : start + self._decoder.rows, :-1]

    def _observe(self, tokens: Tensor, layers: Sequence[int], see: Callable[[int, Tensor, Tensor], None]) -> None:
        """Run the dense decoder; call see(layer, x, y) with float32 [N, frames, F, H] of whole frames but the first."""
        decoder = self._decoder

        def hook(layer: int) -> Callable[..., Tensor]:
            def record(_query: Tensor, _keys: Tensor, x: Tensor, output: Tensor) -> Tensor:
                flat = (v.reshape(len(tokens), decoder.length, -1).float() for v in (x, output))
                see(layer, *(decoder.framed(v)[:, 1 : self._whole] for v in flat))
                return output

            return record

        decoder.run(tokens, [hook(i) if i in layers else None for i in range(len(self._mlps))])

    def _important(self) -> list[Tensor]:
        """Return each layer's neurons as far as any draft has them: those first whose outputs are largest."""
        sums = [torch.zeros(len(mlp.up)) for mlp in self._mlps]

        def see(layer: int, x: Tensor, _y: Tensor) -> None:
            sums[layer] += self._mlps[layer].neurons(x).square().sum((0, 1, 2))

        # A part of the videos tells which neurons matter.
        for tokens in islice(self._batches(), 0, None, 4):
            self._observe(tokens, range(len(self._mlps)), see)
        sizes = [mlp.down.square().sum(0) for mlp in self._mlps]
        most = [max(size.neurons for size in sizes_of(mlp)) for mlp in self._mlps]
        return [(s * w).topk(n).indices for s, w, n in zip(sums, sizes, most, strict=True)]

    def _groups(self, layers: Sequence[int], order: Sequence[Tensor]) -> Iterator[list[int]]:
        """Yield layers whose moments fit the memory together."""
        group, used = list[int](), 0
        for layer in layers:
            size = 8 * (len(order[layer]) + self._decoder.hidden + 1) ** 2
            if group and used + size > MEMORY:
                yield group
                group, used = [], 0
            group, used = [*group, layer], used + size
        if group:
            yield group

    def _moments(self, layers: Sequence[int], order: Sequence[Tensor]) -> list[Moments]:
        found = {layer: Moments(self._mlps[layer], order[layer], self._random(layer)) for layer in layers}
        batches = len(self._videos) // self._decoder.rows
        wanted = -(-min(PAIRS, PAIR_VALUES // self._decoder.hidden) // batches)
        for number, tokens in enumerate(self._batches(), 1):
            self._observe(tokens, layers, lambda layer, x, y: found[layer].add(x, y, wanted))
            self._say(f"batch {number} of {batches}")
        return list(found.values())

    def _price(self, layer: int, found: dict[str, Tensor]) -> float:
        """Return the divergence from the dense decoder for each unit of a layer's square error."""
        decoder, mlp = self._decoder, self._mlps[layer]
        tokens, first = self._videos[: decoder.rows], decoder.prompt + decoder.frame

        def drafted(_query: Tensor, _keys: Tensor, x: Tensor, output: Tensor) -> Tensor:
            own = surrogate(mlp, found, x.reshape(len(tokens), decoder.length, -1).float())
            flat = output.reshape(own.shape)
            return torch.cat([flat[:, :first], own[:, first:].to(flat.dtype)], 1).reshape(output.shape)

        hooks = [drafted if i == layer else None for i in range(len(self._mlps))]
        now = torch.log_softmax(decoder.run(tokens[:, :-1], hooks), -1)
        divergence = (self._dense.exp() * (self._dense - now)).sum(-1)
        chosen = counts(tokens[:, 1:], self._counted)
        chosen[:, :first] = False
        # A layer that moves nothing on these videos has a price all the same.
        return max(float(divergence[chosen].mean()), 1e-9) / max(float(found["error"]), 1e-20)

    @cached_property
    def _dense(self) -> Tensor:
        """Log-probabilities of the dense decoder on the first batch."""
        return torch.log_softmax(self._decoder.dense(self._videos[: self._decoder.rows, :-1]), -1)


class Kept:
    """The candidates of the layers that are done, in a file, so that an interrupted fit continues.

    Args:
        path: the file; None keeps nothing. key: hash of everything that the fit depends on. A file of another key is
            replaced.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key
        self.layers: dict[int, list[dict[str, Tensor]]] = {}
        if path is None or not path.exists():
            return
        metadata, tensors = read_gate_file(path, CHECKPOINT, "give the checkpoint of an interrupted fit, or a new file")
        for name, tensor in tensors.items() if metadata.get("key") == key else ():
            layer, number, part = name.split("/")
            own = self.layers.setdefault(int(layer), [])
            own += [{} for _ in range(int(number) + 1 - len(own))]
            own[int(number)][part] = tensor

    def add(self, layer: int, found: list[dict[str, Tensor]]) -> None:
        """Keep a layer's candidates. The file is replaced as a whole."""
        self.layers[layer] = found
        if self._path is not None:
            named = {f"{i}/{n}/{p}": t for i, o in self.layers.items() for n, c in enumerate(o) for p, t in c.items()}
            write_gate_file(self._path, named, {"key": self._key}, CHECKPOINT)
