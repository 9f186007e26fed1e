"""Kernels of the in-process sampler: one token per row, in a CUDA graph."""
