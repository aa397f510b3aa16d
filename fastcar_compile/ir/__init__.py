"""The program that passes rewrite: graphs, state, layers, weights, operators."""
