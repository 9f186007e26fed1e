"""Plan prompts, sample ahead of training and replay past groups."""
