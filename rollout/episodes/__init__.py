"""Completions of several turns: tools, targets, user rollout functions, and clients of the endpoint."""
