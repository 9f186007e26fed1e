"""Predictions for many GPUs, and the collectives they are based on."""
