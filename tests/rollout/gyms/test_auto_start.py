"""`--nemo-gym.auto-start` with a small fake gym: start and stop of its servers, and errors.

The real gym is in tests/rollout/vllm/test_nemo_gym_real.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.gyms.auto_start import GymServers, servers_of, with_model, with_references
from rollout.gyms.nemo_gym import GymClient
from rollout.gyms.options import NemoGymConfig
from rollout.servers.command import TOKEN
from tests.entry import ROOT, environment, metrics, processes_with, run_ok
from tests.rollout.gyms.small_gym import make_gym, write_config
from tests.rollout.gyms.test_nemo_gym import completion_of, math_row, prompt_of, rewards_of

ENDPOINT = ("http://127.0.0.1:8000/v1", "secret")
ROWS = [json.dumps(math_row(f"1{n}+2=", answer=str(12 + n))) + "\n" for n in range(8)]


@pytest.fixture
def gym(tmp_path) -> Path:
    return make_gym(tmp_path / "Gym")


def config(gym: Path, **settings: Any) -> NemoGymConfig:
    defaults = {"datasets": ("rows.jsonl",), "dir": str(gym), "config_paths": ("configs/all.yaml",)}
    return NemoGymConfig(auto_start=True, **defaults | settings)


def get(url: str) -> dict[str, Any]:
    return httpx.get(url, trust_env=False).json()


def await_none(setting: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while left := processes_with(setting):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


# start and stop --------------------------------------------------------------------------------------------------


def test_the_needed_servers_and_their_references_start_on_loopback_and_stop(gym, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")
    monkeypatch.setenv("STROP_TEST_GYM", str(tmp_path))
    lines: list[str] = []
    servers = GymServers(config(gym), lines.append)
    servers.start({"sums_agent"}, ENDPOINT, tmp_path / "logs")
    try:
        urls = {server.name: server.url for server in servers.running}
        assert sorted(urls) == ["policy_model", "sums", "sums_agent"]  # others is not needed
        shown = get(f"{urls['sums']}/config")
        addresses = {
            name: (fields["host"], fields["port"]) for name, (_, _, fields) in servers_of(shown["config"]).items()
        }
        assert all(url == "http://{}:{}".format(*addresses[name]) for name, url in urls.items())
        assert {host for host, _ in addresses.values()} == {"127.0.0.1"}  # 0.0.0.0 in the file
        assert "num_workers" not in servers_of(shown["config"])["sums"].fields
        assert Path(shown["cwd"]) == gym / "resources_servers" / "sums"
        assert TOKEN not in shown["environ"] and str(ROOT) not in shown["environ"]["PYTHONPATH"]
        proxy = servers_of(shown["config"])["policy_model"].fields
        assert (proxy["base_url"], proxy["api_key"], proxy["model"]) == (
            ["http://127.0.0.1:8000/v1"],
            "secret",
            "policy",
        )
        assert proxy["return_token_id_information"] is False
        assert len(processes_with(f"STROP_TEST_GYM={tmp_path}")) == 6  # each with its guard
        assert servers.ended() is None
        assert lines[0] == f"NeMo Gym: starting sums_agent, policy_model, sums, logs in {tmp_path}/logs/gym-*.log"
    finally:
        servers.stop()
    servers.stop()
    assert processes_with(f"STROP_TEST_GYM={tmp_path}") == []
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"gym-{name}.log" for name in sorted(urls)]


SCRIPT = """
import sys, time
from pathlib import Path
from rollout.gyms.auto_start import GymServers
from rollout.gyms.options import NemoGymConfig
cfg = NemoGymConfig(auto_start=True, datasets=("x",), dir=sys.argv[1], config_paths=("configs/all.yaml",))
servers = GymServers(cfg)
servers.start({"sums"}, None, Path(sys.argv[1]) / "logs")
print("up", flush=True)
if sys.argv[2] == "raise":
    raise ValueError("the run fails")
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["KILL", "TERM", "raise"])
def test_the_servers_end_with_the_process_that_started_them(gym, tmp_path, how):
    env = environment() | {"STROP_TEST_GYM": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(gym), how], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    with parent:
        while (line := parent.stdout.readline()) != "up\n":
            assert line, "the process ended before its servers were up"
        if how != "raise":
            assert len(processes_with(f"STROP_TEST_GYM={tmp_path}")) == 3
            parent.send_signal(getattr(signal, f"SIG{how}"))
    await_none(f"STROP_TEST_GYM={tmp_path}")


def test_a_server_ends_with_its_guard(gym, tmp_path, monkeypatch):
    monkeypatch.setenv("STROP_TEST_GYM", str(tmp_path))
    servers = GymServers(config(gym), lambda text: None)
    servers.start({"others"}, None, tmp_path / "logs")
    os.kill(servers.running[0].guard.pid, signal.SIGKILL)
    await_none(f"STROP_TEST_GYM={tmp_path}")
    servers.stop()


# errors ----------------------------------------------------------------------------------------------------------


def test_missing_files_are_reported_before_anything_starts(gym, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(gym / "configs", bare / "configs")
    write_config(gym, "configs/refused.yaml", model=False)
    (gym / "configs" / "refused.yaml").write_text("refused: true\n")
    for settings, message in [
        ({"dir": str(tmp_path / "no")}, f"nemo_gym.dir={tmp_path}/no: "),
        ({"config_paths": ("a.yaml",)}, f"nemo_gym.config_paths=a.yaml: {gym}/a.yaml "),
        ({"dir": str(bare), "python": sys.executable}, f"nemo_gym.python={sys.executable}: nemo_gym is not installed"),
        ({"python": "/no/python"}, "nemo_gym.python=/no/python: "),
        ({"config_paths": ("configs/refused.yaml",)}, "refused.yaml: the gym rejects them (ValueError: no server of"),
    ]:
        with pytest.raises(ValueError) as caught:
            GymServers(config(gym, **settings))
        assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="nemo_gym.config_paths=a.yaml"):  # before rows are read
        GymClient(config(gym, config_paths=("a.yaml",)))


