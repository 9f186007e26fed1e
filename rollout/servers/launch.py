"""vLLM servers of our own: started with the right flags, watched while they start, ended with whoever started them.

    server = launch(VllmConfig(), model="trainer/tiny", lora_rank=8, log_dir=Path("runs/dev/logs"))
    with server:
        wait_ready([server], timeout=600)
        httpx.get(f"{server.url}/v1/models", headers=server.headers)

Each server is the child of worker/strop_guard.py, which ends it when we die, even by kill -9. If the guard is killed
too, the next start finds what is left by the server's scratch folder and removes it.

What a vLLM server's log says: how far its start is, and why it failed.
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

from rollout.servers.command import BASE, SUPPORTED, TOKEN, WORKER, find_python, serve_command, vllm_version
from rollout.servers.options import LOOPBACK, VllmConfig
from rollout.servers.token import TokenFile
from rollout.servers.worker.strop_guard import RECORD, SHARED, shared_memory_of

TAIL_BYTES = 2**18
LONGEST = 240  # characters of a cause

# The one found last in the log names what the server is busy with.
PHASES = (
    (re.compile(r"Resolved architecture|non-default args"), "reading the model's config"),
    (re.compile(r"Initializing a V1 LLM engine|Starting EngineCore|world_size=\d+ rank="), "starting the engine"),
    (re.compile(r"Starting to load model|Loading safetensors|Loading weights"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "setting up memory"),
    (re.compile(r"Dynamo bytecode transform|Compiling a graph"), "compiling"),
    (re.compile(r"Capturing CUDA graphs|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"init engine|Available routes|Application startup"), "opening its port"),
)
# "(EngineCore pid=7) ERROR 11-15 07:58:37 [core.py:9] " and the like
PREFIX = re.compile(
    r"^(?:\([\w-]+(?: [\w-]+=\S+)*\)\s*)?(?:(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?"
)
ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Failure))\b:?\s*(.*)$")
USAGE = re.compile(r"^\S+: error: (.*)$")  # argparse
VALIDATION = re.compile(r"^\s+(?:Value error|Assertion failed), (.*?)(?: \[type=.*)?$")  # pydantic
TAKEN = re.compile(r"Address already in use|address already in use")
ECHOES = ("Engine core initialization failed", "WorkerProc initialization failed", "Engine process failed to start",
          "cancelled", "EngineCore failed")  # fmt: skip


def read_tail(path: Path) -> str:
    """The end of a log that may be long."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def phase_of(text: str) -> str:
    """What a server is busy with, in words."""
    found = [(match.start(), words) for pattern, words in PHASES for match in pattern.finditer(text)]
    return max(found)[1] if found else "importing vLLM"


def is_port_taken(text: str) -> bool:
    return TAKEN.search(text) is not None


def cause_of(text: str) -> str:
    """The line that says best why a server ended: its first error that is not an echo of another process's."""
    lines = [PREFIX.sub("", line) for line in text.splitlines()]
    for line in lines:
        found = USAGE.match(line) or VALIDATION.match(line)
        if found:
            return _shortened(found[1].strip())
    errors = [found for line in lines if (found := ERROR.match(line))]
    causes = [found for found in errors if found[2] and not any(echo in found[2] for echo in ECHOES)]
    if causes:
        return _shortened(f"{causes[0][1]}: {causes[0][2].strip()}")
    if errors:
        return errors[0][0].strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


def _shortened(text: str) -> str:
    """Its first sentences: vLLM goes on with advice about variables to set."""
    if len(text) <= LONGEST:
        return text
    end = text.rfind(". ", 0, LONGEST)
    return text[:end] if end > 0 else text[:LONGEST] + "..."


__all__ = ["BASE", "SUPPORTED", "Launched", "find_python", "launch", "serve_command", "stop_all", "vllm_version",
           "wait_ready"]  # fmt: skip

Log = Callable[[str], None]
PORT_TRIES = 5
PROGRESS_S = 15.0  # seconds between lines of progress within one phase
STOP_WAIT = 25.0  # the guard takes at most 20 for TERM and KILL
SCRATCH = "strop-vllm-"  # how the names of scratch folders begin
LOCK = "guard.lock"  # in a scratch folder: locked as long as its guard lives


