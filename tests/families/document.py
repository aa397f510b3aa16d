"""docs/reference/models.md, written from the list of cases."""

import re
from pathlib import Path

from .cases import CASES

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "models.md"

_HEAD = """\
# Models

The compiler reads the graph of a decoder, not the name of its class. These families compile: a test compares every
logit and replay decision of a tiny random model of each with the original model and [the gates' definition](gates.md)
(`PYTHONPATH=tests python -m families` writes this page). Logits differ by at most 2e-5 (keys and values in float16,
bfloat16, int8: 5e-4, 4e-3, 1e-2), and all decisions are equal.

*dynamic* and *longrope* RoPE take the frequencies of a sequence of `max_seq_len` tokens. Transformers decides anew at
every call, so a shorter sequence may differ: the compiler warns. Keys and values of a context are computed in float32
with `w8a8` and `w4a8` too.

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

What to write around the decoder of a repository:

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
        known = re.sub(r"[^a-z0-9]", "", case.family.lower()) in case.model.lower()
        model = f"`{case.model}`" if known else f"{case.family} (`{case.model}`)"
        if case.refused is None:
            right.setdefault(model, []).append(case.what or "as published")
        else:
            refused.setdefault(case.refused, []).append(f"{model}: {case.what}")
    lines = [f"- {model}: {'; '.join(kinds)}\n" for model, kinds in right.items()]
    return "".join([_HEAD, *lines, _REFUSED, *(f"- {text}: {'; '.join(of)}\n" for text, of in refused.items())])


def write() -> None:
    """Write the page."""
    DOCUMENT.write_text(document(), "utf-8")
