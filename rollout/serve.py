"""python -m rollout.serve: run vLLM servers in the foreground, for a trainer in another terminal or on another machine.

    python -m rollout.serve --config run.yaml
    python -m rollout.serve --model Qwen/Qwen2.5-0.5B-Instruct --vllm.tensor-parallel-size 2

FILE is the trainer's config: the server reads model, revision, tokenizer, dtype, trust_remote_code, lora.r,
sync.backend and vllm.* from it. An axolotl config is translated, as by the trainer.
Every request needs a token: STROP_VLLM_TOKEN, or a random token, which a trainer of the same user on this machine finds
automatically (servers/token.py). Ctrl-C stops the servers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

import torch

from data.command.config_file import load_config
from data.command.flags import (
    HELP,
    Flag,
    FlagValue,
    Values,
    build,
    flag_table,
    print_help,
    read_argv,
    read_tree,
    run_command,
)
from data.errors import UserError
from data.hub import check_hub
from rollout.model_folder import find_tokenizer, served_model
from rollout.servers.command import TOKEN, device_of, find_python
from rollout.servers.launch import Launched, launch, stop_all, wait_ready
from rollout.servers.options import LOOPBACK, Backend, VllmConfig

PORT = 8000
TOP = ("model", "revision", "tokenizer", "dtype", "trust_remote_code", "lora.r", "sync.backend")  # of a trainer's file


@dataclass(frozen=True, kw_only=True)
class LoraRank:
    """Adapters that the server must support."""

    r: int = 0
    """Rank of the trainer's adapters. 0: full fine-tuning."""


@dataclass(frozen=True, kw_only=True)
class SyncBackend:
    """How the trainer sends weights."""

    backend: Backend = "auto"
    """The trainer's --sync.backend. With auto or lora, and lora.r above 0, the server loads adapters."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Start vLLM servers for a trainer in another terminal or on another machine, until Ctrl-C.

    --config FILE.yaml reads model, revision, tokenizer, dtype, trust_remote_code, lora.r, sync.backend and vllm.* from
    a trainer's config.
    """

    config: str | None = None
    """The trainer's config, or an axolotl config."""
    model: str
    """Model to serve: hub id, model folder, finished run, adapter folder (serves its base), or builtin:tiny."""
    revision: str | None = None
    """Branch, tag or commit of --model on the hub. None: its main branch."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the model's: a folder or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The trainer's --dtype; --vllm.dtype overrides it."""
    trust_remote_code: bool = False
    """Run the model's Python code from the hub."""
    lora: LoraRank = field(default_factory=LoraRank)
    sync: SyncBackend = field(default_factory=SyncBackend)
    vllm: VllmConfig = field(default_factory=lambda: VllmConfig(port=PORT))


def main(argv: Sequence[str] | None = None, log: Callable[[str], None] | None = None) -> int:
    """Return the exit status: 0 after Ctrl-C, 2 after an error, which is printed as one sentence."""
    log = log or (lambda text: print(text, flush=True))
    try:
        return run_command(lambda: serve(parse(sys.argv[1:] if argv is None else argv), log))
    except KeyboardInterrupt:
        log("stopped: no server is left running")
    return 0


def serve(cfg: ServeConfig, log: Callable[[str], None]) -> NoReturn:
    """Start the servers and watch them until an exception, then stop all of them."""
    device = device_of(find_python(cfg.vllm))
    model, revision = served_model(cfg.model, cfg.revision)
    if not Path(model).is_dir():
        check_hub("model", model)
    tokenizer = None if cfg.tokenizer is None else find_tokenizer(cfg.tokenizer)
    rank = cfg.lora.r if cfg.sync.backend in ("auto", "lora") else 0
    with contextlib.ExitStack() as stack:
        servers: list[Launched] = []
        stack.callback(stop_all, servers)
        for replica in range(cfg.vllm.replicas):
            server = launch(
                cfg.vllm,
                model=model,
                revision=revision,
                tokenizer=tokenizer,
                lora_rank=rank,
                replica=replica,
                device=device,
                log=log,
                dtype=cfg.dtype if cfg.vllm.dtype == "auto" else cfg.vllm.dtype,
                colocate=bool(cfg.vllm.colocate),
                trust_remote_code=cfg.trust_remote_code,
            )
            servers.append(server)
        wait_ready(servers, cfg.vllm.startup_timeout, log)
        paths = ", ".join(str(server.token_path) for server in servers)
        log(f"every request needs the token in {paths}; a trainer of this user on this machine finds it there")
        log(next_step(cfg, servers, visible_gpus() if device == "cuda" else []))
        while True:
            for server in servers:
                if server.poll() is not None:
                    raise UserError(
                        f"vLLM server {server.replica}: exited with status {server.poll()}; see its output above"
                    )
            time.sleep(0.5)


