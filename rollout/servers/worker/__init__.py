"""Modules that vLLM servers import through PYTHONPATH, without the repository. They need only torch and vLLM."""
