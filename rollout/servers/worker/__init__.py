"""Files that vLLM servers load through PYTHONPATH without the repository: they import only torch, vLLM, each other."""
