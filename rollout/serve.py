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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

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
    """Exit status: 0 after Ctrl-C, 1 after an error, which is printed as one sentence."""
    log = log or (lambda text: print(text, flush=True))
    try:
        cfg = parse(sys.argv[1:] if argv is None else argv)
        serve(cfg, log)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        log("stopped: no server is left running")
    return 0


def serve(cfg: ServeConfig, log: Callable[[str], None]) -> NoReturn:
    """Start the servers and watch them until an exception; leaves nothing running."""
    device = device_of(find_python(cfg.vllm))
    model = served_model(cfg.model)
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
                raise ValueError(
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
    import tyro

    argv, file = _take_config(list(argv))
    given = {word.partition("=")[0].replace("_", "-").replace("--no-", "--").replace(".no-", ".") for word in argv}
    from_file = {flag: words for flag, words in _file_words(file) if flag not in given} if file else {}
    words = [word for words in from_file.values() for word in words]
    for word, value in zip(argv, [*argv[1:], "-"], strict=False):
        if word in ("--vllm.extra-args", "--vllm.extra_args") and value.startswith("-"):
            raise ValueError("--vllm.extra-args: needs a value; one that starts with - is attached with =")
    if "--vllm.url" in given:
        raise ValueError("vllm.url: is for the trainer; name the port of a server here with --vllm.port")
    wants_help = any(word in ("-h", "--help") for word in argv)
    if "--model" not in given and "--model" not in from_file and not wants_help:
        raise ValueError("model: missing; pass --model or --config FILE.yaml with a model in it")

    def refuse(
        event: Any,
    ) -> None:  # a config class raises whole sentences: tyro would draw a box around them
        if type(event).__name__ == "InstantiationFailure" and not event.argument:
            raise ValueError(event.message) from None

    # Not public API: without it, tyro prints its box and exits with 2.
    errors = getattr(tyro, "_errors", None)
    hook = errors.on_parse_error(refuse) if hasattr(errors, "on_parse_error") else contextlib.nullcontext()
    with hook:
        return tyro.cli(ServeConfig, prog="python -m rollout.serve", args=[*words, *argv])


def _take_config(argv: list[str]) -> tuple[list[str], Path | None]:
    file = None
    for i, word in enumerate(argv):
        name, attached, value = word.partition("=")
        if name == "--config":
            value = value if attached else (argv[i + 1] if i + 1 < len(argv) else "")
            if not value:
                raise ValueError("--config: needs the path of a YAML file")
            file = Path(value)
            del argv[i : i + (1 if attached else 2)]
            break
    return argv, file


def _file_words(path: Path) -> list[tuple[str, list[str]]]:
    """[(--flag, words for tyro)] of the keys that concern a server."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config={path}: cannot be read; {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"--config={path}: is nested too deeply to be read; a config has two levels") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config={path}: not valid YAML: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"--config={path}: not a mapping of settings; write lines such as model: builtin:tiny")
    block = dict(_block(tree, "vllm", path))
    unknown = sorted(set(block) - {field.name for field in fields(VllmConfig)})
    if unknown:
        raise ValueError(f"--config={path}: vllm.{unknown[0]}: unknown key; --help lists them all")
    urls = block.pop("url", None) or []
    first = urls if isinstance(urls, str) else next(iter(urls), "")
    if first and urlsplit(first).port and "port" not in block:  # where the trainer of this file will connect
        block["port"] = urlsplit(first).port
    values = {name: tree[name] for name in ("model", "dtype", "trust_remote_code") if name in tree}
    values |= {f"vllm.{name}": value for name, value in block.items()}
    for name, key in (("lora", "r"), ("sync", "backend")):
        values |= {f"{name}.{key}": value for found, value in _block(tree, name, path).items() if found == key}
    return [_words(name, value) for name, value in values.items()]


def _block(tree: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    """A block written as a mapping, or key by key as `vllm.port: 8000`."""
    inner = tree.get(name) or {}
    if not isinstance(inner, dict):
        raise ValueError(f"--config={path}: {name}={inner}: must be a mapping such as {name}: {{...}}")
    dotted = {key.partition(".")[2]: value for key, value in tree.items() if str(key).startswith(f"{name}.")}
    return {str(key).replace("-", "_"): value for key, value in {**inner, **dotted}.items()}


def _words(name: str, value: Any) -> tuple[str, list[str]]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool) and name != "vllm.colocate":  # a bool is --x or --no-x; one that may be None is not
        head, dot, last = flag[2:].rpartition(".")
        return flag, [flag if value else f"--{head}{dot}no-{last}"]
    if isinstance(value, (list, tuple)):
        return flag, [flag, *map(str, value)]
    return flag, [f"{flag}={value}"]  # attached: it may begin with a dash


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
