"""Weight sync to vLLM servers: the backends process_group, ipc, filesystem and lora."""
