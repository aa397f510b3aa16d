"""Teacher-forced likelihood under given thresholds: what it asks of videos, their slices, and what these add up to."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, fx

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.program import DecoderProgram, StateSpec
from fastcar_compile.ir.query import is_op, output_nodes, placeholder_names
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.passes.insert_drafts import spared_of
from fastcar_compile.support.machine import at_once
from fastcar_compile.tune.rule import Attend, Details, Measured, Rules, counts
from fastcar_compile.tune.slices import KEPT_BYTES, Reading, Slice, slices_of

SMALL = 1 << 26
"""Multiplications of a projection below which threads wait for each other longer than they compute."""

A = TypeVar("A")


class Evaluator:
    """Measures threshold vectors on fixed videos.

    The division of the videos into slices depends on their number and on the program, and slices are added up in their
    order. So a measurement does not depend on how many of them are computed at once.

    Args:
        program: with a prefill graph of at most tokens_per_frame tokens. videos: int64 [N, T], prompt included.
        rules: gates and chain limits. With couple_cfg the second half of the videos are the guidance partners of the
            first half, in the same order. prompt: tokens before decoding starts. attend: replaces attention to all
            earlier positions; takes the arguments of `fastcar::attention`. counted: ids first .. end - 1 of the tokens
            that the decoder predicts; others, such as a world model's actions, are given and count in no mean. Their
            forwards replay like any. None: all count.

    Attributes:
        spared: for each layer, the share of its MLP's weights that a replay does not read: all but the draft's.

    Raises:
        InputError: a decoder without head, no usable prefill graph, or videos that do not fit it.
    """

    def __init__(
        self,
        program: DecoderProgram,
        videos: np.ndarray,
        rules: Rules,
        prompt: int = 1,
        attend: Attend | None = None,
        counted: tuple[int, int] | None = None,
    ) -> None:
        self._config, self._rules, self._prompt, self._counted = program.config, rules, prompt, counted
        self._check(program, videos)
        if attend is not None and program.config.ring is not None:
            what = "this decoder was compiled with sparse attention, for which no other attention can stand in"
            raise InputError(what, hint="evaluate it as it is, or a decoder compiled without sparse attention")
        self.spared = spared_of(program, rules.draft)
        rows, valid = slices_of(program.config.batch_size, len(videos), rules.couple_cfg)
        self._videos = torch.from_numpy(videos)
        reading = Reading(program, rules, prompt, attend, counted, videos.shape[1] - 1)
        own = zip(rows, valid, strict=True)
        self._slices = [Slice(reading, self._videos[r], v, KEPT_BYTES // len(rows)) for r, v in own]
        # Where each video is in the order of the slices.
        self._order = np.concatenate(rows)[np.concatenate(valid)].argsort()

    def _check(self, program: DecoderProgram, videos: np.ndarray) -> None:
        config = program.config
        if config.takes_embeddings or config.vocab_size is None:
            raise InputError("a headless decoder has no likelihood to calibrate on", hint="calibrate it with its head")
        if config.context is not None:
            what = "the decoder has cross-attention, and calibration reads videos without their contexts"
            raise InputError(what, hint="choose thresholds by hand: session.set_threshold(…)")
        if program.prefill is None or config.prefill_chunk > config.tokens_per_frame:
            frame = config.tokens_per_frame
            what = f"calibration runs the prefill graph in chunks of at most one frame ({count_text(frame, 'token')})"
            hint = f"compile with a prefill_chunk of 2 to {frame}" if frame > 1 else "choose thresholds by hand"
            raise InputError(what, hint=hint)
        if videos.ndim != 2 or videos.dtype != np.int64 or not len(videos):
            raise InputError(f"the videos are {videos.dtype} {list(videos.shape)}, expected int64 [N, T]")
        if self._rules.couple_cfg and (len(videos) % 2 or config.batch_size % 2):
            what = f"couple_cfg pairs video b with video b + N / 2, but there are {count_text(len(videos), 'video')}"
            what += f" in batches of {config.batch_size}"
            hint = "give the conditional videos, then the unconditional ones, and an even batch_size"
            raise InputError(what, hint=hint)
        least, most = self._prompt + config.tokens_per_frame + 2, config.max_seq_len + 1
        if videos.shape[1] < least:
            raise too_short(videos.shape[1], self._prompt, config.tokens_per_frame, 1, 2)
        if videos.shape[1] > most:
            what = f"videos of {videos.shape[1]} tokens are too long for {count_text(config.max_seq_len, 'position')}"
            raise InputError(what, hint=f"give at most {most} tokens: the last token is predicted but not read")
        check_tokens(videos, config, self._prompt, self._counted)
        if not counts(torch.from_numpy(videos[:, self._prompt + config.tokens_per_frame :]), self._counted).any():
            hint = "give the ids of the tokens that the decoder predicts"
            raise InputError(f"no token after the first frame has an id in {self._counted}", hint=hint)

    def measure(self, thresholds: Sequence[float | None], with_scores: bool = True) -> Measured:
        """Return the NLL, ratios and scores under one threshold per layer; None never replays.

        Args:
            with_scores: False leaves the scores out.
        """
        vector = tuple(thresholds)
        parts = self._answers(lambda part: part.sums(vector, with_scores))
        # Slices differ in how many tokens count, so sums are divided once and no means are averaged.
        nll = sum(part.loss for part in parts) / sum(part.count for part in parts)
        replays, forwards = np.concatenate([part.replays for part in parts], 1)[:, self._order], parts[0].forwards
        units = replays.reshape(len(replays), 2, -1).sum(1) if self._rules.couple_cfg else replays
        each = forwards * replays.shape[1] // units.shape[1]
        return Measured(
            nll if math.isfinite(nll) else math.inf,
            ratios=tuple((replays.sum(1) / (forwards * replays.shape[1])).tolist()),
            scores=tuple(torch.cat(own) for own in zip(*(p.scores for p in parts), strict=True)),
            shares=tuple((units.sum(0) / (each * len(replays))).tolist()),
        )

    def details(self, thresholds: Sequence[float | None]) -> Details:
        """Return losses, predictions and decisions by token, under one threshold per layer."""
        vector = tuple(thresholds)
        parts = zip(*self._answers(lambda part: part.tokens(vector)), strict=True)
        losses, predicted, replayed = (torch.cat(own, axis) for own, axis in zip(parts, (0, 0, 1), strict=True))
        counted = counts(self._videos[:, self._prompt :], self._counted)
        return Details(losses[self._order], predicted[self._order], counted, replayed[:, self._order])

    def _answers(self, ask: Callable[[Slice], A]) -> list[A]:
        """Return the answers of all slices, in order, by as many threads as PyTorch has.

        One thread computes a slice where operators are SMALL, else all of them.
        """
        config, threads = self._config, torch.get_num_threads()
        small = config.batch_size * config.prefill_chunk * config.hidden_size**2 < SMALL
        torch.set_num_threads(1 if small else threads)
        try:
            return at_once(ask, self._slices, threads) if small and threads > 1 else list(map(ask, self._slices))
        finally:
            torch.set_num_threads(threads)


def check_tokens(videos: np.ndarray, config: DecoderConfig, prompt: int, counted: tuple[int, int] | None) -> None:
    """Raise InputError for a token of videos int64 [N, T] that the decoder cannot read, or that counts without a logit.

    Args:
        prompt: tokens that nothing predicts. counted: as of `counts`.
    """
    predicted = counts(torch.from_numpy(videos), counted).numpy()
    predicted[:, :prompt] = False
    known, logits = config.token_ids or 0, config.vocab_size or 0
    limits = np.where(predicted, min(known, logits), known)
    wrong = np.argwhere((videos < 0) | (videos >= limits))
    if len(wrong):
        video, place = wrong[0]
        limit, more = limits[video, place], f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        what = f"token {videos[video, place]} at place {place} of video {video}{more}: not in the vocabulary of {limit}"
        raise InputError(what, hint=f"use ids 0 .. {limit - 1}; videos and places are counted from 0")


def too_short(tokens: int, prompt: int, frame: int, frames: int, more: int) -> InputError:
    """Return the error of videos that hold too few tokens."""
    needed = prompt + frames * frame + more
    parts = f"a prompt of {prompt}, {count_text(frames, 'frame')} of {frame}, and {more} more, as the last token is "
    what = f"videos of {count_text(tokens, 'token')} are too short; {needed} are needed: {parts}predicted but not read"
    return InputError(what, hint=f"give videos of at least {needed} tokens, or another prompt or tokens_per_frame")


def check_dense(nll: float) -> float:
    """Return the dense NLL in nats per token. Raise InputError where no loss can be measured against it."""
    if 0 < nll < math.inf:
        return nll
    why = "its logits rule a token out, or are not numbers" if nll else "it predicts each token with certainty"
    what = f"the dense decoder's NLL on these videos is {nll:g}: {why}"
    raise InputError(what, hint="give other videos, or other ids that count, or look at the decoder's logits")


aten = torch.ops.aten
SIZED = (aten.view, aten.reshape, aten._unsafe_view, aten.expand)
"""Operators whose second argument is a shape. Rows are the outermost axis of what they reshape."""

AGREEMENT = 0.05
"""Greatest difference of logits between both graphs, as a share of the largest: int8 activations may differ."""

NodeValues = dict[fx.Node, Any]


def with_rows(program: DecoderProgram, rows: int) -> DecoderProgram:
    """Return the program with a prefill graph for this many rows, and no decode step to use with it.

    The graph is checked against the given one on the same tokens. Where it does not agree, because it reshapes rows in
    another way than SIZED says, the result is the program itself, which is measured in its own batches.
    """
    config = program.config
    if program.prefill is None or rows <= config.batch_size or config.token_ids is None or config.vocab_size is None:
        return program
    if config.context is not None:
        return program
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.prefill.graph, {}))
    specs = [_widened(spec, config.batch_size, rows) for spec in program.state]
    wide = replace(program, config=replace(config, batch_size=rows), state=specs)
    wide.prefill = fx.GraphModule(program.prefill, graph)
    try:
        with torch.inference_mode():
            return wide if _fit(program, wide) else program
    except (RuntimeError, ValueError, IndexError):  # a shape that does not fit
        return program


def of_prefill(program: DecoderProgram) -> DecoderProgram:
    """Return the program with the sizes of its prefill graph, which reads one video where rows have own positions."""
    config = program.config
    if config.rows is None:
        return program
    specs = [_widened(spec, config.batch_size, 1) for spec in program.state]
    return replace(program, config=replace(config, batch_size=1), state=specs)


def _widened(spec: StateSpec, old: int, rows: int) -> StateSpec:
    return replace(spec, shape=(rows, *spec.shape[1:])) if spec.shape[:1] == (old,) else spec


def _fit(program: DecoderProgram, wide: DecoderProgram) -> bool:
    """Change the shapes in the wide graph to its rows. Return whether both graphs have the same logits then.

    Both run side by side, and a shape changes where the value that it is applied to has grown with the rows.
    """
    old, rows, chunk = program.config.batch_size, wide.config.batch_size, program.config.prefill_chunk
    # The ids vary over rows and positions, so rows that were mixed up give other logits.
    ids = torch.arange(rows * chunk).view(rows, chunk) * 7 % (program.config.token_ids or 1)
    assert program.prefill is not None
    assert wide.prefill is not None
    narrow = _PrefillRun(program, ids[:old]).env
    pairs = dict(zip(wide.prefill.graph.nodes, program.prefill.graph.nodes, strict=True))

    def resize(node: fx.Node, found: NodeValues) -> None:
        source, sizes = node.args[0], node.args[1] if len(node.args) > 1 else None
        if not isinstance(source, fx.Node) or not isinstance(sizes, list | tuple) or not isinstance(sizes[0], int):
            return
        grown = found[source].numel() * old == narrow[pairs[source]].numel() * rows
        # A value of the rows grows with them; a constant does not, and its shape stays.
        if grown and sizes[0] > 0:
            node.args = (source, [sizes[0] * rows // old, *sizes[1:]], *node.args[2:])

    found = _PrefillRun(wide, ids, resize).env
    for node, value in found.items():
        if isinstance(value, Tensor) and node.op != "get_attr":
            node.meta["val"] = torch.empty_like(value, device="meta")
    logits, last = _logits_of(wide, found), _logits_of(program, _PrefillRun(program, ids[rows - old :]).env)
    # The first and the last rows are compared: both ends would show a shape that mixes rows.
    both = ((logits[:old], _logits_of(program, narrow)), (logits[rows - old :], last))
    return all(float((a - b).abs().max()) <= AGREEMENT * float(b.abs().max()) for a, b in both)


class _PrefillRun(fx.Interpreter):
    """A run of a prefill graph at position 0. `before` sees the SIZED nodes first.

    Attributes:
        env: the values of all nodes.
    """

    def __init__(
        self, program: DecoderProgram, ids: Tensor, before: Callable[[fx.Node, NodeValues], None] | None = None
    ) -> None:
        assert program.prefill is not None
        super().__init__(program.prefill, garbage_collect_values=False)
        self._before = before
        given = {spec.name: spec.zeros() for spec in program.state}
        given |= {program.config.input_name: ids, "position": torch.zeros(1, dtype=torch.int64)}
        self.run(*(given[name] for name in placeholder_names(program.prefill)))

    def run_node(self, n: fx.Node) -> Any:
        """Return a node's value."""
        if self._before is not None and is_op(n, *SIZED):
            self._before(n, self.env)
        return super().run_node(n)


def _logits_of(program: DecoderProgram, known: NodeValues) -> Tensor:
    assert program.prefill is not None
    names = dict(zip(program.prefill_outputs, output_nodes(program.prefill.graph), strict=True))
    return known[names["logits"]]
