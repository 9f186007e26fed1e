"""Benchmarks; their rows lie in bench/results/."""

import strop_names

strop_names.take()