class Launched:
    """One server and the processes that make it up. As a context manager it is stopped at the end."""

    def __init__(
        self, cfg: VllmConfig, *, replica: int, token: str | None, log_path: Path | None, **serve: Any
    ) -> None:
        self.cfg = cfg
        self.replica = replica
        self.token = token
        self.log_path = log_path  # None: the server writes to our own stderr
        self.url = ""
        self.num_starts = 0
        self.was_ready = False  # since it was last started
        self._serve = serve
        self._guard: subprocess.Popen[bytes] | None = None
        self._group: int | None = None
        self._port: socket.socket | None = None
        self._scratch = ""
        self._token_file: TokenFile | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
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
        """Where a trainer of this user on this machine finds the token."""
        return None if self._token_file is None else self._token_file.path

    @property
    def gpus(self) -> list[str]:
        """Its entries for CUDA_VISIBLE_DEVICES; empty on a CPU."""
        return list(self._serve.get("gpus", ()))

    @property
    def is_stopped(self) -> bool:
        """For good: stop() was called."""
        return self._closed

    @property
    def pids(self) -> list[int]:
        """Process ids of the guard and of everything in the server's group; empty when it has ended."""
        guard = [self._guard.pid] if self._guard is not None and self._guard.poll() is None else []
        return guard + (group_members(self._group) if self._group is not None else [])

    def poll(self) -> int | None:
        """Exit status once the server has ended (above 128: that signal), else None."""
        return None if self._guard is None else self._guard.poll()

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        return "\n".join(self._text().splitlines()[-lines:])

    def cause(self) -> str:
        """Why it ended, in one line."""
        status = self.poll() or 0
        if status == 128 + signal.SIGILL:
            return "its CPU lacks an instruction that this dtype needs (SIGILL); use --vllm.dtype float32"
        if status == 128 + signal.SIGKILL and not self._text().strip():
            return "it was killed (SIGKILL)"
        return cause_of(self._text()) if self.log_path else f"it ended with status {status}; see above"

    def phase(self) -> str:
        return phase_of(self._text())

    def restart(self) -> None:
        """End what is left of it and start it again: on another port when we chose it, with a log of its own.

        ValueError when it was stopped for good, also when that happens in the meantime.
        """
        with self._lock:
            self._end()
            if self.log_path is not None and not self._closed:
                self.log_path = self.log_path.with_name(f"vllm-{self.replica}.{self.num_starts + 1}.log")
            self._start()

    def stop(self) -> None:
        """End every process of this server for good and wait until they are gone. May be called again, and from any
        thread: one that is just starting it again either gives that up, or is waited for and ended.
        """
        if os.getpid() != self._owner:  # a fork of ours at its end: the server is not its to end
            return
        self._closed = True
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
        if not self.was_ready:  # a server that only loads may take long over TERM, and has nothing to finish
            guard.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            guard.stdin.close()
        try:
            guard.wait(STOP_WAIT)
        except subprocess.TimeoutExpired:  # someone stopped the guard itself
            guard.kill()
            guard.wait()
        if self._group is not None and group_members(self._group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        self._group = None
        remove_leftovers(Path(self._scratch))  # nothing, unless the guard was killed

    def _text(self) -> str:
        return read_tail(self.log_path) if self.log_path else ""

    def _start(self) -> None:
        if self._closed:
            raise ValueError(f"vLLM server {self.replica}: was stopped and does not start again")
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
            self._port.close()
            if self._token_file is not None:
                self._token_file.close()
            raise
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.cfg.host, self.cfg.host)
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        # vLLM leaves sockets and files in the temporary folder; this one goes when it ends. The name of a socket has at
        # most 107 characters, so a long path will not do.
        home = tempfile.gettempdir()
        parent = Path(home if len(home) <= 40 else "/tmp")
        sweep(parent)
        self._scratch = tempfile.mkdtemp(prefix=SCRATCH, dir=parent)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(home) / f"torchinductor_{os.getuid()}"))  # kept
        env |= {"TMPDIR": self._scratch, "STROP_GUARDED": "1"}
        lock = (Path(self._scratch) / f"new-{LOCK}").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)  # the guard inherits it and holds it until it ends, however it ends
        Path(lock.name).rename(Path(self._scratch) / LOCK)  # nobody ever sees it unlocked while the guard lives
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
                start_new_session=True,  # Ctrl-C reaches us alone, and we end it
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
    lora_rank: int = 0,
    log_dir: Path | None = None,
    replica: int = 0,
    device: str = "cpu",
    max_model_len: int | None = None,
    log: Log = print,
    dtype: str = "auto",
    colocate: bool = False,
    first_gpu: int = 0,
    trust_remote_code: bool = False,
) -> Launched:
    """Start one server and return at once; wait_ready waits for it.

    `first_gpu` is the first GPU that may be used when --vllm.devices names none: that after the trainer's, or 0 with
    colocate. The token is that of STROP_VLLM_TOKEN, or a random one; there always is one, as whoever reaches a server
    without could replace its weights.
    """
    check_host(cfg)
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(32)
    gpus = gpus_of(cfg, replica, first_gpu) if device == "cuda" else []
    log_path = None if log_dir is None else Path(log_dir) / f"vllm-{replica}.log"
    server = Launched(
        cfg,
        replica=replica,
        token=token,
        log_path=log_path,
        model=str(Path(model).resolve()) if Path(model).is_dir() else model,
        device=device,
        gpus=gpus,
        lora_rank=lora_rank,
        dtype=dtype,
        colocate=colocate,
        max_model_len=max_model_len,
        trust_remote_code=trust_remote_code,
    )
    on = f" on GPU {','.join(gpus)}" if gpus else ""
    log(f"vLLM server {replica}: starting{on} at {server.url}" + (f", log in {log_path}" if log_path else ""))
    return server


