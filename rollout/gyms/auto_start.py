"""Start the NeMo Gym servers that a run needs, each in its own process, and stop them with the run.

    servers = GymServers(cfg)                        # read the gym's YAML files, in the gym's Python
    servers.start({"my_agent"}, model, log_dir)      # these and the servers they refer to; returns when all answer
    servers.stop()

Each server is a child of servers/worker/strop_guard.py, like the vLLM servers: it ends with this process, even after
kill -9. All servers listen on 127.0.0.1 and free ports, whatever the files contain. The gym's own runner is not used
because it starts ray, which listens on every interface.

The agents use the model in training: every model server that an agent refers to, and every ${policy_base_url}, points
to the run's endpoint.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from data.errors import UserError
from rollout.gyms.options import NemoGymConfig
from rollout.servers.command import DROPPED, TOKEN, WORKER
from rollout.servers.launch import STOP_WAIT, cause_of, read_tail, reserve

HOST = "127.0.0.1"
LAUNCHER = Path(__file__).with_name("launcher.py")
AGENTS, MODELS = "responses_api_agents", "responses_api_models"
KINDS = ("resources_servers", AGENTS, MODELS)
PARSE_S = 1800.0  # the gym imports ray, wandb and more; about a minute on an idle machine
POLL_S = 0.2
# Values for the model variables in the gym's files; placeholders until the address is known.
PLACEHOLDER = "strop:"
POLICY = {"policy_base_url": "strop:base_url", "policy_api_key": "strop:api_key", "policy_model_name": "strop:model"}
NO_MODEL = {"policy_model": {MODELS: {"dummy_model": {"entrypoint": "app.py"}}}}  # the gym's placeholder


class Server(NamedTuple):
    """A server in the gym's files."""

    kind: str
    folder: str  # of its code, within the kind
    fields: dict[str, Any]


