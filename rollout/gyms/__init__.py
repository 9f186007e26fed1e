"""Environments of other projects: OpenEnv, NeMo Gym, reasoning-gym. Imported only when a run uses them."""
