"""Backends that send trained weights to vLLM servers: process_group, ipc, filesystem, lora."""