class GymServers:
    """The servers in the gym's files; started servers end with stop() or with this process."""

    def __init__(self, cfg: NemoGymConfig, log: Callable[[str], None] = print) -> None:
        self.cfg, self.log = cfg, log
        check_files(cfg)
        self.python = find_python(cfg)
        self.root, self.tree = self._read_files()
        self._ports = []  # sockets that reserve the ports
        for _, _, fields in servers_of(self.tree).values():
            self._ports.append(reserve(HOST, 0))
            fields |= {"host": HOST, "port": self._ports[-1].getsockname()[1]}
            fields.pop("num_workers", None)  # more than one process would start ray
        self.running: list[GymServer] = []
        self._owner = os.getpid()

    def start(self, names: Collection[str], model: tuple[str, str] | None, log_dir: Path) -> None:
        """Start the named servers and all servers they refer to; a UserError names a server that does not start.

        `model`: (address, token) of the run's endpoint; None: it cannot answer while the servers verify.
        """
        names = with_references(self.tree, names)
        self.tree = with_model(self.tree, names, model)
        started_at = time.monotonic()
        self.log(f"NeMo Gym: starting {', '.join(names)}, logs in {log_dir}/gym-*.log")
        log_dir.mkdir(parents=True, exist_ok=True)
        atexit.register(self.stop)
        env = clean_env() | {"NEMO_GYM_CONFIG_DICT": yaml.safe_dump(self.tree, allow_unicode=True)}
        try:
            for name in names:
                folder, entrypoint = self._code_of(name)
                venv = folder / ".venv" / "bin" / "python"  # the gym's runner creates one per server
                python = str(venv) if venv.is_file() else self.python
                argv = [python, str(LAUNCHER), "serve", str(folder), entrypoint]
                url = f"http://{HOST}:{servers_of(self.tree)[name].fields['port']}"
                server_env = env | {"NEMO_GYM_CONFIG_PATH": name}
                self.running.append(GymServer(name, url, argv, server_env, log_dir / f"gym-{name}.log"))
            self._wait(started_at)
        except BaseException:
            self.stop()
            raise
        self.log(f"NeMo Gym: ready after {time.monotonic() - started_at:.0f} s")

    def ended(self) -> str | None:
        """Describe a server that has ended; None while all servers run."""
        return next((server.end() for server in self.running if server.guard.poll() is not None), None)

    def stop(self) -> None:
        """Stop every process and wait until all are gone. May be called twice."""
        if os.getpid() != self._owner:  # a forked child that exits must not stop its parent's servers
            return
        atexit.unregister(self.stop)
        running, self.running = self.running, []
        for server in running:  # signal all servers before waiting for the first
            server.guard.stdin.close()
        for server in running:
            server.await_end()
        for port in self._ports:
            port.close()

    def _wait(self, started_at: float) -> None:
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            waiting = list(self.running)
            while waiting:
                if ended := self.ended():
                    raise UserError(f"nemo_gym.auto_start=True: {ended}")
                waiting = [server for server in waiting if not server.is_up(client)]
                if waiting and time.monotonic() - started_at > self.cfg.startup_s:
                    late = waiting[0]
                    raise UserError(
                        f"nemo_gym.server_timeout={self.cfg.startup_s:g}: the gym's server {late.name} does not answer "
                        f"at {late.url} (last log line: {late.last_line()!r}); raise it, or see {late.log_path}"
                    )
                if waiting:
                    time.sleep(POLL_S)

    def _code_of(self, name: str) -> tuple[Path, str]:
        """Return (folder, file) of a server's code, in the gym's folder or in the installed nemo_gym."""
        kind, name_in_kind, fields = servers_of(self.tree)[name]
        for root in (folder_of(self.cfg), self.root):
            if (root / kind / name_in_kind / fields["entrypoint"]).is_file():
                return root / kind / name_in_kind, fields["entrypoint"]
        raise UserError(
            f"nemo_gym.dir={folder_of(self.cfg)}: no {kind}/{name_in_kind}/{fields['entrypoint']}, the code of the "
            f"server {name}; pass the folder that contains it"
        )

    def _read_files(self) -> tuple[Path, dict[str, Any]]:
        """Return (folder of the installed nemo_gym, merged files of config_paths), parsed by the gym itself."""
        paths = [str(path) for path in config_files(self.cfg)]
        config = json.dumps({"config_paths": paths} | POLICY | NO_MODEL)
        argv, options = [self.python, str(LAUNCHER), "parse", config], {"capture_output": True, "text": True}
        try:
            result = subprocess.run(argv, cwd=folder_of(self.cfg), env=clean_env(), timeout=PARSE_S, **options)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"nemo_gym.python={self.python}: cannot be run ({error}); pass another") from None
        lines = result.stdout.strip().splitlines()
        if result.returncode == 0 and lines and lines[-1].startswith("{"):
            reply = json.loads(lines[-1])
            return Path(reply["root"]), reply["config"]
        cause = cause_of(result.stderr)
        if "ModuleNotFoundError" in cause and "nemo_gym" in cause:
            raise UserError(
                f"nemo_gym.python={self.python}: nemo_gym is not installed; pass an interpreter that has it (Python "
                "3.12, pip install nemo-gym)"
            )
        raise UserError(f"nemo_gym.config_paths={' '.join(self.cfg.config_paths)}: the gym rejects them ({cause})")