@pytest.mark.parametrize(
    ("behaves", "message"),
    [
        ("dies", "nemo_gym.auto_start=True: the gym's server sums has ended (ModuleNotFoundError: No module named 'p"),
        ("port", "the gym's server sums has ended (ERROR:    [Errno 98] error while attempting to bind on address: "),
        ("hangs", "nemo_gym.server_timeout=2: the gym's server sums does not answer at http://127.0.0.1:"),
    ],
)
def test_a_server_that_does_not_start_is_reported_with_its_log(gym, tmp_path, monkeypatch, behaves, message):
    monkeypatch.setenv("STROP_TEST_GYM", str(tmp_path))
    write_config(gym, behaves=behaves)
    servers = GymServers(config(gym, server_timeout=2.0 if behaves == "hangs" else 60.0), lambda text: None)
    with pytest.raises(ValueError) as caught:
        servers.start({"sums", "others"}, None, tmp_path / "logs")
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"see {tmp_path}/logs/gym-sums.log")
    assert behaves != "hangs" or "'loading the puzzles'" in str(caught.value)
    assert processes_with(f"STROP_TEST_GYM={tmp_path}") == []


def test_missing_server_code_is_reported(gym, tmp_path):
    (gym / "resources_servers" / "sums" / "app.py").unlink()
    servers = GymServers(config(gym), lambda text: None)
    with pytest.raises(ValueError, match="nemo_gym.dir=.*resources_servers/sums/app.py"):
        servers.start({"sums"}, None, tmp_path / "logs")


# the configuration -----------------------------------------------------------------------------------------------


def test_the_endpoint_replaces_the_placeholders():
    agent = {"entrypoint": "app.py", "model_server": {"type": "responses_api_models", "name": "policy_model"}}
    judge = {"entrypoint": "app.py", "judges": [{"type": "responses_api_models", "name": "other"}]}
    tree = {
        "agent": {"responses_api_agents": {"simple_agent": agent}},
        "judge": {"resources_servers": {"judge": judge}},
        "policy_model": {"responses_api_models": {"dummy_model": {"entrypoint": "app.py"}}},
        "other": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py", "base_url": "strop:base_url"}}},
        "skip_venv_if_present": False,
    }
    assert with_references(tree, {"agent"}) == ["agent", "policy_model"]
    assert with_references(tree, {"judge", "agent"}) == ["agent", "judge", "policy_model", "other"]
    replaced = with_model(tree, ["agent", "policy_model"], ENDPOINT)
    assert replaced["policy_model"] == {"responses_api_models": {"vllm_model": {
        "entrypoint": "app.py", "base_url": ["http://127.0.0.1:8000/v1"], "api_key": "secret", "model": "policy",
        "return_token_id_information": False, "uses_reasoning_parser": False,
    }}}  # fmt: skip
    assert servers_of(replaced)["other"].fields["base_url"] == ["http://127.0.0.1:8000/v1"]
    assert "dummy_model" in tree["policy_model"]["responses_api_models"]  # the argument is unchanged
    for names, name in [(["agent", "policy_model"], "policy_model"), (["judge", "other"], "other")]:
        with pytest.raises(ValueError, match=f"rollout.engine=local: the gym's server {name}"):
            with_model(tree, names, None)


# the client and whole runs ---------------------------------------------------------------------------------------


def test_completions_are_verified_and_a_dead_server_is_reported(gym, tmp_path):
    client = GymClient(config(gym, retries=0), lambda text: None)
    try:
        with pytest.raises(ValueError, match="@sum: no such resource server in nemo_gym.config_paths"):
            client.connect([prompt_of(math_row("q"), "sum")], multi_turn=False)
        prompt = prompt_of(math_row("1+2=", answer="3"), "sums")
        client.connect([prompt], multi_turn=False)
        client.start(None, tmp_path / "logs")
        assert [server.name for server in client.servers.running] == ["sums"]
        rewards = rewards_of(client)
        assert rewards.score([prompt, prompt], [completion_of("= 3"), completion_of("4")]).values == [[1.0], [0.0]]
        pid = get(f"{client.servers.running[0].url}/config")["pid"]
        os.kill(pid, signal.SIGKILL)
        client.servers.running[0].guard.wait(20)
        with pytest.raises(ValueError, match=f"the gym's server sums has ended .*see {tmp_path}/logs/gym-sums.log"):
            rewards.score([prompt], [completion_of("3")])
    finally:
        client.close()


@pytest.mark.slow
def test_a_run_starts_its_gym_trains_and_leaves_no_process(gym, tmp_path):
    (gym / "data.jsonl").write_text("".join(ROWS))
    run_ok(
        "--method", "grpo", "--model", "builtin:tiny", "--reward-funcs", "nemo_gym:verify", "--max-steps", 2,
        "--nemo-gym.auto-start", "--nemo-gym.dir", gym, "--nemo-gym.config-paths", "configs/all.yaml",
        "--nemo-gym.datasets", "data.jsonl@sums", "--max-completion-length", 8, "--output-dir", tmp_path / "run",
        "--rollout.engine", "local", cwd=tmp_path, STROP_TEST_GYM=str(tmp_path),
    )  # fmt: skip
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run" / "logs" / "gym-sums.log").is_file()
    assert processes_with(f"STROP_TEST_GYM={tmp_path}") == []
