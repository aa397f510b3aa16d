"""Drafts trained end to end through the decoder: with them it learns to predict what the dense decoder does.

The steps are those of a gate's training (`train.py`), with drafts in the place of gates. The decoder is frozen, and so
are the gates, which were fitted to predict errors: on the game decoder gates that were trained with their drafts spared
less.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fastcar_compile.config import ReplayConfig
from fastcar_compile.gates.draft import Draft
from fastcar_compile.support import values
from fastcar_compile.tune.calibrate import Setting, program_key, program_of, search_of
from fastcar_compile.tune.training.relaxed import LearnedScorer, Relaxation, RelaxedDecoder, Sample, Scorer
from fastcar_compile.tune.training.surrogate import SurrogateMlp, surrogate
from fastcar_compile.tune.training.train import Options, Setup, Training
from fastcar_compile.tune.training.trained import TrainingState

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
