"""Root-mean-square norms as published decoders spell them: each is known to exact numerics, and computes the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import llama, rewritten
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from fastcar_compile.errors import CompileError

E = 1e-6
Spelling = Callable[[Tensor, Tensor], Tensor]
SPELLINGS: dict[str, Spelling] = {
    "llamagen": lambda w, x: (x.float() * torch.rsqrt(torch.mean(x.float() * x.float(), -1, True) + E)).type_as(x) * w,
    "cosmos": lambda w, x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + E)).type_as(x) * w,
    "square": lambda w, x: x * torch.rsqrt(torch.square(x).mean(-1, keepdim=True) + E) * w,
    "quotient": lambda w, x: w * (x / torch.sqrt((x**2).mean(-1, keepdim=True) + E)),
    "power": lambda w, x: x * (x.pow(2).mean(-1, keepdim=True) + E) ** -0.5 * w,
    "one over": lambda w, x: x * (1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + E)) * w,
    "reciprocal": lambda w, x: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + E).reciprocal() * w,
    "weight first": lambda w, x: (x * w) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + E),
    "inverse times weight": lambda w, x: x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + E) * w),
    "type of the mean": lambda w, x: x * torch.rsqrt(x.pow(2).mean(-1, True, dtype=torch.float32) + E) * w,
    "rms_norm": lambda w, x: F.rms_norm(x, x.shape[-1:], w, E),
    "rms_norm, no epsilon": lambda w, x: F.rms_norm(x, x.shape[-1:], w),
    "sum": lambda w, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + E) * w,
    "sum by one over": lambda w, x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) * (1 / x.shape[-1]) + E) * w,
    "axis put back": lambda w, x: x * torch.rsqrt(x.pow(2).mean(-1).unsqueeze(-1) + E) * w,
    "weight of three axes": lambda w, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + E) * w.view(1, 1, -1),
    "no weight": lambda _, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + E),
    "rms_norm, no weight": lambda _, x: F.rms_norm(x, x.shape[-1:], None, E),
    "gemma": lambda w, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + E) * (1.0 + w.float()),
}
SPELLINGS |= {
    "normalize": lambda w, x: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * w,
    "normalize, weight first": lambda w, x: w * F.normalize(x, dim=-1) * x.shape[-1] ** 0.5,
    "norm over width": lambda w, x: x / (x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5) * w,
    "norm over width, limited": lambda w, x: (
        x / (torch.norm(x, dim=-1, keepdim=True) * x.shape[-1] ** -0.5).clamp(min=1e-8) * w
    ),
    "linalg norm": lambda w, x: x / torch.linalg.norm(x, dim=-1, keepdim=True) * x.shape[-1] ** 0.5 * w,
}
LAYER_NORMS: dict[str, Spelling] = {
    "written out": lambda w, x: (
        w * ((x - x.mean(-1, True)) / torch.sqrt((x - x.mean(-1, True)).pow(2).mean(-1, True) + E)) + w
    ),
    "var": lambda w, x: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + E) * w + w,
    "var, no bias": lambda w, x: (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + E) ** 0.5 * w,
    "var_mean": lambda w, x: by_var_mean(x) * w + w.view(1, 1, -1),
    "no weight": lambda _, x: by_var_mean(x),
}
OTHERS: dict[str, Spelling] = {
    "normalize alone": lambda w, x: F.normalize(x, dim=-1) * w,
    "norm of another axis": lambda w, x: x / x.norm(dim=-2, keepdim=True) * x.shape[-1] ** 0.5 * w,
    "norm of powers of one": lambda w, x: x / x.norm(p=1, dim=-1, keepdim=True) * x.shape[-1] ** 0.5 * w,
    "variance of a sample": lambda w, x: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + E) * w,
    "bfloat16 inside": lambda w, x: w * (x * torch.rsqrt(x.bfloat16().pow(2).mean(-1, True).float() + E)),
    "sum over another number": lambda w, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 63 + E) * w,
    "axis lost": lambda w, x: x * torch.rsqrt(x.pow(2).mean(-1) + E)[..., 0, None, None] * w,
    "another power": lambda w, x: x * (x.pow(2).mean(-1, keepdim=True) + E) ** -0.25 * w,
    "mean of another": lambda w, x: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + E) * w,
    "x twice": lambda w, x: x * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + E) * w,
    "layer norm": lambda w, x: (
        (x - x.mean(-1, True)) * torch.rsqrt((x - x.mean(-1, True)).pow(2).mean(-1, True) + E) * w
    ),
}


def by_var_mean(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + E)


OPTIONS: dict[str, Any] = {"max_seq_len": 17, "tokens_per_frame": 8}
EXACT: dict[str, Any] = {**OPTIONS, "quant": "w8a8", "kv": "int8", "numerics": "exact"}


def some(spellings: dict[str, Spelling], *first: str) -> list[Any]:
    """All of them; those that are not named are for `make thorough`."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.thorough) for name in spellings]


class Spelled(nn.Module):
    def __init__(self, weight: Tensor, norm: Spelling) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(weight), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.weight, x)


def model(norm: Spelling) -> nn.Module:
    made = llama(head_dim=32, num_hidden_layers=1)
    torch.manual_seed(3)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, Spelled(torch.rand(64) + 0.5, norm))
    return made


def prefill(made: nn.Module) -> GraphModule:
    """The rewritten prefill graph, after its logits were compared with the model's."""
    ids, graph = torch.arange(12)[None] % 17, rewritten(made, 12, **OPTIONS).prefill
    assert graph is not None
    given = [torch.zeros_like(n.meta["val"], device="cpu") for n in graph.graph.find_nodes(op="placeholder")]
    with torch.inference_mode():
        values = [torch.zeros(tuple(g.shape), dtype=g.dtype) for g in given]
        logits = graph(ids, *values[1:])[0]
        torch.testing.assert_close(logits, made(ids).logits, atol=2e-5, rtol=0)
    return graph


@pytest.mark.parametrize("name", some(LAYER_NORMS, "var_mean"))
def test_a_written_layer_norm_is_one_operator(name: str) -> None:
    graph = prefill(model(LAYER_NORMS[name])).graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.layer_norm.default)) == 3
    assert not graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)
    exact = rewritten(model(LAYER_NORMS[name]), 4, **EXACT).graph_module.graph
    assert len(exact.find_nodes(op="call_function", target=torch.ops.fastcar.exact_layer_norm.default)) == 3


@pytest.mark.parametrize("name", some(SPELLINGS, "llamagen", "normalize"))
def test_a_spelling_is_known_and_computes_the_same(name: str) -> None:
    made = model(SPELLINGS[name])
    prefill(made)
    exact = rewritten(made, 4, **EXACT).graph_module.graph
    assert len(exact.find_nodes(op="call_function", target=torch.ops.fastcar.exact_norm.default)) == 3


@pytest.mark.parametrize("name", some(OTHERS, "x twice"))
def test_what_is_no_such_norm_stays(name: str) -> None:
    with pytest.raises(CompileError, match="numerics='exact'"):
        rewritten(model(OTHERS[name]), 4, **EXACT)
