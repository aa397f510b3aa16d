"""Two artifacts, or two graph files, side by side: options, graphs, weights and predicted figures."""

from fastcar_compile.comparison.compare import diff
from fastcar_compile.comparison.report import Comparison, FieldChange, GraphComparison, NodeChange, TensorChange

__all__ = ["Comparison", "FieldChange", "GraphComparison", "NodeChange", "TensorChange", "diff"]
