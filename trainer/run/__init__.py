"""One training run: its folder, checkpoints, export, stopping, determinism."""
