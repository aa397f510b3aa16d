"""Why a node is in the rewritten graph: one sentence per pass, and per operator where a pass makes several."""

from __future__ import annotations

PASS_REASONS = {
    "import": "The capture gives the decode step its position as an input.",
    "normalize-state": "KV caches that the model hides in buffers become named inputs and outputs, and attention reads "
    "the filled part of the cache only.",
    "canonicalize": "What means nothing in inference is removed: asserts, casts to the same type, aliases, dropout.",
    "legalize-linears": "A product with a constant matrix becomes one linear, so that later passes see every weight.",
    "fuse-activations": "An activation that the model writes out in elementary operators becomes one operator.",
    "split-gate-up": "One linear that computes gate and up together becomes the two linears of a gated MLP.",
    "merge-adapters": "A low-rank adapter is merged into the weight of its linear, so it costs nothing afterwards.",
    "unfold-rows": "Rows that the model folds into one axis keep their batch and time axes.",
    "parallel-blocks": "A block whose attention and MLP read the same input is summed in one form: "
    "(entry + attention) + MLP.",
    "find-sites": "Attention and MLP of every layer are recognised from the structure of the graph.",
    "repeat-layers": "Layers of a checkpoint are captured once; this one is a copy of the captured layer.",
    "bfloat16-weights": "Weights of linears are stored in bfloat16: half the bytes of float32.",
    "bfloat16-embedding": "The embedding table holds bfloat16 values and is stored as such: half the bytes.",
    "quantize-w8a8": "Weights become int8 with one scale per output channel, inputs int8 with one scale per row.",
    "quantize-w4a8": "Weights become int4 with one scale per group, inputs int8 with one scale per row.",
    "insert-replay": "The MLP runs where the gate does not replay; else the output of one frame earlier is taken.",
    "skip-rows": "Rows that replay are zero in the compute branch, and kernels do not multiply rows of zeros.",
    "sparse-attention": "Attention reads sinks and a sliding window from a ring cache of constant size.",
    "window-caches": "The model's own window reads the last tokens only, so keys and values are kept in a ring.",
    "quantize-kv-cache": "Keys and values are cached in fewer bytes.",
    "offload-gate": "Score and gate of the layer are one call of the accelerator's TAS unit.",
    "offload-mlp": "The quantised MLP is one call of the accelerator, with the replay decision of every row.",
    "offload-linears": "Linears that share their input are one call of the accelerator.",
}
"""Pass -> why it makes nodes."""

OPERATOR_REASONS = {
    "fastcar.activation_factor": "The factor of the activation, from the table that the accelerator has too.",
    "fastcar.attention": "Attention that reads the filled part of the cache only.",
    "fastcar.window_attention": "Attention that reads the sinks and the last tokens from the ring cache.",
    "fastcar.context_attention": "Cross-attention: keys and values of the context are made once per video, not in this "
    "step.",
    "fastcar.cache_write": "This token's key or value is written into the cache at its position.",
    "fastcar.ring_row": "The row of the ring cache that this position has.",
    "fastcar.ring_write": "This token's key or value is written into the ring cache.",
    "fastcar.limit": "The number of filled rows of the ring cache.",
    "fastcar.slot_read": "The slot of this place of the frame: what was cached one frame earlier.",
    "fastcar.slot_write": "What the layer computed or replayed is kept for the same place of the next frame.",
    "fastcar.gate": "After the first frame, the row replays where the score passes and the limits allow it.",
    "fastcar.tas": "TAS: the similarity of this token's query to the key at the same place of the previous frame.",
    "fastcar.tas_heads": "TAS over chosen query heads.",
    "fastcar.input_delta": "The relative change of the MLP's input since this slot was last computed.",
    "fastcar.output_bound": "A bound on the change of the MLP's output since this slot was last computed.",
    "fastcar.learned_score": "A trained network predicts whether the MLP's output has changed.",
    "fastcar.constant_score": "The same score for every row, for comparison.",
    "fastcar.random_score": "A random score, for comparison.",
    "fastcar.linear_bf16": "A linear with bfloat16 weights.",
    "fastcar.linear_w8a8": "A linear with int8 weights and inputs; the sum is exact in int32.",
    "fastcar.linear_w4a8": "A linear with int4 weights and int8 inputs; the sum is exact in int32.",
    "fastcar.offloaded_gate": "The accelerator computes score, limits and decision.",
    "fastcar.offloaded_linear": "The accelerator computes linears that share their input.",
    "fastcar.offloaded_mlp": "The accelerator computes the MLP of the rows that do not replay.",
    "cond": "The MLP is skipped when every row replays: one branch computes, the other copies the cached output.",
}
"""Operator, without its overload -> what it is for."""

MODEL = "the model"


def reason_key(made_by: str, operator: str, kind: str) -> str:
    """Return the key of a node's reason in `reason_texts`; "" for a node of the model itself."""
    if not made_by:
        return ""
    name = operator.rpartition(".")[0] if operator.startswith("fastcar.") else operator
    return f"{made_by}:{name}" if kind in ("op", "cond") and name in OPERATOR_REASONS else made_by


def reason_texts(keys: set[str]) -> dict[str, str]:
    """Return the text of every key; a pass of another package is named without a reason of its own."""
    return {key: _text(*key.partition(":")[::2]) for key in sorted(keys - {""})}


def _text(made_by: str, operator: str) -> str:
    parts = (OPERATOR_REASONS.get(operator), PASS_REASONS.get(made_by))
    return " ".join(part for part in parts if part) or f"Pass {made_by} made this node."
