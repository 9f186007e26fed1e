"""The model under training: load, shard, log-probs, reference, optimizer, adapters, memory estimate."""
