"""Start, await and stop vLLM servers of our own.

    server = launch(VllmConfig(), model="trainer/tiny", lora_rank=8, log_dir=Path("runs/dev/logs"))
    with server:
        wait_ready([server], timeout=600)
        httpx.get(f"{server.url}/v1/models", headers=server.headers)

Each server is the child of worker/strop_guard.py, which ends it when this process dies, even by kill -9. If the guard
is killed too, the next start finds what is left through the server's scratch folder and removes it.

In this file: Launched (one server's processes), launch, wait_ready, stop_all; ports and leftovers; reading the
server's log for the phase of its start and the cause of a failure.
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
    """One server and its processes. As a context manager, it stops the server at the end."""

    def __init__(
        self, cfg: VllmConfig, *, replica: int, token: str | None, log_path: Path | None, **serve: Any
    ) -> None:
        self.cfg = cfg
        self.replica = replica
        self.token = token
        self.log_path = log_path  # None: the server writes to our stderr
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
        """File in which a trainer of this user on this machine finds the token."""
        return None if self._token_file is None else self._token_file.path

    @property
    def gpus(self) -> list[str]:
        """Its entries for CUDA_VISIBLE_DEVICES; empty on a CPU."""
        return list(self._serve.get("gpus", ()))

    @property
    def is_stopped(self) -> bool:
        """Whether stop() was called: it does not start again."""
        return self._closed

    @property
    def pids(self) -> list[int]:
        """Process ids of the guard and of the server's process group; empty once it has ended."""
        guard = [self._guard.pid] if self._guard is not None and self._guard.poll() is None else []
        return guard + (group_members(self._group) if self._group is not None else [])

    def poll(self) -> int | None:
        """Exit status once the server has ended (above 128: that signal), else None."""
        return None if self._guard is None else self._guard.poll()

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
        """End what is left of it and start it again: on another port if we chose the port, with a new log file.

        ValueError if stop() was called, before or meanwhile.
        """
        with self._lock:
            self._end()
            if self.log_path is not None and not self._closed:
                self.log_path = self.log_path.with_name(f"vllm-{self.replica}.{self.num_starts + 1}.log")
            self._start()

    def stop(self) -> None:
        """End every process of this server for good and wait until they are gone. May be called twice and from any
        thread: a restart in progress is abandoned, or awaited and then ended.
        """
        if os.getpid() != self._owner:  # a forked child that exits must not end its parent's server
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
        if not self.was_ready:  # a server that is still loading reacts slowly to TERM, and has nothing to finish
            guard.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            guard.stdin.close()
        try:
            guard.wait(STOP_WAIT)
        except subprocess.TimeoutExpired:  # somebody suspended the guard itself
            guard.kill()
            guard.wait()
        if self._group is not None and group_members(self._group):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        self._group = None
        remove_leftovers(Path(self._scratch))  # nothing to do unless the guard was killed

    def _text(self) -> str:
        return read_tail(self.log_path) if self.log_path else ""

    def _start(self) -> None:
        if self._closed:
            raise UserError(f"vLLM server {self.replica}: was stopped and does not start again")
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
        # vLLM leaves sockets and files in the temporary folder; this one is deleted when it ends. The path of a socket
        # has at most 107 characters, so the folder must not have a long path.
        home = tempfile.gettempdir()
        parent = Path(home if len(home) <= 40 else "/tmp")
        sweep(parent)
        self._scratch = tempfile.mkdtemp(prefix=SCRATCH, dir=parent)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(home) / f"torchinductor_{os.getuid()}"))  # kept
        env |= {"TMPDIR": self._scratch, "STROP_GUARDED": "1"}
        lock = (Path(self._scratch) / f"new-{LOCK}").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)  # inherited by the guard, and held until it ends in any way
        Path(lock.name).rename(Path(self._scratch) / LOCK)  # so nobody sees it unlocked while the guard is alive
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
                start_new_session=True,  # Ctrl-C reaches only us, and we end the server
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
    grouped: bool = False,
) -> Launched:
    """Start one server and return at once; wait_ready waits for it.

    `first_gpu`: the first GPU to use if --vllm.devices names none; the one after the trainer's, or 0 with colocate. The
    token is that of STROP_VLLM_TOKEN or a random one. There always is one: without a token anybody who reaches the
    server could replace its weights.
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
        grouped=grouped,
    )
    on = f" on GPU {','.join(gpus)}" if gpus else ""
    log(f"vLLM server {replica}: starting{on} at {server.url}" + (f", log in {log_path}" if log_path else ""))
    return server


def check_host(cfg: VllmConfig) -> None:
    """A server that other machines can reach needs a token that its trainer can know, not a random one."""
    if cfg.host not in LOOPBACK and not os.environ.get(TOKEN):
        raise UserError(
            f"vllm.host={cfg.host}: anybody who reaches it could replace the weights; give server and trainer a token: "
            f"export {TOKEN}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )


def gpus_of(cfg: VllmConfig, replica: int, first_gpu: int) -> list[str]:
    """Entries for CUDA_VISIBLE_DEVICES; --vllm.devices counts within the GPUs visible to this process."""
    size = cfg.tensor_parallel_size
    start = replica * size
    numbers = cfg.devices[start : start + size] or range(first_gpu + start, first_gpu + start + size)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in numbers]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if max(numbers) >= len(names):
        raise UserError(
            f"vllm.devices={' '.join(map(str, numbers))}: CUDA_VISIBLE_DEVICES={visible} shows {len(names)} GPUs, "
            f"counted from 0; show more, or lower --vllm.replicas or --vllm.tensor-parallel-size"
        )
    return [names[number] for number in numbers]


def wait_ready(launched: Sequence[Launched], timeout: float, log: Log = print) -> None:
    """Return when every server answers; ValueError says which one failed and why. Stops none of them."""
    begun = time.monotonic()
    waiting = {server: ("", begun) for server in launched}  # the phase logged last, and when
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while waiting:
            for server in list(waiting):
                name = f"vLLM server {server.replica}"
                seconds = time.monotonic() - begun
                if server.is_stopped:
                    raise UserError(f"{name}: was stopped before it was ready")
                if server.poll() is not None:
                    where = f" (log: {server.log_path})" if server.log_path else ""
                    raise UserError(f"{name}: did not start: {server.cause()}{where}")
                if is_up(client, server):
                    server.was_ready = True
                    log(f"{name}: ready after {seconds:.0f} s")
                    del waiting[server]
                elif seconds > timeout:
                    raise UserError(
                        f"vllm.startup_timeout={timeout:g}: {name.replace('vLLM ', '')} is still {server.phase()}; "
                        f"raise it, or see {server.log_path or 'above'}"
                    )
                else:
                    waiting[server] = _log_progress(server, name, seconds, waiting[server], log)
            if waiting:
                time.sleep(0.25)


def stop_all(launched: Sequence[Launched]) -> None:
    """Stop all at the same time, since each may take seconds."""
    with ThreadPoolExecutor(max(len(launched), 1)) as threads:
        list(threads.map(Launched.stop, launched))


def is_up(client: httpx.Client, server: Launched) -> bool:
    try:
        status = client.get(f"{server.url}/health", headers=server.headers).status_code
    except httpx.HTTPError:
        return False
    if status == 401:
        raise UserError(f"vllm.port={server.url.rpartition(':')[2]}: another server answers there; take another port")
    return status == 200


def _log_progress(server: Launched, name: str, seconds: float, last: tuple[str, float], log: Log) -> tuple[str, float]:
    phase, now = server.phase(), time.monotonic()
    if server.log_path is None or (phase == last[0] and now - last[1] < PROGRESS_S):
        return last
    log(f"{name}: {seconds:.0f} s, {phase}")
    return phase, now


# ports, and what a killed guard leaves behind --------------------------------------------------------------------


def reserve(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen. It reserves `port` (0: a free one) for a server that sets SO_REUSEADDR and
    SO_REUSEPORT, as vLLM does, so that nobody else can take it before the server binds it.
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
        raise UserError(f"vllm.host={host}: is not an address of this machine; use 127.0.0.1") from None
    except PermissionError:
        raise UserError(f"vllm.port={port}: is not allowed for this user; take one above 1023, or 0") from None
    except OSError as error:
        what = "is in use; stop what uses it, or pass 0 for a free one"
        if "assign" in str(error):
            raise UserError(f"vllm.host={host}: is not an address of this machine; use 127.0.0.1") from None
        raise UserError(f"vllm.port={port}: {what}") from None
    return held


def sweep(parent: Path) -> None:
    """Remove what is left of this user's servers whose guard was killed."""
    for scratch in parent.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, a living guard's, or being removed
            if scratch.stat().st_uid == os.getuid():
                with (scratch / LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_leftovers(scratch)


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
        if SHARED.fullmatch(name):  # never delete anything else, whatever the file says
            with contextlib.suppress(OSError):
                os.unlink(name)
    shutil.rmtree(scratch, ignore_errors=True)


def processes_in(scratch: Path) -> list[int]:
    """Processes whose TMPDIR is `scratch`: a server and everything it started."""
    found = []
    mark = f"TMPDIR={scratch}".encode()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def group_members(group: int) -> list[int]:
    """Living processes of a process group, from /proc; only its leader on systems without /proc."""
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


# reading a server's log ------------------------------------------------------------------------------------------


TAIL_BYTES = 2**18
LONGEST = 240  # characters of a cause

# The pattern found last in the log gives the current phase.
PHASES = (
    (re.compile(r"Resolved architecture|non-default args"), "reading the model's config"),
    (re.compile(r"Initializing a V1 LLM engine|Starting EngineCore|world_size=\d+ rank="), "starting the engine"),
    (re.compile(r"Starting to load model|Loading safetensors|Loading weights"), "loading weights"),
    (re.compile(r"Loading weights took|Model loading took"), "setting up memory"),
    (re.compile(r"Dynamo bytecode transform|Compiling a graph"), "compiling"),
    (re.compile(r"Capturing CUDA graphs|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"init engine|Available routes|Application startup"), "opening its port"),
)
# such as "(EngineCore pid=7) ERROR 11-15 07:58:37 [core.py:9] "
PREFIX = re.compile(
    r"^(?:\([\w-]+(?: [\w-]+=\S+)*\)\s*)?(?:(?:ERROR|WARNING|INFO|DEBUG|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\]\s?)?"
)
ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt|Exit|Failure))\b:?\s*(.*)$")
USAGE = re.compile(r"^\S+: error: (.*)$")  # argparse
VALIDATION = re.compile(r"^\s+(?:Value error|Assertion failed), (.*?)(?: \[type=.*)?$")  # pydantic
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
    """What a starting server is doing, in words."""
    found = [(match.start(), words) for pattern, words in PHASES for match in pattern.finditer(text)]
    return max(found)[1] if found else "importing vLLM"


def cause_of(text: str) -> str:
    """The line that best explains why a server ended: the first error that does not just repeat another process's."""
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
    """The first sentences: vLLM goes on with advice about variables to set."""
    if len(text) <= LONGEST:
        return text
    end = text.rfind(". ", 0, LONGEST)
    return text[:end] if end > 0 else text[:LONGEST] + "..."
