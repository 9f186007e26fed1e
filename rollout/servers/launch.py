"""Start and stop local vLLM servers and wait until they are ready.

    server = launch(VllmConfig(), model="trainer/tiny", lora_rank=8, log_dir=Path("runs/dev/logs"))
    with server:
        wait_ready([server], timeout=600)
        httpx.get(f"{server.url}/v1/models", headers=server.headers)

Each server is a child of worker/strop_guard.py, which ends it when this process dies, even by kill -9. If the guard is
killed too, the next start finds the leftovers through the server's scratch folder and removes them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from data.errors import UserError
from rollout.servers.command import TOKEN, WORKER, serve_command
from rollout.servers.options import LOOPBACK, VllmConfig
from rollout.servers.token import TokenFile
from rollout.servers.worker.strop_guard import RECORD, SHARED, shared_memory_of

Log = Callable[[str], None]
PROGRESS_S = 15.0  # seconds between progress lines within one phase
STOP_WAIT = 25.0  # the guard takes at most 20 for TERM and KILL
SCRATCH = "strop-vllm-"  # prefix of scratch folders
LOCK = "guard.lock"  # in a scratch folder: locked while its guard is alive


class Launched:
    """One server and its processes. The context manager stops the server on exit."""

    def __init__(
        self, cfg: VllmConfig, *, replica: int, token: str | None, log_path: Path | None, **serve: Any
    ) -> None:
        self.cfg = cfg
        self.replica = replica
        self.token = token
        self.log_path = log_path  # None: the server inherits stderr
        self.url = ""
        self.num_starts = 0
        self.was_ready = False  # since the last start
        self._serve = serve
        self._guard: subprocess.Popen[bytes] | None = None
        self._group: int | None = None
        self._port: socket.socket | None = None
        self._scratch = ""
        self._token_file: TokenFile | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self.is_stopped = False  # by stop(): the server cannot be restarted
        self._start()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @property
    def token_path(self) -> Path | None:
        """File where a trainer of the same user on this machine finds the token."""
        return None if self._token_file is None else self._token_file.path

    @property
    def gpus(self) -> list[str]:
        """The server's entries for CUDA_VISIBLE_DEVICES; empty on a CPU."""
        return list(self._serve.get("gpus", ()))

    @property
    def pids(self) -> list[int]:
        """Process ids of the guard and the server's process group; empty once the server has ended."""
        guard = [self._guard.pid] if self._guard is not None and self._guard.poll() is None else []
        return guard + (group_members(self._group) if self._group is not None else [])

    def poll(self) -> int | None:
        """Return the exit status (128 + N after signal N), or None while the server runs."""
        return None if self._guard is None else self._guard.poll()

    def cause(self) -> str:
        """Return why the server ended, in one line."""
        status = self.poll() or 0
        if status == 128 + signal.SIGILL:
            return "the CPU lacks an instruction for this dtype (SIGILL); use --vllm.dtype float32"
        if status == 128 + signal.SIGKILL and not self._log_text().strip():
            return "killed (SIGKILL)"
        return cause_of(self._log_text()) if self.log_path else f"exit status {status}; see the output above"

    def phase(self) -> str:
        return phase_of(self._log_text())

    def restart(self) -> None:
        """End the server's processes and start it again with a new log file, and a new port unless --vllm.port is set.

        Raises ValueError if stop() is called before or during the restart.
        """
        with self._lock:
            self._end()
            if self.log_path is not None and not self.is_stopped:
                self.log_path = self.log_path.with_name(f"vllm-{self.replica}.{self.num_starts + 1}.log")
            self._start()

    def stop(self) -> None:
        """End the server for good and wait until all its processes are gone. Idempotent and thread-safe: a restart in
        progress is abandoned, or finishes and is then ended.
        """
        if os.getpid() != self._owner:  # a forked child that exits must not end its parent's server
            return
        self.is_stopped = True
        with self._lock:
            self._end()

    def _end(self) -> None:
        atexit.unregister(self.stop)
        if self._token_file is not None:
            self._token_file.close()
        if self._port is not None:
            self._port.close()
            self._port = None
        guard = self._guard
        if guard is None or guard.stdin is None or guard.stdin.closed:
            return
        if not self.was_ready:  # a loading server reacts slowly to TERM and has no request to finish
            guard.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            guard.stdin.close()
        try:
            guard.wait(STOP_WAIT)
        except subprocess.TimeoutExpired:  # the guard itself is suspended
            guard.kill()
            guard.wait()
        if self._group is not None and group_members(self._group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        self._group = None
        remove_leftovers(Path(self._scratch))  # nothing to do unless the guard was killed

    def _log_text(self) -> str:
        return read_tail(self.log_path) if self.log_path else ""

    def _start(self) -> None:
        if self.is_stopped:
            raise UserError(f"vLLM server {self.replica}: stopped and cannot be restarted")
        self._port = reserve(self.cfg.host, self.cfg.port + self.replica if self.cfg.port else 0)
        port = self._port.getsockname()[1]
        try:
            argv, env = serve_command(self.cfg, port=port, token=self.token, **self._serve)
            if self.token:
                self._token_file = TokenFile(self.cfg.host, port, self.token)
            if self.log_path is not None:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
            output = None if self.log_path is None else self.log_path.open("wb")
        except BaseException:
            self._end()
            raise
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.cfg.host, self.cfg.host)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        # vLLM leaves sockets and files in its temporary folder, so each server gets one that is deleted when it ends.
        # A socket path has at most 107 characters, so the folder's path must be short.
        temporary = tempfile.gettempdir()
        parent = Path(temporary if len(temporary) <= 40 else "/tmp")
        sweep(parent, SCRATCH, LOCK, remove_leftovers)
        self._scratch = tempfile.mkdtemp(prefix=SCRATCH, dir=parent)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(temporary) / f"torchinductor_{os.getuid()}"))  # not deleted
        env |= {"TMPDIR": self._scratch, "STROP_GUARDED": "1"}
        lock = (Path(self._scratch) / f"new-{LOCK}").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)  # inherited by the guard and held until the guard ends in any way
        Path(lock.name).rename(Path(self._scratch) / LOCK)  # so LOCK is never visible unlocked while the guard is alive
        read_end, write_end = os.pipe()
        guard = [sys.executable, str(WORKER / "strop_guard.py"), "--scratch", self._scratch, "--pid-fd", str(write_end)]
        try:
            self._guard = subprocess.Popen(
                [*guard, "--", *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=(write_end, lock.fileno()),
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the server
            )
        finally:
            os.close(write_end)
            lock.close()
            if output is not None:
                output.close()
        atexit.register(self.stop)
        with os.fdopen(read_end) as pipe:
            pid = pipe.readline().strip()
        self._group = int(pid) if pid.isdigit() else None
        self.was_ready = False
        self.num_starts += 1


def launch(
    cfg: VllmConfig,
    *,
    model: str,
    log_dir: Path | None = None,
    replica: int = 0,
    device: str = "cpu",
    first_gpu: int = 0,
    log: Log = print,
    **serve: Any,
) -> Launched:
    """Start one server without waiting for it; see wait_ready. `serve`: further arguments of serve_command.

    `first_gpu`: first GPU to use if --vllm.devices is empty: the GPU after the trainer's, or 0 with colocate. The token
    is STROP_VLLM_TOKEN or random. A token is always set: without it, anyone who can reach the server could replace its
    weights.
    """
    check_host(cfg)
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(32)
    gpus = gpus_of(cfg, replica, first_gpu) if device == "cuda" else []
    log_path = None if log_dir is None else Path(log_dir) / f"vllm-{replica}.log"
    model = str(Path(model).resolve()) if Path(model).is_dir() else model
    server = Launched(
        cfg, replica=replica, token=token, log_path=log_path, model=model, device=device, gpus=gpus, **serve
    )
    on = f" on GPU {','.join(gpus)}" if gpus else ""
    log(f"vLLM server {replica}: starting{on} at {server.url}" + (f", log in {log_path}" if log_path else ""))
    return server


def check_host(cfg: VllmConfig) -> None:
    """Raise if other machines can reach the server without STROP_VLLM_TOKEN: a trainer cannot know a random token."""
    if cfg.host not in LOOPBACK and not os.environ.get(TOKEN):
        raise UserError(
            f"vllm.host={cfg.host}: other machines could replace the weights; set --vllm.host 127.0.0.1, or the same "
            f"token for server and trainer: export {TOKEN}=$(python -c 'import secrets; "
            "print(secrets.token_urlsafe(32))')"
        )


def gpus_of(cfg: VllmConfig, replica: int, first_gpu: int) -> list[str]:
    """Return the replica's entries for CUDA_VISIBLE_DEVICES; --vllm.devices indexes GPUs visible to this process."""
    size = cfg.tensor_parallel_size
    start = replica * size
    indices = cfg.devices[start : start + size] or range(first_gpu + start, first_gpu + start + size)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(index) for index in indices]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if max(indices) >= len(names):
        raise UserError(
            f"vllm.devices={' '.join(map(str, indices))}: CUDA_VISIBLE_DEVICES={visible} has only {len(names)} GPUs "
            f"(indices start at 0); add GPUs to it, or lower --vllm.replicas or --vllm.tensor-parallel-size"
        )
    return [names[index] for index in indices]


