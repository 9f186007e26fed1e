"""Benchmarks; their rows are in bench/results/."""

import strop_names

strop_names.take()
