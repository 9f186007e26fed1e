"""Engine implementations: in this process (local.py) and over vLLM servers (vllm.py)."""