def wait_ready(launched: Sequence[Launched], timeout: float, log: Log = print) -> None:
    """Return once all servers respond. Raise ValueError if one fails, with the cause; stop no server."""
    start = time.monotonic()
    waiting = {server: ("", start) for server in launched}  # last logged phase and its time
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while waiting:
            for server in list(waiting):
                name = f"vLLM server {server.replica}"
                seconds = time.monotonic() - start
                if server.is_stopped:
                    raise UserError(f"{name}: stopped before it was ready")
                if server.poll() is not None:
                    log_hint = f" (log: {server.log_path})" if server.log_path else ""
                    raise UserError(f"{name}: failed to start: {server.cause()}{log_hint}")
                if is_up(client, server):
                    server.was_ready = True
                    log(f"{name}: ready after {seconds:.0f} s")
                    del waiting[server]
                elif seconds > timeout:
                    raise UserError(
                        f"vllm.startup_timeout={timeout:g}: {name.replace('vLLM ', '')} is still {server.phase()}; "
                        f"raise --vllm.startup-timeout, or see {server.log_path or 'the output above'}"
                    )
                else:
                    waiting[server] = _log_progress(server, name, seconds, waiting[server], log)
            if waiting:
                time.sleep(0.25)


def stop_all(launched: Sequence[Launched]) -> None:
    """Stop all servers concurrently, since each may take seconds."""
    with ThreadPoolExecutor(max(len(launched), 1)) as threads:
        list(threads.map(Launched.stop, launched))