def next_step(cfg: ServeConfig, servers: Sequence[Launched], visible: Sequence[str] = ()) -> str:
    """Return the command that starts a trainer on these servers; `visible`: the machine's GPUs."""
    urls = [server.url for server in servers]
    if cfg.vllm.host in ("0.0.0.0", "::"):
        urls = [f"http://{socket.gethostname()}:{urlsplit(url).port}" for url in urls]
    run = f"--config {cfg.config}" if cfg.config else f"--method grpo --model {cfg.model} --rollout.engine vllm"
    line = f"python -m trainer {run} --vllm.url {' '.join(urls)}"
    for name in () if cfg.config else ("revision", "tokenizer"):
        line += f" --{name} {value}" if (value := getattr(cfg, name)) else ""
    if cfg.vllm.colocate:
        line += " --vllm.colocate True"
    notes = f" (on another machine, set the same {TOKEN})" if os.environ.get(TOKEN) else ""
    used = list(dict.fromkeys(gpu for server in servers for gpu in server.gpus))
    setting, location = trainer_gpus(used, visible, bool(cfg.vllm.colocate)) if used else ("", "")
    if setting and cfg.vllm.host in LOOPBACK:
        line = f"{setting} {line}"
    elif setting:  # the trainer may run on another machine, with other GPUs
        notes += f" (on this machine, with {setting})"
    return f"ready{location}; now start the trainer{notes}:\n  {line}"


def trainer_gpus(used: Sequence[str], visible: Sequence[str], colocate: bool) -> tuple[str, str]:
    """Return the environment for a trainer on this machine, and where the servers are.

    ['0'], ['0', '1'], False -> ("CUDA_VISIBLE_DEVICES=1", " on GPU 0")
    """
    free = [gpu for gpu in visible if gpu not in used]
    location = f" on GPU {','.join(used)}"
    if colocate:
        return (f"CUDA_VISIBLE_DEVICES={','.join(used)}" if free else ""), f"{location}, shared with the trainer"
    if free:
        return f"CUDA_VISIBLE_DEVICES={','.join(free)}", location
    return "", (
        f"{location}, and this machine has no other GPU: to train here, restart the server and the trainer with "
        "--vllm.colocate True"
    )


def visible_gpus() -> list[str]:
    """Return the GPUs visible to this process as entries for CUDA_VISIBLE_DEVICES, without using their memory."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names or [str(index) for index in range(torch.cuda.device_count())]


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


# flags -----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> ServeConfig:
    """Parse argv and the server's part of a trainer's YAML file; flags override the file."""
    prog, table = "python -m rollout.serve", flag_table(ServeConfig)
    if any(word in HELP for word in argv):
        print_help(ServeConfig, prog)
    flags = read_argv(argv, table)
    file = flags.get("config")
    values = (_from_file(Path(file.words[0]), table) if file else {}) | flags
    if "vllm.url" in values:
        raise UserError("vllm.url: only for the trainer; set the server's port with --vllm.port")
    if "model" not in values:
        raise UserError("--model is required: pass it, or --config FILE.yaml that contains a model")
    return build(ServeConfig, values, table, prog)


def _from_file(path: Path, table: dict[str, Flag]) -> Values:
    """Read the server's settings from a trainer's file, with the port of its vllm.url."""
    settings = {}
    for name, value in _trainer_tree(path).items():
        block = str(name).partition(".")[0]
        if name == "vllm" and value is None:  # an empty block
            continue
        if block == "vllm" or name in TOP:
            settings[name] = value
        elif name in ("lora", "sync") and isinstance(value, dict):
            settings[name] = {key: inner for key, inner in value.items() if f"{name}.{key}" in table}
    values = read_tree(settings, table, str(path))
    url = values.pop("vllm.url", None)
    port = urlsplit(url.words[0]).port if url and url.words else None
    if port and "vllm.port" not in values:  # the trainer with this file connects to that port
        values["vllm.port"] = FlagValue((str(port),), str(path))
    return values


def _trainer_tree(path: Path) -> dict[str, Any]:
    """Return the trainer's settings in a file, and print the server settings of an axolotl file that have no effect."""
    from trainer.translate.axolotl import is_axolotl, translate_server

    tree = load_config(path)
    if not is_axolotl(tree):
        return tree
    try:
        made = translate_server(tree)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    unused = ", ".join(key for keys in made.idle.values() for key in keys if key.startswith("vllm."))
    print(f"{path}: an axolotl config, translated" + (f"; no effect here: {unused}" if unused else ""), file=sys.stderr)
    return made.tree


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
