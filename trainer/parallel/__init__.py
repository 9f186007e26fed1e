"""Processes and ranks: collectives, hang detection, context parallelism, sharded tensors."""