def is_up(client: httpx.Client, server: Launched) -> bool:
    try:
        status = client.get(f"{server.url}/health", headers=server.headers).status_code
    except httpx.HTTPError:
        return False
    if status == 401:
        raise UserError(f"vllm.port={server.url.rpartition(':')[2]}: used by another server; choose another port")
    return status == 200


def _log_progress(server: Launched, name: str, seconds: float, last: tuple[str, float], log: Log) -> tuple[str, float]:
    phase, now = server.phase(), time.monotonic()
    if server.log_path is None or (phase == last[0] and now - last[1] < PROGRESS_S):
        return last
    log(f"{name}: {seconds:.0f} s, {phase}")
    return phase, now


# ports, and leftovers of a killed guard --------------------------------------------------------------------------


def reserve(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen. It reserves `port` (0: a free port) for a server that sets
    SO_REUSEADDR and SO_REUSEPORT, as vLLM does: no other process can bind the port first.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port:
            with socket.socket(family, socket.SOCK_STREAM) as probe:  # two vLLM 0.24 servers would share the port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)
        reserved = socket.socket(family, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host, port))
    except PermissionError:
        raise UserError(f"vllm.port={port}: not allowed for this user; use a port above 1023, or 0") from None
    except OSError as error:
        if isinstance(error, socket.gaierror) or "assign" in str(error):
            raise UserError(f"vllm.host={host}: not an address of this machine; use 127.0.0.1") from None
        raise UserError(
            f"vllm.port={port}: in use; stop the process that uses it, or pass 0 for a free port; if it is "
            f"rollout.serve, start the trainer with --vllm.url http://{host}:{port}"
        ) from None
    return reserved


