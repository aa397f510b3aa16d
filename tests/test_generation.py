"""A session behind Transformers' `generate`, against the original model's own `generate`."""

from typing import Any

import pytest
import torch
from decoders import headless_llama
from families.case import LENGTH, Case, transformer
from families.runs import rewritten
from runtime.test_sampling import over
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import fastcar_compile as fc
from fastcar_compile.errors import InputError

PROMPT = torch.tensor([[4, 9, 2], [7, 7, 1]])
NEW = 12
BUILD = transformer(LlamaForCausalLM, LlamaConfig, eos_token_id=None, pad_token_id=None, bos_token_id=None)


@pytest.fixture(scope="module")
def decoder() -> fc.TransformersDecoder:
    """Two rows, dense."""
    session = rewritten(Case("llama", "Llama", "", BUILD))
    session.set_threshold(None)
    return fc.TransformersDecoder(session)


@pytest.fixture(scope="module")
def model() -> Any:
    """The original."""
    return BUILD()


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.7},
        {"do_sample": True, "temperature": 1.4, "top_k": 9, "top_p": 0.9},
        {"do_sample": True, "top_k": 0, "min_p": 0.02},
    ],
)
def test_tokens_are_those_of_the_original(decoder: fc.TransformersDecoder, model: Any, options: dict[str, Any]) -> None:
    set_seed(3)
    expected = model.generate(PROMPT, max_new_tokens=NEW, **options)
    set_seed(3)
    assert torch.equal(decoder.generate(PROMPT, max_new_tokens=NEW, **options), expected)


def test_the_session_generates_the_same_greedy_tokens(decoder: fc.TransformersDecoder) -> None:
    expected = decoder.generate(PROMPT, max_new_tokens=NEW, do_sample=False)[:, PROMPT.shape[1] :]
    seen: list[Tensor] = []
    found = decoder.session.generate(PROMPT, NEW, on_token=seen.append)
    assert torch.equal(found, expected)
    assert torch.equal(torch.stack(seen, 1), expected)
    assert torch.equal(decoder.session.generate(PROMPT, NEW, fc.Sampling(temperature=0)), expected)


def test_replay_is_the_sessions(decoder: fc.TransformersDecoder) -> None:
    decoder.session.set_threshold(0.0)
    try:
        found = decoder.generate(PROMPT, max_new_tokens=LENGTH - PROMPT.shape[1], do_sample=False)
        ratio = decoder.session.stats.replay_ratio
        again = decoder.session.generate(PROMPT, LENGTH - PROMPT.shape[1])
    finally:
        decoder.session.set_threshold(None)
    assert ratio > 0
    assert torch.equal(found[:, PROMPT.shape[1] :], again)


@pytest.mark.parametrize("sampled", [False, True])
def test_guidance_is_that_of_the_original(decoder: fc.TransformersDecoder, model: Any, sampled: bool) -> None:
    """One row and its unconditional one are the session's two rows."""
    options: dict[str, Any] = {"guidance_scale": 2.5, "max_new_tokens": NEW, "do_sample": sampled, "top_k": 9}
    if not sampled:
        del options["top_k"]
    negative = torch.tensor([[11, 0, 3]])
    set_seed(4)
    expected = model.generate(PROMPT[:1], negative_prompt_ids=negative, **options)
    set_seed(4)
    assert torch.equal(decoder.generate(PROMPT[:1], negative_prompt_ids=negative, **options), expected)
    if not sampled:
        pair = torch.cat([PROMPT[:1], negative])
        found = decoder.session.generate(pair, NEW, fc.Sampling(temperature=0, guidance=2.5))
        assert torch.equal(found, expected[:, PROMPT.shape[1] :].repeat(2, 1))
    assert len(decoder.generate(PROMPT, max_new_tokens=2, do_sample=False)) == 2, "guidance ends with its call"


def test_a_row_that_ends_is_padded(decoder: fc.TransformersDecoder, model: Any) -> None:
    stop = int(model.generate(PROMPT, max_new_tokens=4, do_sample=False)[0, 4])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    expected = model.generate(PROMPT, **options)
    assert torch.equal(decoder.generate(PROMPT, **options), expected)
    assert (expected == 0).any()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 3}, "beam search is not possible with a compiled session"),
    ({"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, "no padding"),
    ({"max_new_tokens": LENGTH}, f"do not fit max_seq_len {LENGTH}"),
    ({"num_return_sequences": 2, "do_sample": True}, "the call has 4 rows, the artifact decodes 2"),
    ({"guidance_scale": 2.0}, "the rows of a session share their position"),
    ({"negative_prompt_ids": PROMPT}, "without guidance"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "neither attentions nor hidden states"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_a_session_cannot_do_is_refused_by_name(
    decoder: fc.TransformersDecoder, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InputError) as refusal:
        decoder.generate(PROMPT, **{"max_new_tokens": 4, "do_sample": False, **options})
    assert text in str(refusal.value)


def test_a_decoder_without_head_and_embeddings_generates_nothing() -> None:
    model: Any = headless_llama()
    model.set_input_embeddings(None)
    session = rewritten(Case("llama", "Llama", "", lambda: model, headless=True))
    with pytest.raises(InputError, match="a headless decoder has no tokens to generate"):
        fc.TransformersDecoder(session)


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_logits_that_are_not_finite_are_taken_as_a_session_takes_them(scale: float) -> None:
    inf = float("inf")
    options: dict[str, Any] = {"do_sample": True, "guidance_scale": scale, "max_new_tokens": 4}
    prompt = PROMPT[:1] if scale != 1 else PROMPT
    prompt = prompt % 5
    options |= {"negative_prompt_ids": prompt} if scale != 1 else {}
    masked = {(row, at): [-inf, -inf, 1.0, -inf, -inf] for row in range(2) for at in range(8)}
    infinite = {place: [0.0, 1.0, inf, 2.0, 3.0] for place in masked}
    for logits in (masked, infinite):
        found = fc.TransformersDecoder(over(logits)).generate(prompt, **options)
        assert found[:, 3:].unique().tolist() == [2]
    for value, text in ((float("nan"), "NaN"), (-inf, "-inf")):
        decoder = fc.TransformersDecoder(over(masked | {(0, 4): [value] * 5}))
        with pytest.raises(InputError, match=f"row 0, position 4: .*{text}"):
            decoder.generate(prompt, **options)
