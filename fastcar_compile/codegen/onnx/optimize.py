"""onnxscript's optimiser with rewrite rules that look at the kind of a node first.

Its own rules compare whole patterns at every node, nearly all of which are for other operators. That took a third of
the time of an export. The passes and what they make are the same.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import rewriter
from onnxscript.optimizer import _constant_folding
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet


def optimize(model: ir.Model) -> None:
    """Run the passes of `onnxscript.optimizer.optimize_ir`, in its order."""
    again = (
        _constant_folding.FoldConstantsPass(
            shape_inference=True,
            input_size_limit=_constant_folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
            output_size_limit=_constant_folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
        ),
        rewriter.RewritePass(_rules()),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
    )
    ir.passes.Sequential(
        # The functions of onnxscript are inlined first; folding and rewriting look at single operators.
        common.InlinePass(),
        ir.passes.PassManager(again, steps=2, early_stop=True),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


@cache
def _rules() -> RewriteRuleSet:
    return RewriteRuleSet([_quick(rule) for rule in rewriter._DEFAULT_REWRITE_RULES])


def _quick(rule: RewriteRule) -> RewriteRule:
    """Return a rule that compares its pattern only at nodes of the operator that the pattern begins with."""
    # A copy, because the rules belong to onnxscript and serve other exports in this process.
    quick: Any = copy.copy(rule)
    kind = rule._target_pattern.output_nodes[0].op

    def try_rewrite(model: ir.Model, place: ir.Graph | ir.Function, node: ir.Node, **options: Any) -> Any:
        return rule.try_rewrite(model, place, node, **options) if kind.matches(node.op_type) else None

    quick.try_rewrite = try_rewrite
    return quick
