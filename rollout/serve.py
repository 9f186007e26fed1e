"""python -m rollout.serve: run vLLM servers in the foreground, for a trainer in another terminal or on another machine.

    python -m rollout.serve --config run.yaml
    python -m rollout.serve --model Qwen/Qwen2.5-0.5B-Instruct --vllm.tensor-parallel-size 2

The file is the trainer's: model, lora.r, sync.backend, dtype, trust_remote_code and vllm.* are taken from it. Every
request needs a token: that of STROP_VLLM_TOKEN, or a random one. A trainer of the same user on this machine finds it
by itself (servers/token.py). Ctrl-C stops the servers.
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
from typing import Literal, NoReturn
from urllib.parse import urlsplit

from data.command.config_file import load_config
from data.command.flags import (
    CONFIG,
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
from rollout.servers.command import TOKEN, device_of, find_python
from rollout.servers.launch import Launched, launch, stop_all, wait_ready
from rollout.servers.model_folder import served_model
from rollout.servers.options import LOOPBACK, Backend, VllmConfig

PORT = 8000


@dataclass(frozen=True, kw_only=True)
class LoraRank:
    """Adapters that the server must be able to hold."""

    r: int = 0
    """Rank of the trainer's adapters; 0 if it trains all weights."""


@dataclass(frozen=True, kw_only=True)
class SyncBackend:
    """How the trainer will send weights."""

    backend: Backend = "auto"
    """The trainer's --sync.backend: with auto or lora, and lora.r above 0, the server takes adapters."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Start vLLM servers for a trainer in another terminal or on another machine, until Ctrl-C.

    --config FILE.yaml takes model, lora.r, sync.backend, dtype, trust_remote_code and vllm.* from a trainer's file.
    """

    model: str
    """Hub id, local folder, finished run folder, adapter folder (its base is served), or builtin:tiny."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The trainer's --dtype; --vllm.dtype overrides it."""
    trust_remote_code: bool = False
    """Let the hub's own Python code for this model run."""
    lora: LoraRank = field(default_factory=LoraRank)
    sync: SyncBackend = field(default_factory=SyncBackend)
    vllm: VllmConfig = field(default_factory=lambda: VllmConfig(port=PORT))


def main(argv: Sequence[str] | None = None, log: Callable[[str], None] | None = None) -> int:
    """Exit status: 0 after Ctrl-C, 2 after an error, which is printed as one sentence."""
    log = log or (lambda text: print(text, flush=True))
    try:
        return run_command(lambda: serve(parse(sys.argv[1:] if argv is None else argv), log))
    except KeyboardInterrupt:
        log("stopped: no server is left running")
    return 0


def serve(cfg: ServeConfig, log: Callable[[str], None]) -> NoReturn:
    """Start the servers and watch them until an exception; leaves nothing running."""
    device = device_of(find_python(cfg.vllm))
    model = served_model(cfg.model)
    if not Path(model).is_dir():
        check_hub("model", model)
    rank = cfg.lora.r if cfg.sync.backend in ("auto", "lora") else 0
    with contextlib.ExitStack() as stack:
        servers: list[Launched] = []
        stack.callback(stop_all, servers)
        for replica in range(cfg.vllm.replicas):
            server = launch(
                cfg.vllm,
                model=model,
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
        log(f"every request needs the token in {paths}, where a trainer of this user on this machine finds it")
        log(next_step(cfg, servers, visible_gpus() if device == "cuda" else []))
        while True:
            ended = next((server for server in servers if server.poll() is not None), None)
            if ended is not None:
                raise UserError(
                    f"vLLM server {ended.replica}: ended with status {ended.poll()}; its last lines are above"
                )
            time.sleep(0.5)


def next_step(cfg: ServeConfig, servers: Sequence[Launched], visible: Sequence[str] = ()) -> str:
    """The command that starts a trainer on these servers; `visible`: the machine's GPUs."""
    urls = [server.url for server in servers]
    if cfg.vllm.host in ("0.0.0.0", "::"):
        urls = [f"http://{socket.gethostname()}:{urlsplit(url).port}" for url in urls]
    line = f"python -m trainer --method grpo --model {cfg.model} --rollout.engine vllm --vllm.url {' '.join(urls)}"
    if cfg.vllm.colocate:
        line += " --vllm.colocate True"
    also = f"; on another machine with the same {TOKEN} in its environment" if os.environ.get(TOKEN) else ""
    used = list(dict.fromkeys(gpu for server in servers for gpu in server.gpus))
    setting, where = trainer_gpus(used, visible, bool(cfg.vllm.colocate)) if used else ("", "")
    if setting and cfg.vllm.host in LOOPBACK:
        line = f"{setting} {line}"
    elif setting:  # other machines can reach it, and the trainer may be on one with other GPUs
        also += f"; on this machine with {setting}"
    return f"ready{where}; now start the trainer{also}:\n  {line}"


def trainer_gpus(used: Sequence[str], visible: Sequence[str], colocate: bool) -> tuple[str, str]:
    """(what a trainer on this machine needs in its environment, where the servers are).

    ['0'], ['0', '1'], False -> ("CUDA_VISIBLE_DEVICES=1", " on GPU 0")
    """
    free = [gpu for gpu in visible if gpu not in used]
    where = f" on GPU {','.join(used)}"
    if colocate:
        return (f"CUDA_VISIBLE_DEVICES={','.join(used)}" if free else ""), f"{where}, which the trainer shares"
    if free:
        return f"CUDA_VISIBLE_DEVICES={','.join(free)}", where
    return "", (
        f"{where}, and this machine has no other: a trainer on it needs --vllm.colocate True, and the server must have "
        "been started with it too, which it was not"
    )


def visible_gpus() -> list[str]:
    """The GPUs visible to this process, as entries for CUDA_VISIBLE_DEVICES. Uses none of their memory."""
    import torch

    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names or [str(number) for number in range(torch.cuda.device_count())]


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


# flags -----------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> ServeConfig:
    """argv, plus the part of a trainer's YAML file that concerns a server; flags override the file."""
    prog, table = "python -m rollout.serve", flag_table(ServeConfig)
    if any(word in HELP for word in argv):
        print_help(ServeConfig, prog)
    given = read_argv(argv, table | CONFIG)
    file = given.pop("config", None)
    values = (_from_file(Path(file.words[0]), table) if file else {}) | given
    if "vllm.url" in values:
        raise UserError("vllm.url: is for the trainer; name the port of a server here with --vllm.port")
    if "model" not in values:
        raise UserError("model: missing; pass --model or --config FILE.yaml with a model in it")
    return build(ServeConfig, values, table, prog)


def _from_file(path: Path, table: dict[str, Flag]) -> Values:
    """The keys of a trainer's file that concern a server, with the port that its vllm.url has."""
    taken = {}
    for name, value in load_config(path).items():
        block = str(name).partition(".")[0]
        if name == "vllm" and value is None:  # an empty block
            continue
        if block == "vllm" or name in ("model", "dtype", "trust_remote_code", "lora.r", "sync.backend"):
            taken[name] = value
        elif name in ("lora", "sync") and isinstance(value, dict):
            taken[name] = {key: inner for key, inner in value.items() if f"{name}.{key}" in table}
    values = read_tree(taken, table, str(path))
    url = values.pop("vllm.url", None)
    port = urlsplit(url.words[0]).port if url and url.words else None
    if port and "vllm.port" not in values:  # where the trainer of this file will connect
        values["vllm.port"] = FlagValue((str(port),), str(path))
    return values


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
