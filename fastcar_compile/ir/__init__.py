"""The program that passes rewrite: graphs, state, layers, weights. Importing it registers the `fastcar::` operators."""

import fastcar_compile.ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (it registers the operators)