def sweep(parent: Path, prefix: str, lock: str, remove: Callable[[Path], None]) -> None:
    """Remove this user's folders with this prefix whose owner was killed and so lost its lock on a file in them."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's folder, locked by a living owner, or being removed
            if folder.stat().st_uid == os.getuid():
                with (folder / lock).open("r+") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(folder)


def remove_leftovers(scratch: Path) -> None:
    """Kill the processes of this scratch folder, then remove their shared memory and the folder."""
    shared = set()
    with contextlib.suppress(OSError):
        shared |= set((scratch / RECORD).read_text(encoding="utf-8").split())
    for pid in processes_in(scratch):
        shared |= shared_memory_of(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for name in shared:
        if SHARED.fullmatch(name):  # never delete anything else, whatever the file contains
            with contextlib.suppress(OSError):
                os.unlink(name)
    shutil.rmtree(scratch, ignore_errors=True)


def processes_in(scratch: Path) -> list[int]:
    """Return the processes whose TMPDIR is `scratch`: a server and its descendants."""
    pids = []
    variable = f"TMPDIR={scratch}".encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):  # the process has ended or belongs to another user
            if name.isdigit() and variable in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                pids.append(int(name))
    return pids


def group_members(group: int) -> list[int]:
    """Return the living processes of a process group from /proc; without /proc, only the leader."""
    pids = []
    try:
        entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        entries = [group]
    for pid in entries:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and not _is_zombie(pid):
                pids.append(pid)
    return sorted(pids)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


# reading a server's log ------------------------------------------------------------------------------------------


TAIL_BYTES = 2**18
MAX_CAUSE = 240  # characters

# The last match in the log gives the current phase.
PHASES = (
    (re.compile(r"Resolved architecture|non-default args"), "reading the model's config"),
    (re.compile(r"Initializing a V1 LLM engine|Starting EngineCore|world_size=\d+ rank="), "starting the engine"),
    (re.compile(r"Starting to load model|Loading safetensors|Loading weights"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "setting up memory"),
    (re.compile(r"Dynamo bytecode transform|Compiling a graph"), "compiling"),
    (re.compile(r"Capturing CUDA graphs|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"init engine|Available routes|Application startup"), "opening its port"),
)
# Example: "(EngineCore pid=7) ERROR 11-15 07:58:37 [core.py:9] "
PREFIX = re.compile(
    r"^(?:\([\w-]+(?: [\w-]+=\S+)*\)\s*)?(?:(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?"
)
ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Failure))\b:?\s*(.*)$")
USAGE = re.compile(r"^\S+: error: (.*)$")  # argparse
VALIDATION = re.compile(r"^\s+(?:Value error|Assertion failed), (.*?)(?: \[type=.*)?$")  # pydantic
ECHOES = ("Engine core initialization failed", "WorkerProc initialization failed", "Engine process failed to start",
          "cancelled", "EngineCore failed")  # fmt: skip


def read_tail(path: Path) -> str:
    """Return the last TAIL_BYTES of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def phase_of(text: str) -> str:
    """Return the phase of a starting server, in words."""
    phases = [(match.start(), words) for pattern, words in PHASES for match in pattern.finditer(text)]
    return max(phases)[1] if phases else "importing vLLM"


def cause_of(text: str) -> str:
    """Return the log line that best explains why a server ended: the first error that does not repeat another's."""
    lines = [PREFIX.sub("", line) for line in text.splitlines()]
    for line in lines:
        match = USAGE.match(line) or VALIDATION.match(line)
        if match:
            return _shorten(match[1].strip())
    errors = [match for line in lines if (match := ERROR.match(line))]
    causes = [match for match in errors if match[2] and not any(echo in match[2] for echo in ECHOES)]
    if causes:
        return _shorten(f"{causes[0][1]}: {causes[0][2].strip()}")
    if errors:
        return errors[0][0].strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")


def _shorten(text: str) -> str:
    """Return the first sentences: vLLM adds advice about environment variables."""
    if len(text) <= MAX_CAUSE:
        return text
    end = text.rfind(". ", 0, MAX_CAUSE)
    return text[:end] if end > 0 else text[:MAX_CAUSE] + "..."
