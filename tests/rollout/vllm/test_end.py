"""How real servers end. Runs after all other tests in this folder and ends the shared servers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rollout.servers.launch import LOCK, SCRATCH, group_members, remove_leftovers, sweep
from rollout.servers.worker.strop_guard import shared_memory
from tests.rollout.vllm.conftest import processes_of, wait_for


def test_engine_ends_when_its_guard_and_api_server_are_killed(untied_server):
    """stop(), or the next start, removes the leftovers."""
    launched, scratch = untied_server.starter, Path(untied_server.starter._scratch)
    assert scratch.exists() and len(processes_of(untied_server)) >= 3  # guard, API server, engine
    shared = shared_memory(untied_server.group)
    for pid in (untied_server.guard, untied_server.group):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not group_members(untied_server.group), 30)
    launched.stop()
    assert not scratch.exists() and launched.pids == []
    assert not [path for path in shared if Path(path).exists()]


def test_ctrl_c_of_serve_leaves_no_process_or_file(tied_server, serve_env):
    serve, shared = tied_server.starter, shared_memory(tied_server.group)
    serve.send_signal(signal.SIGINT)
    assert serve.wait(60) == 0 and not group_members(tied_server.group)
    assert "stopped: no server is left running" in tied_server.log_path.read_text()
    scratch, runtime = Path(serve_env["TMPDIR"]), Path(serve_env["XDG_RUNTIME_DIR"])
    sweep(scratch, SCRATCH, LOCK, remove_leftovers)
    assert not list(scratch.iterdir()) and not list(runtime.iterdir())
    assert not [path for path in shared if Path(path).exists()]
