"""docs/reference/models.md, written from the list of cases."""

from pathlib import Path

from .cases import CASES

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "models.md"

_HEAD = """\
# Models

The compiler reads the graph of a decoder, not the name of its class. These families are known to compile, because a
test compiles a tiny random model of each (`tests/families/`; `PYTHONPATH=tests python -m families` writes this page).
It decodes a sequence without replay, and with thresholds that replay about half of the MLPs, and compares every logit
and every replay decision with the original model and [the gates' definition](gates.md). Logits differ by at most 2e-5
(keys and values in float16, bfloat16, int8: 5e-4, 4e-3, 1e-2), and all decisions are equal. `make thorough` decodes
every case on `eager`, `cpu`, `onnxruntime` and `hls-csim`, where w8a8 has the bits of `cpu`.

**Sequence lengths.** RoPE tables are those of a sequence of `max_seq_len` tokens. *dynamic* RoPE takes the frequencies
of that length, *longrope* its long factors beyond the original length. Transformers decides anew at every call, so a
shorter sequence may differ: the compiler warns.

**Cross-attention.** Keys and values of a context are computed once per context, in float32 with `w8a8` and `w4a8` too.

## Prompts of different lengths

A decoder that was compiled with [rows](../explanation/rows.md), `compile(rows=1, batch_size=B)`, takes prompts of any
lengths as a list; each row counts its own positions:

```
hidden = session.prefill([prompt, blank])         # float32 [P, H] or int64 [P] each
tokens = session.generate([prompt, blank], 1024, fc.Sampling(guidance=3.0))
```

Otherwise all rows share one position. Padding, masks and `position_ids` are refused; padding in embeddings cannot be
told from a prompt, and such a row decodes wrongly.

## Published repositories

What a user writes around the decoder of a repository (`tests/test_adapt.py`, `tests/families/`):

- FoundationVision/LlamaGen: `model.setup_caches(B, S, torch.float32)`, then `fc.adapt(model, tokens="idx",
  position="input_pos", output=0, cond_idx=None)`.
- microsoft/mineworld: `fc.adapt(model, tokens="input_ids", position="position_ids", rows=True)`.
- NVIDIA/Cosmos, autoregressive: caches and tables become buffers of the module (`tests/families/cosmos.py`).
- TencentARC/SEED-Voken, Open-MAGVIT2 (no test has it): `setup_caches`, then a module over `spatial_blocks` with the
  mask and the rotary table as buffers; `forward(inputs_embeds, cache_position)` gives every block their rows.
- mit-han-lab/vila-u and shawnricecake/fast-car: a subclass of Transformers' `LlamaModel` that reads words and codes,
  and a [depth head](step_protocol.md#a-depth-head) (`examples/vila_u`).

## What compiles

"""

_REFUSED = """
## What is refused

Each of these models is refused with a `CompileError` that says:

"""


def document() -> str:
    """Return the page."""
    right: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for case in CASES:
        model = f"{case.family} (`{case.model}`)"
        if case.refused is None:
            right.setdefault(model, []).append(case.what or "as published")
        else:
            refused.setdefault(case.refused, []).append(f"{model}: {case.what}")
    lines = [f"- {model}: {'; '.join(kinds)}\n" for model, kinds in right.items()]
    return "".join([_HEAD, *lines, _REFUSED, *(f"- {text}: {'; '.join(of)}\n" for text, of in refused.items())])


def write() -> None:
    """Write the page."""
    DOCUMENT.write_text(document(), "utf-8")
