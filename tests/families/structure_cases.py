"""Decoders whose blocks are written in another way: in-place sums, `x @ w.T`, folded rows, adapters."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import FalconConfig, FalconForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from .case import MLP_WIDTH, Case, randomize, transformer

_FALCON = {"intermediate_size": ..., "num_key_value_heads": ..., "ffn_hidden_size": MLP_WIDTH}
_OPT = {"intermediate_size": ..., "num_key_value_heads": ..., "ffn_dim": MLP_WIDTH, "word_embed_proj_dim": 32}


class LoraLinear(nn.Module):
    """A linear with a low-rank adapter in the layout of peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling, rank = base, 0.5, 4
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(0.1)})

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        x = x.to(self.base_layer.weight.dtype)
        adapted = self.lora_B["default"](self.lora_A["default"](self.lora_dropout["default"](x)))
        return result + adapted * self.scaling


class Lora:
    """A Llama with adapters on the MLPs' linears and on queries."""

    kind = LlamaForCausalLM

    def __call__(self) -> nn.Module:
        """Return the model; adapters are random too."""
        model = transformer(LlamaForCausalLM, LlamaConfig)()
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and (".mlp." in name or name.endswith("q_proj")):
                path, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(path), leaf, LoraLinear(module))
        return randomize(model)


STRUCTURES = [
    Case(
        "falcon-new",
        "Falcon",
        "new architecture: two norms, groups of key/value heads, `x @ w.T`, in-place sums",
        transformer(FalconForCausalLM, FalconConfig, **_FALCON, new_decoder_architecture=True, num_kv_heads=2),
        hls=True,
    ),
    Case(
        "falcon-7b",
        "Falcon",
        "attention and MLP in parallel on one norm, one key/value head",
        transformer(FalconForCausalLM, FalconConfig, **_FALCON, multi_query=True, parallel_attn=True),
    ),
    Case(
        "falcon-rw",
        "Falcon",
        "attention, then MLP; biases",
        transformer(FalconForCausalLM, FalconConfig, **_FALCON, multi_query=False, parallel_attn=False, bias=True),
    ),
    Case(
        "opt",
        "OPT",
        "rows folded around the MLP, ReLU, learned positions with an offset",
        transformer(OPTForCausalLM, OPTConfig, **_OPT),
        mlp=(r".*layers\.(\d+)\.fc1", r".*layers\.(\d+)\.fc2"),
        hls=True,
    ),
    Case("llama-lora", "Llama", "LoRA adapters on attention and MLP, merged", Lora()),
]
