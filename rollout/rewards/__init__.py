"""Reward functions: loading, calling them safely, worker processes, built-ins, reward models, code tests."""
