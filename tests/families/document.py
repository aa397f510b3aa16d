"""docs/reference/models.md, written from the list of cases."""

from pathlib import Path

from .case import Case
from .cases import BRANCHES, CASES

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "models.md"

_HEAD = """\
# Models

The compiler reads the graph of a decoder, not the name of its class. These families are known to compile,
because a test compiles a tiny random model of each. `PYTHONPATH=tests python -m families` writes this page from the
list in `tests/families/`, and a test fails where page and list differ.

A test decodes a sequence twice: without replay, and with thresholds that replay about half of the MLPs. It compares
every logit and every replay decision with an independent reference: the original model in eager attention and
without a cache, with hooks on its MLPs that follow [the gates' definition](gates.md). Logits differ by at most 2e-5,
and all decisions are equal. With keys and values in float16, bfloat16 or int8, logits differ by at most 5e-4, 4e-3
or 1e-2: a value near the middle of two stored values may round the other way.

`make thorough` decodes every case on `eager`, `cpu`, `onnxruntime` and `hls-csim`, the C simulation of the
accelerator. There, a w8a8 artifact gives the logits and decisions of `cpu` bit for bit. An ordinary run of the tests
decodes the cases that take every branch of front end and passes that any case takes; the last column has the backends.

## Sequence lengths

RoPE tables are the tables of a sequence of `max_seq_len` tokens. Two kinds depend on that length. *dynamic* RoPE
takes the frequencies of that length. *longrope* takes its long factors where `max_seq_len` is beyond the original
length, else its short factors. Transformers decides anew at every call. So it changes the frequencies within a
sequence that grows beyond the original length, and keeps the keys that it cached before. A compiled decoder equals
Transformers on a whole sequence of `max_seq_len` tokens, and the compiler warns where a shorter one may differ.

## Cross-attention

Keys and values of a context are computed once per context, by a graph of their own. With `w8a8` and `w4a8` the
linears of this graph stay in float32. A decode step pays nothing for it. A layer's two weights take 8 * C * Hkv * D
bytes, for a context of C features and Hkv heads of D, instead of 2 * C * Hkv * D in int8.

## Prompts of different lengths

A decoder that was compiled with [rows](../explanation/rows.md), `compile(rows=1, batch_size=B)`, takes prompts of any
lengths as a list. Each row counts its own positions then, as left-padded prompts with a mask do in Transformers and in
FastCar's own program for VILA-U:

```
hidden = session.prefill([prompt, blank])         # float32 [P, H] or int64 [P] each
tokens = session.generate([prompt, blank], 1024, fc.Sampling(guidance=3.0))
```

Otherwise all rows of a session share one position, and every token of a prompt is read. Padding, masks and
`position_ids` are refused; padding in embeddings cannot be told from a prompt, and a row with such padding decodes
wrongly.

## Published repositories

What a user writes around the decoder of a repository; weights are the repository's own. `tests/test_adapt.py` has the
signatures, `tests/families/` the structures.

- FoundationVision/LlamaGen: `model.setup_caches(B, S, torch.float32)`, then `fc.adapt(model, tokens="idx",
  position="input_pos", output=0, cond_idx=None)`.
- microsoft/mineworld: `fc.adapt(model, tokens="input_ids", position="position_ids", rows=True)`.
- NVIDIA/Cosmos, autoregressive: caches and tables become buffers of the module (`tests/families/cosmos.py`).
- TencentARC/SEED-Voken, Open-MAGVIT2: `setup_caches`, then a module over `spatial_blocks` with the mask and the rotary
  table as buffers; `forward(inputs_embeds, cache_position)` gives every block their rows of `cache_position`. Hidden
  states were within 2.4e-7 of the published class, with random weights (a trial of 27 November 2026; no test has it).
- mit-han-lab/vila-u and FastCar's own shawnricecake/fast-car: a subclass of Transformers' `LlamaModel` that reads
  words and codes, and a [depth head](step_protocol.md#a-depth-head) with a cache (`examples/vila_u`).

## What compiles

| family | model | its structure | backends in every run |
|---|---|---|---|
"""

_REFUSED = """
## What is refused

Each of these models is refused with a `CompileError`. The last column is a part of its text.

| family | model | its structure | text of the refusal |
|---|---|---|---|
"""


def document() -> str:
    """Return the page."""
    right = "".join(_right(case) for case in CASES if case.refused is None)
    refused = "".join(_refused(case) for case in CASES if case.refused is not None)
    return _HEAD + right + (_REFUSED + refused if refused else "")


def write() -> None:
    """Write the page."""
    DOCUMENT.write_text(document(), "utf-8")


def _right(case: Case) -> str:
    backends = "eager, cpu, onnxruntime" if case.full else "eager" if case.name in BRANCHES else "thorough only"
    backends += ", hls-csim" if case.hls else ""
    return f"| {case.family} | `{case.model}` | {case.what} | {backends} |\n"


def _refused(case: Case) -> str:
    return f"| {case.family} | `{case.model}` | {case.what} | {case.refused} |\n"
