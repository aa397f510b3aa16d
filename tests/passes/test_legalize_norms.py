"""Root-mean-square norms as published decoders spell them: each is known to exact numerics, and computes the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.passes.canonicalize import Canonicalize
from fastcar_compile.passes.legalize_norms import LegalizeNorms
from fastcar_compile.passes.patterns.norms import rms_norm

from .laws import check_left_alone

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
}


def by_var_mean(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + E)


class Spelled(nn.Module):
    def __init__(self, norm: Spelling) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.rand(64) + 0.5, requires_grad=False), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.weight, x)


def legalized(norm: Spelling) -> tuple[set[str], bool, bool]:
    """Operators after the pass, whether it changed some, and whether the last one is a known norm."""
    made, x = Spelled(norm), torch.randn(2, 5, 64)
    module = torch.export.export(made, (x,)).module(check_guards=False)
    assert isinstance(module, GraphModule)
    program = DecoderProgram(module, None, DecoderConfig(2, 9, 3, 0, 64, None, True, 0), outputs=["logits"])
    Canonicalize().apply(program)
    changed = LegalizeNorms().apply(program)
    check_left_alone(program, LegalizeNorms())
    module.graph.eliminate_dead_code()
    module.recompile()
    torch.testing.assert_close(module(x), made(x), atol=1e-5, rtol=1e-5)
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    return {n.target.overloadpacket.__name__ for n in calls}, changed, rms_norm(calls[-1]) is not None


@pytest.mark.parametrize("name", LAYER_NORMS)
def test_a_written_layer_norm_is_one_operator(name: str) -> None:
    assert legalized(LAYER_NORMS[name]) == ({"layer_norm"}, True, False)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_known_and_computes_the_same(name: str) -> None:
    operators, _, known = legalized(SPELLINGS[name])
    assert (operators, known) == ({"pow", "mean", "add", "rsqrt", "mul"}, True)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_norm_stays(name: str) -> None:
    assert legalized(OTHERS[name])[1:] == (False, False)