class GymServer:
    """One running server of the gym, as a child of a guard."""

    def __init__(self, name: str, url: str, argv: list[str], env: dict[str, str], log_path: Path) -> None:
        self.name, self.url, self.log_path = name, url, log_path
        with log_path.open("wb") as output:
            self.guard = subprocess.Popen(
                [sys.executable, str(WORKER / "strop_guard.py"), "--", *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,  # Ctrl-C reaches only this process, which stops the server
            )

    def is_up(self, client: httpx.Client) -> bool:
        try:
            return client.get(f"{self.url}/").status_code == 200
        except httpx.HTTPError:
            return False

    def end(self) -> str:
        text = read_tail(self.log_path)
        errors = [line.strip() for line in text.splitlines() if "[Errno" in line]  # uvicorn logs more lines afterwards
        cause = errors[-1] if errors else cause_of(text)
        return f"the gym's server {self.name} has ended ({cause}); see {self.log_path}"

    def last_line(self) -> str:
        lines = read_tail(self.log_path).strip().splitlines()
        return lines[-1].strip() if lines else ""

    def await_end(self) -> None:
        try:
            self.guard.wait(STOP_WAIT)
        except subprocess.TimeoutExpired:  # the guard itself is suspended; the server ends with it
            self.guard.kill()
            self.guard.wait()


# files -----------------------------------------------------------------------------------------------------------


def folder_of(cfg: NemoGymConfig) -> Path:
    return Path(cfg.dir or ".").expanduser().resolve()


def config_files(cfg: NemoGymConfig) -> list[Path]:
    return [folder_of(cfg) / Path(path).expanduser() for path in cfg.config_paths]


def check_files(cfg: NemoGymConfig) -> None:
    """Raise if the gym's folder or one of its files does not exist."""
    if not folder_of(cfg).is_dir():
        raise UserError(f"nemo_gym.dir={cfg.dir}: not a folder; pass the folder of the gym")
    for name, path in zip(cfg.config_paths, config_files(cfg), strict=True):
        if not path.is_file():
            raise UserError(f"nemo_gym.config_paths={name}: {path} is not a file; pass a YAML file of the gym")


def find_python(cfg: NemoGymConfig) -> str:
    venv = folder_of(cfg) / ".venv" / "bin" / "python"
    return str(Path(cfg.python).expanduser()) if cfg.python else str(venv) if venv.is_file() else sys.executable


def clean_env() -> dict[str, str]:
    """Return the environment without the trainer's variables."""
    env = {key: value for key, value in os.environ.items() if key not in (*DROPPED, TOKEN)}
    return env | {"PYTHONUNBUFFERED": "1"}


# configuration: pure functions -----------------------------------------------------------------------------------


def servers_of(tree: dict[str, Any], required: str = "entrypoint") -> dict[str, Server]:
    """Return every server that has the required field, by name; the other entries are settings."""
    servers: dict[str, Server] = {}
    for name, entry in tree.items():
        for kind in KINDS if isinstance(entry, dict) else ():
            inner = entry.get(kind)
            folder, fields = next(iter(inner.items()), ("", None)) if isinstance(inner, dict) else ("", None)
            if isinstance(fields, dict) and fields.get(required) is not None:
                servers.setdefault(name, Server(kind, folder, fields))
    return servers


def references(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of every server that the fields of a server refer to."""
    if isinstance(value, dict):
        if value.get("type") in KINDS and isinstance(value.get("name"), str):
            yield value["type"], value["name"]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from references(inner)


def with_references(tree: dict[str, Any], names: Collection[str]) -> list[str]:
    """Return the names of these servers and of all servers that they refer to."""
    servers, closure = servers_of(tree), sorted(names)
    for name in closure:  # grows
        closure += sorted({other for _, other in references(servers[name].fields) if other in servers} - set(closure))
    return closure


def with_model(tree: dict[str, Any], names: Sequence[str], model: tuple[str, str] | None) -> dict[str, Any]:
    """Return the configuration with the run's endpoint in place of the placeholders."""
    tree = copy.deepcopy(tree)
    servers = servers_of(tree)
    agents = [servers[name].fields for name in names if servers[name].kind == AGENTS]
    referenced = {name for fields in agents for kind, name in references(fields) if kind == MODELS and name in servers}
    waiting = [name for name in names if name in referenced or PLACEHOLDER in json.dumps(servers[name].fields)]
    if waiting and model is None:
        raise UserError(
            f"rollout.engine=local: the gym's server {waiting[0]} uses the model in training to verify, while the "
            "in-process engine waits for it; use --rollout.engine vllm"
        )
    url, token = model or ("", "")
    values = {"base_url": [url], "api_key": token, "model": "policy"}
    for name in referenced:
        _, folder, fields = servers[name]
        if folder == "dummy_model":  # the files contain no model server
            tree[name][MODELS] = {"vllm_model": fields}
            fields["uses_reasoning_parser"] = False
        fields |= values | {"return_token_id_information": False}  # the endpoint keeps the ids
    return _replace(tree, {f"{PLACEHOLDER}{key}": value for key, value in values.items()})


def _replace(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _replace(inner, values) for key, inner in value.items()}
    if isinstance(value, list):
        return [_replace(inner, values) for inner in value]
    return values.get(value, value) if isinstance(value, str) else value
