"""Ranks: collectives, hang detection, context parallelism, sharded tensors."""