def check_host(cfg: VllmConfig) -> None:
    """A server that others can reach needs a token that its trainer can be told."""
    if cfg.host not in LOOPBACK and not os.environ.get(TOKEN):
        raise ValueError(
            f"vllm.host={cfg.host}: whoever reaches it could replace the weights; give server and trainer a token: "
            f"export {TOKEN}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )


def gpus_of(cfg: VllmConfig, replica: int, first_gpu: int) -> list[str]:
    """Entries for CUDA_VISIBLE_DEVICES; numbers of ours count within the GPUs that we may see ourselves."""
    size = cfg.tensor_parallel_size
    start = replica * size
    numbers = cfg.devices[start : start + size] or range(first_gpu + start, first_gpu + start + size)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in numbers]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if max(numbers) >= len(names):
        raise ValueError(
            f"vllm.devices={' '.join(map(str, numbers))}: CUDA_VISIBLE_DEVICES={visible} shows {len(names)} GPUs, "
            f"counted from 0; show more, or lower --vllm.replicas or --vllm.tensor-parallel-size"
        )
    return [names[number] for number in numbers]


def wait_ready(launched: Sequence[Launched], timeout: float, log: Log = print) -> None:
    """Return when every server answers; ValueError says which failed and why. Ends none of them."""
    begun = time.monotonic()
    waiting = {server: ("", begun) for server in launched}  # the phase last told, and when
    tries = {server: 1 for server in launched}
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while waiting:
            for server in list(waiting):
                name = f"vLLM server {server.replica}"
                seconds = time.monotonic() - begun
                if server.is_stopped:
                    raise ValueError(f"{name}: was stopped before it was ready")
                if server.poll() is not None:
                    _start_again(server, name, tries, log)
                elif is_up(client, server):
                    server.was_ready = True
                    log(f"{name}: ready after {seconds:.0f} s")
                    del waiting[server]
                elif seconds > timeout:
                    raise ValueError(
                        f"vllm.startup_timeout={timeout:g}: {name.replace('vLLM ', '')} is still {server.phase()}; "
                        f"raise it, or see {server.log_path or 'above'}"
                    )
                else:
                    waiting[server] = _log_progress(server, name, seconds, waiting[server], log)
            if waiting:
                time.sleep(0.25)


