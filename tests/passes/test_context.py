"""normalize-state and find-sites on cross-attention: what follows from the context alone leaves the step."""

import copy
from functools import cache

import agreement
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastcar_compile.errors import CompileError, InputError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.types import ContextInput, DecoderConfig
from fastcar_compile.passes.normalize_state import NormalizeState
from fastcar_compile.passes.pipeline import analysis_pipeline
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.session import Session

from .tiny import BATCH, CHUNK, FRAME, ROWS, VOCAB, WIDTH, TinyBlock, token_ids

LENGTH, SIZE = 3, 6
MASKED = ContextInput(length=LENGTH, size=SIZE, masked=True)
fastcar = torch.ops.fastcar


class CrossBlock(TinyBlock):
    """Self-attention, cross-attention with a key head of its own for all query heads, MLP."""

    def __init__(self, batch: int = BATCH) -> None:
        super().__init__(batch)
        self.norm, self.q = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v, self.o = nn.Linear(SIZE, 4), nn.Linear(SIZE, 4), nn.Linear(WIDTH, WIDTH)

    def step(self, h: Tensor, position: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        h = h + self.out(self.attend(self.norm_1(h), position))
        h = h + self.o(self.cross(self.norm(h), position, context, mask))
        return h + self.mlp(self.norm_2(h))

    def cross(self, x: Tensor, position: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        keys, values = (linear(context)[:, None].expand(-1, 2, -1, -1) for linear in (self.k, self.v))
        return self.attended(q, keys, values, self.seen(mask, position)).transpose(1, 2).flatten(2)

    def attended(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)

    def seen(self, mask: Tensor, position: Tensor) -> Tensor:
        return mask[:, None, None].expand(-1, -1, len(position), -1)


class Capped(CrossBlock):
    """Written out, with a soft-cap and an additive mask."""

    def cross(self, x: Tensor, position: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        keys, values = (linear(context)[:, None].repeat(1, 2, 1, 1) for linear in (self.k, self.v))
        logits = 2.0 * torch.tanh(q @ keys.transpose(2, 3) * 0.7 / 2.0)
        added = torch.zeros(len(mask), LENGTH).masked_fill(~mask, -torch.inf)
        return (torch.softmax(logits + added[:, None, None], -1) @ values).transpose(1, 2).flatten(2)


class TimedMask(CrossBlock):
    """The first token sees less of the context."""

    def seen(self, mask: Tensor, position: Tensor) -> Tensor:
        return mask[:, None, None] & (position[:, None] + 1 > torch.arange(LENGTH))


class CausalBlock(CrossBlock):
    """A token sees no more of the context than it has tokens in front of it in its call."""

    def attended(self, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True)


class FirstBlock(CrossBlock):
    """Cross-attention stands before self-attention."""

    def step(self, h: Tensor, position: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        h = h + self.o(self.cross(self.norm(h), position, context, mask))
        h = h + self.out(self.attend(self.norm_1(h), position))
        return h + self.mlp(self.norm_2(h))


class Modulated(CrossBlock):
    """The context also scales the MLP's input."""

    def step(self, h: Tensor, position: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        return super().step(h, position, context, mask) * context.mean((1, 2))[:, None, None]


class CrossDecoder(nn.Module):
    """A decoder of the step protocol with a context."""

    max_seq_len = ROWS
    context_length, context_size = LENGTH, SIZE

    def __init__(self, *blocks: type[CrossBlock]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList([block() for block in blocks])

    def forward(self, input_ids: Tensor, cache_position: Tensor, context: Tensor, context_mask: Tensor) -> Tensor:
        h = self.embed(input_ids)
        for block in self.blocks:
            assert isinstance(block, CrossBlock)
            h = block.step(h, cache_position, context, context_mask)
        return self.head(h)


def crossed(*blocks: type[CrossBlock]) -> DecoderProgram:
    return copy.deepcopy(_crossed(blocks))


@cache
def _crossed(blocks: tuple[type[CrossBlock], ...]) -> DecoderProgram:
    return captured(CrossDecoder(*blocks))


def captured(model: nn.Module) -> DecoderProgram:
    return capture(model.eval(), batch_size=BATCH, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=CHUNK)


def given() -> tuple[Tensor, Tensor]:
    context = torch.randn(BATCH, LENGTH, SIZE, generator=torch.Generator().manual_seed(3))
    return context, torch.tensor([[True, True, True], [True, True, False]])


def session_of(program: DecoderProgram) -> Session:
    return Session(EagerStepper(program), program.config, [None] * program.config.num_layers)


def decoded(session: Session) -> Tensor:
    """Logits [B, T, V] of the prompt's last token and of all others."""
    return agreement.decode(session, torch.from_numpy(token_ids()), 3)


def test_the_context_becomes_state_that_the_graphs_only_read() -> None:
    program = crossed(CrossBlock, Capped)
    NormalizeState().apply(program)
    made = [(s.name, s.shape) for s in program.state if s.reads_only]
    assert made == [
        ("context_key_0", (BATCH, 1, LENGTH, 4)),
        ("context_value_0", (BATCH, 1, LENGTH, 4)),
        ("context_mask_0", (BATCH, 1, 1, LENGTH)),
        ("context_key_1", (BATCH, 1, LENGTH, 4)),
        ("context_value_1", (BATCH, 1, LENGTH, 4)),
        ("context_mask_1", (BATCH, 1, 1, LENGTH)),
    ]
    names = [name for name, _ in made]
    assert program.context_outputs == names
    assert set(names) <= set(program.inputs)
    assert not {"context", "context_mask"} & set(program.inputs)
    assert not set(names) & {*program.outputs, *program.prefill_outputs}
    assert program.config.context == MASKED


@pytest.mark.parametrize("block", [CrossBlock, Capped])
def test_logits_are_those_of_the_module(block: type[CrossBlock]) -> None:
    program = run_pipeline(crossed(block, block), analysis_pipeline())
    model, ids = CrossDecoder(block, block).eval(), torch.from_numpy(token_ids())
    with torch.no_grad():
        expected = torch.stack([model(ids[:, t : t + 1], torch.tensor([t]), *given())[:, 0] for t in range(ROWS)], 1)
    session = session_of(program)
    session.set_context(*given())
    torch.testing.assert_close(decoded(session), expected[:, 2:], atol=1e-6, rtol=0)
    session.reset()
    torch.testing.assert_close(decoded(session), expected[:, 2:], atol=1e-6, rtol=0)  # reset keeps the context


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (TimedMask, "layer 0: the mask of cross-attention is not one of the context alone, [B, 1, 1, L]"),
        (CausalBlock, "layer 0: attention with is_causal, whose mask begins at the first key at every position"),
        (FirstBlock, "cross-attention before the first self-attention"),
        (Modulated, "the context is read by more than the keys, values and masks of cross-attention"),
    ],
)
def test_what_is_refused(block: type[CrossBlock], text: str) -> None:
    with pytest.raises(CompileError, match="hint:  ") as error:
        NormalizeState().apply(crossed(block))
    assert text in str(error.value)


def test_a_module_says_the_sizes_of_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CrossDecoder, "context_size")
    with pytest.raises(CompileError, match="takes a context, but CrossDecoder does not say its context_size"):
        captured(CrossDecoder(CrossBlock))


def test_an_exported_step_has_them_already() -> None:
    context, mask = given()
    inputs = {"input_ids": torch.zeros(BATCH, 1, dtype=torch.int64), "cache_position": torch.arange(1)}
    with torch.no_grad():
        step = torch.export.export(
            CrossDecoder(CrossBlock).eval(), (), {**inputs, "context": context, "context_mask": mask}, strict=False
        )
    program = capture(step, batch_size=BATCH, max_seq_len=ROWS, tokens_per_frame=FRAME, prefill_chunk=1)
    assert program.config.context == MASKED


@pytest.fixture
def session() -> Session:
    return session_of(run_pipeline(crossed(CrossBlock), analysis_pipeline()))


def test_when_a_context_is_set(session: Session) -> None:
    """Before the prompt, and where there is cross-attention."""
    ids = token_ids()
    for call in (
        lambda: session.prefill(ids[:, :2]),
        lambda: session.step(ids[:, 0]),
        lambda: session.generate(ids, 1),
    ):
        with pytest.raises(InputError, match=r"its context is not set\n.*float32 \[2, 3, 6\] before the prompt"):
            call()
    session.set_context(*given())
    session.prefill(ids[:, :2])
    with pytest.raises(InputError, match="the session already holds tokens"):
        session.set_context(*given())
    config = DecoderConfig(2, 8, 2, 1, 8, 5, takes_embeddings=False, prefill_chunk=0)
    plain = Session(session._run.stepper, config, [None])
    with pytest.raises(InputError, match="the decoder has no cross-attention"):
        plain.set_context(*given())


CONTEXT = given()[0].numpy()


@pytest.mark.parametrize(
    ("context", "mask", "text"),
    [
        (CONTEXT.astype(np.float64), None, "the context is float64, expected float32"),
        (CONTEXT[:1], None, r"the context has shape \[1, 3, 6\], expected \[2, at most 3, 6\]"),
        (CONTEXT[0], None, r"the context has shape \[3, 6\], expected \[2, at most 3, 6\]"),
        (np.repeat(CONTEXT, 2, 1), None, r"the context has shape \[2, 6, 6\], expected \[2, at most 3, 6\]"),
        (CONTEXT, np.ones((2, 3), np.int64), "the context mask is int64, expected bool"),
        (CONTEXT, np.ones((2, 2), np.bool_), r"the context mask has shape \[2, 2\], expected \[2, 3\]"),
        (CONTEXT, np.array([[True] * 3, [False] * 3]), "the context mask hides every token of row 1"),
    ],
)
def test_another_context_is_refused(session: Session, context: np.ndarray, mask: np.ndarray | None, text: str) -> None:
    with pytest.raises(InputError, match=text):
        session.set_context(context, mask)


def test_a_shorter_context_is_padded_and_its_padding_hidden(session: Session) -> None:
    context, _ = given()
    session.set_context(context, torch.tensor([[True, True, False]] * 2))
    expected = decoded(session)
    session.reset()
    session.set_context(context[:, :2])
    assert torch.equal(decoded(session), expected)


def test_rows_and_videos_have_contexts_of_their_own(session: Session) -> None:
    context, mask = given()
    session.set_context(context, mask)
    first = decoded(session)
    session.reset()
    session.set_context(torch.cat([context[:1], -context[1:]]), mask)
    second = decoded(session)
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1], atol=1e-3)
