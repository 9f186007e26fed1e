"""Which prompts are sampled next, how far ahead of training, and replay of past groups."""
