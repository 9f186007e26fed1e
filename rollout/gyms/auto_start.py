"""Starts the servers of NeMo Gym that a run needs, each in a process of its own, and ends them with the run.

    servers = GymServers(cfg)                        # reads the gym's YAML files, in the gym's Python
    servers.start({"my_agent"}, model, log_dir)      # these, and what they refer to; returns when all answer
    servers.stop()

Each server is the child of servers/worker/strop_guard.py, as our vLLM servers are: it ends when this process does, even
by kill -9. All listen on 127.0.0.1, at free ports, whatever the files say. The gym's own runner is not used: it starts
ray, which listens on every interface.

The model behind the agents is the one that is trained: every model server that an agent refers to is directed at our
vLLM servers, and so is whatever refers to ${policy_base_url}.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from data.errors import UserError
from rollout.gyms.options import NemoGymConfig
from rollout.servers.command import BASE, DROPPED, TOKEN, WORKER
from rollout.servers.launch import STOP_WAIT, cause_of, read_tail, reserve
from rollout.servers.options import VllmConfig

HOST = "127.0.0.1"
LAUNCHER = Path(__file__).with_name("launcher.py")
KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
MODELS = "responses_api_models"
PARSE_S = 300.0  # the gym imports ray, wandb and more
POLL_S = 0.2
# What the gym's files refer to as the model; stands for ours until its address is known.
STAND_IN = "strop:"
POLICY = {"policy_base_url": "strop:base_url", "policy_api_key": "strop:api_key", "policy_model_name": "strop:model"}
NO_MODEL = {"policy_model": {MODELS: {"dummy_model": {"entrypoint": "app.py"}}}}  # the gym's own stand-in


class GymServers:
    """The servers of the gym's files; those that were started end with stop(), or with this process."""

    def __init__(self, cfg: NemoGymConfig, log: Callable[[str], None] = print) -> None:
        self.cfg, self.log = cfg, log
        check_files(cfg)
        self.python = find_python(cfg)
        self.root, self.tree = self._read_files()
        self._ports = []  # sockets that reserve them
        for fields in servers_of(self.tree).values():
            self._ports.append(reserve(HOST, 0))
            fields |= {"host": HOST, "port": self._ports[-1].getsockname()[1]}
            fields.pop("num_workers", None)  # more than one process would start ray
        self.running: list[GymServer] = []
        self._owner = os.getpid()

    def start(self, names: Collection[str], model: Sequence[tuple[str, str | None]], log_dir: Path) -> None:
        """Start the named servers and all that they refer to; ValueError says which one does not come up, and why.

        `model`: address and token of our vLLM servers; empty without any.
        """
        names = with_references(self.tree, names)
        self.tree = with_model(self.tree, names, model)
        begun = time.monotonic()
        self.log(f"NeMo Gym: starting {', '.join(names)}, logs in {log_dir}/gym-*.log")
        log_dir.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        env = clean_env() | {"NEMO_GYM_CONFIG_DICT": yaml.safe_dump(self.tree, allow_unicode=True)}
        try:
            for name in names:
                folder, entrypoint = self._place(name)
                own = folder / ".venv" / "bin" / "python"  # the gym's runner makes one for each server
                python = str(own) if own.is_file() else self.python
                argv = [python, str(LAUNCHER), "serve", str(folder), entrypoint]
                url = f"http://{HOST}:{servers_of(self.tree)[name]['port']}"
                env_of_it = env | {"NEMO_GYM_CONFIG_PATH": name}
                self.running.append(GymServer(name, url, argv, env_of_it, log_dir / f"gym-{name}.log"))
            self._wait(begun)
        except BaseException:
            self.stop()
            raise
        self.log(f"NeMo Gym: ready after {time.monotonic() - begun:.0f} s")

    def ended(self) -> str | None:
        """What to tell of a server that has ended by itself; None while all run."""
        return next((server.end() for server in self.running if server.guard.poll() is not None), None)

    def stop(self) -> None:
        """End every process, and wait until they are gone. May be called twice."""
        if os.getpid() != self._owner:  # a forked child that exits must not end its parent's servers
            return
        atexit.unregister(self.stop)
        running, self.running = self.running, []
        for server in running:  # all begin to end before the first is awaited
            server.guard.stdin.close()
        for server in running:
            server.await_end()
        for port in self._ports:
            port.close()

    def _wait(self, begun: float) -> None:
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            waiting = list(self.running)
            while waiting:
                if ended := self.ended():
                    raise UserError(f"nemo_gym.auto_start=True: {ended}")
                waiting = [server for server in waiting if not server.is_up(client)]
                if waiting and time.monotonic() - begun > self.cfg.startup_s:
                    late = waiting[0]
                    raise UserError(
                        f"nemo_gym.server_timeout={self.cfg.startup_s:g}: the gym's server {late.name} does not answer "
                        f"at {late.url}, and its log ends with {late.last_line()!r}; raise it, or see {late.log_path}"
                    )
                if waiting:
                    time.sleep(POLL_S)

    def _place(self, name: str) -> tuple[Path, str]:
        """(folder, file) of a server's code: in the gym's folder, or where nemo_gym is installed."""
        kind, kept_in, fields = place_of(self.tree[name])
        for root in (folder_of(self.cfg), self.root):
            if (root / kind / kept_in / fields["entrypoint"]).is_file():
                return root / kind / kept_in, fields["entrypoint"]
        raise UserError(
            f"nemo_gym.dir={folder_of(self.cfg)}: has no {kind}/{kept_in}/{fields['entrypoint']}, which is the server "
            f"{name}; name the folder that has it"
        )

    def _read_files(self) -> tuple[Path, dict[str, Any]]:
        """(where nemo_gym is installed, the files of config_paths merged), as the gym itself reads them."""
        paths = [str(path) for path in config_files(self.cfg)]
        given = json.dumps({"config_paths": paths} | POLICY | NO_MODEL)
        argv, options = [self.python, str(LAUNCHER), "parse", given], {"capture_output": True, "text": True}
        try:
            done = subprocess.run(argv, cwd=folder_of(self.cfg), env=clean_env(), timeout=PARSE_S, **options)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"nemo_gym.python={self.python}: could not be run ({error}); name another") from None
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines and lines[-1].startswith("{"):
            said = json.loads(lines[-1])
            return Path(said["root"]), said["config"]
        cause = cause_of(done.stderr)
        if "ModuleNotFoundError" in cause and "nemo_gym" in cause:
            raise UserError(
                f"nemo_gym.python={self.python}: has no nemo_gym; name the interpreter that has it (Python 3.12, "
                "pip install nemo-gym)"
            )
        raise UserError(f"nemo_gym.config_paths={' '.join(self.cfg.config_paths)}: the gym refuses them ({cause})")


