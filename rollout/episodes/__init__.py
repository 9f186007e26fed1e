"""Completions of several turns: tools, targets, user rollout functions."""