def stop_all(launched: Sequence[Launched]) -> None:
    """At the same time, as each may take seconds."""
    with ThreadPoolExecutor(max(len(launched), 1)) as threads:
        list(threads.map(Launched.stop, launched))


def is_up(client: httpx.Client, server: Launched) -> bool:
    try:
        status = client.get(f"{server.url}/health", headers=server.headers).status_code
    except httpx.HTTPError:
        return False
    if status == 401:
        raise ValueError(f"vllm.port={server.url.rpartition(':')[2]}: another server answers there; take another port")
    return status == 200


def _log_progress(server: Launched, name: str, seconds: float, last: tuple[str, float], log: Log) -> tuple[str, float]:
    phase, now = server.phase(), time.monotonic()
    if server.log_path is None or (phase == last[0] and now - last[1] < PROGRESS_S):
        return last
    log(f"{name}: {seconds:.0f} s, {phase}")
    return phase, now


def _start_again(server: Launched, name: str, tries: dict[Launched, int], log: Log) -> None:
    """Another port, if that was all that was wrong and the port was our choice; else the reason, as an error."""
    taken = is_port_taken(server.tail(lines=2000))
    if taken and server.cfg.port:
        port = server.cfg.port + server.replica
        raise ValueError(f"vllm.port={port}: is in use; stop what uses it, or pass 0 for a free one")
    if not taken or tries[server] == PORT_TRIES:
        where = f" (log: {server.log_path})" if server.log_path else ""
        raise ValueError(f"{name}: did not start: {server.cause()}{where}")
    tries[server] += 1
    server.restart()
    log(f"{name}: its port was taken meanwhile, trying {server.url}")


def reserve(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen. It keeps `port` (0: a free one) from everybody but a server that sets
    SO_REUSEADDR and SO_REUSEPORT, as vLLM does, so that nobody can take it between our choice and the server's bind.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port:
            with socket.socket(family, socket.SOCK_STREAM) as probe:  # vLLM 0.24 would share a port with another vLLM
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen(1)
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except socket.gaierror:
        raise ValueError(f"vllm.host={host}: is no address of this machine; use 127.0.0.1") from None
    except PermissionError:
        raise ValueError(f"vllm.port={port}: is not allowed for this user; take one above 1023, or 0") from None
    except OSError as error:
        what = "is in use; stop what uses it, or pass 0 for a free one"
        if "assign" in str(error):
            raise ValueError(f"vllm.host={host}: is no address of this machine; use 127.0.0.1") from None
        raise ValueError(f"vllm.port={port}: {what}") from None
    return held


def sweep(parent: Path) -> None:
    """Remove what is left of servers of ours whose guard was killed."""
    for scratch in parent.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, a living guard's, or someone else removes it now
            if scratch.stat().st_uid == os.getuid():
                with (scratch / LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_leftovers(scratch)


def remove_leftovers(scratch: Path) -> None:
    """Kill processes that live in this scratch folder, then remove their shared memory and the folder."""
    shared = set()
    with contextlib.suppress(OSError):
        shared |= set((scratch / RECORD).read_text(encoding="utf-8").split())
    for pid in processes_in(scratch):
        shared |= shared_memory_of(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for name in shared:
        if SHARED.fullmatch(name):  # nothing else, whatever the file says
            with contextlib.suppress(OSError):
                os.unlink(name)
    shutil.rmtree(scratch, ignore_errors=True)


def processes_in(scratch: Path) -> list[int]:
    """Processes whose folder for temporary files is `scratch`: a server and all it started."""
    found = []
    mark = f"TMPDIR={scratch}".encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def group_members(group: int) -> list[int]:
    """Living processes of a process group, from /proc; just its leader where there is no /proc."""
    found = []
    try:
        entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        entries = [group]
    for pid in entries:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group and not _is_zombie(pid):
                found.append(pid)
    return sorted(found)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False