class GymServer:
    """One running server of the gym, as the child of a guard."""

    def __init__(self, name: str, url: str, argv: list[str], env: dict[str, str], log_path: Path) -> None:
        self.name, self.url, self.log_path = name, url, log_path
        with log_path.open("wb") as output:
            self.guard = subprocess.Popen(
                [sys.executable, str(WORKER / "strop_guard.py"), "--", *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,  # Ctrl-C reaches only us, and we end the server
            )

    def is_up(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/").status_code == 200
        except httpx.HTTPError:
            return False

    def end(self) -> str:
        text = read_tail(self.log_path)
        refused = [line.strip() for line in text.splitlines() if "[Errno" in line]  # uvicorn logs more lines after it
        cause = refused[-1] if refused else cause_of(text)
        return f"the gym's server {self.name} has ended ({cause}); see {self.log_path}"

    def last_line(self) -> str:
        lines = read_tail(self.log_path).strip().splitlines()
        return lines[-1].strip() if lines else ""

    def await_end(self) -> None:
        try:
            self.guard.wait(STOP_WAIT)
        except subprocess.TimeoutExpired:  # somebody suspended the guard itself; the server ends with it
            self.guard.kill()
            self.guard.wait()


# files -----------------------------------------------------------------------------------------------------------


def folder_of(cfg: NemoGymConfig) -> Path:
    return Path(cfg.dir or ".").expanduser().resolve()


def config_files(cfg: NemoGymConfig) -> list[Path]:
    return [folder_of(cfg) / Path(path).expanduser() for path in cfg.config_paths]


def check_files(cfg: NemoGymConfig) -> None:
    """Refuse a folder or a file that is not there."""
    if not folder_of(cfg).is_dir():
        raise UserError(f"nemo_gym.dir={cfg.dir}: is not a folder; name the folder of the gym")
    for given, path in zip(cfg.config_paths, config_files(cfg), strict=True):
        if not path.is_file():
            raise UserError(f"nemo_gym.config_paths={given}: {path} is not a file; name a YAML file of the gym")


def find_python(cfg: NemoGymConfig) -> str:
    own = folder_of(cfg) / ".venv" / "bin" / "python"
    return str(Path(cfg.python).expanduser()) if cfg.python else str(own) if own.is_file() else sys.executable


def clean_env() -> dict[str, str]:
    """Our environment without what is the trainer's."""
    kept = {key: value for key, value in os.environ.items() if key not in (*DROPPED, TOKEN)}
    return kept | {"PYTHONUNBUFFERED": "1"}


# the configuration: plain functions, nothing is started ----------------------------------------------------------


def place_of(entry: Any) -> tuple[str, str, dict[str, Any]] | None:
    """(kind, folder within the kind, fields) of a server's entry; None for an entry that is no server."""
    for kind in KINDS:
        inner = entry.get(kind) if isinstance(entry, dict) else None
        if isinstance(inner, dict) and inner:
            folder, fields = next(iter(inner.items()))
            if isinstance(fields, dict) and fields.get("entrypoint"):
                return kind, folder, fields
    return None


def servers_of(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields of every server, by name."""
    return {name: place[2] for name, entry in tree.items() if (place := place_of(entry)) is not None}


def references(value: Any) -> Iterator[tuple[str, str]]:
    """(kind, name) of every server that the fields of another refer to."""
    if isinstance(value, dict):
        if value.get("type") in KINDS and isinstance(value.get("name"), str):
            yield value["type"], value["name"]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from references(inner)


def with_references(tree: dict[str, Any], names: Collection[str]) -> list[str]:
    """The names, and those of all servers that they refer to."""
    servers, found = servers_of(tree), sorted(names)
    for name in found:  # grows
        found += sorted({other for _, other in references(servers[name]) if other in servers} - set(found))
    return found


def with_model(tree: dict[str, Any], names: Sequence[str], model: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
    """The configuration with our vLLM servers in place of the stand-ins."""
    tree = copy.deepcopy(tree)
    servers = servers_of(tree)
    agents = [servers[name] for name in names if place_of(tree[name])[0] == "responses_api_agents"]
    asked = {name for fields in agents for kind, name in references(fields) if kind == MODELS and name in servers}
    waiting = [name for name in names if name in asked or STAND_IN in json.dumps(servers[name])]
    if waiting and not model:
        raise UserError(
            f"rollout.engine=local: the gym's server {waiting[0]} asks the model that is trained, on a vLLM server; "
            "use --rollout.engine vllm"
        )
    if len(tokens := {token for _, token in model}) > 1:
        raise UserError(
            f"vllm.url={' '.join(url for url, _ in model)}: their tokens differ, and the gym's model server has one "
            f"for all; start them with the same {TOKEN}"
        )
    ours = {"base_url": [f"{url}/v1" for url, _ in model], "api_key": next(iter(tokens), None) or "none", "model": BASE}
    for name in asked:
        (folder, fields), *_ = tree[name][MODELS].items()
        if folder == "dummy_model":  # no file has a model server
            tree[name][MODELS] = {"vllm_model": fields}
            fields["uses_reasoning_parser"] = False
        fields |= ours | {"return_token_id_information": True}
    return _replaced(tree, {f"{STAND_IN}{key}": value for key, value in ours.items()})


def _replaced(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(inner, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replaced(inner, values) for inner in value]
    return values.get(value, value) if isinstance(value, str) else value


# our vLLM servers ------------------------------------------------------------------------------------------------


def known_servers(cfg: VllmConfig) -> VllmConfig:
    """Settings under which the gym's model server can reach our servers: a server that restarts at another port would
    be lost to it, so the ports are chosen here.
    """
    if cfg.url:
        return cfg
    if cfg.replicas > 1 and not os.environ.get(TOKEN):
        raise UserError(
            f"vllm.replicas={cfg.replicas}: the gym's model server has one token for all servers; give them one with "
            f"export {TOKEN}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )
    while not cfg.port:
        with contextlib.ExitStack() as held:
            first = held.enter_context(reserve(cfg.host, 0)).getsockname()[1]
            with contextlib.suppress(ValueError, OverflowError):  # one of the following is in use
                for number in range(1, cfg.replicas):
                    held.enter_context(reserve(cfg.host, first + number))
                cfg = replace(cfg, port=first)
    return cfg
