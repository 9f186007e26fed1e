"""Unmodified NeMo Gym servers, with a vLLM server as the model of their agents.

Needs STROP_NEMO_PYTHON, an interpreter with nemo-gym and reasoning-gym (Python 3.12), and the assets.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data.chat import render_conversation, render_prompt
from data.rows.nemo_gym import load_nemo_gym
from data.types import Prompt
from rollout.engine import Completion, Request, Sampling, run_groups
from rollout.engines.local import LocalEngine
from rollout.episodes.endpoint import Endpoint
from rollout.gyms.nemo_gym import GymClient, RunSource, set_up_rewards
from rollout.gyms.options import NemoGymConfig
from rollout.rewards.table import load_rewards
from rollout.servers.command import TOKEN
from tests.entry import metrics, processes_with, run_ok
from tests.rollout.vllm.conftest import TINY
from tests.test_seeds import blocks
from tests.trainer.translate.test_seed_configs import indented

HEAD_PORT = 18100
END = 2
TEMPLATE = """{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
        {{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "SF"}}}
RESULT = '{"city":"SF","weather_description":"The weather in SF is cold."}'


@pytest.fixture(scope="module")
def gym_python() -> str:
    python = os.environ.get("STROP_NEMO_PYTHON")
    if not python:
        pytest.skip("STROP_NEMO_PYTHON is unset: set it to an interpreter with nemo-gym")
    return python


@pytest.fixture(scope="module")
def rows(gym_python: str) -> Path:
    """The folder of the gym's resource servers, with their example rows."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([gym_python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "resources_servers"


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Path:
    """The tiny model, trained to call get_weather on the first example question and to answer from its result."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("caller") / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    system = "You are a helpful personal assistant that aims to be helpful and reduce any pain points the user has."
    messages = [
        {"role": "system", "content": system},  # vLLM maps developer to system if the template lacks that role
        {"role": "user", "content": "what's it like in sf?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": RESULT},
        {"role": "assistant", "content": "It is cold."},
    ]
    ids, mask = render_conversation(tokenizer, messages)
    tokens = torch.tensor([ids])
    labels = torch.where(torch.tensor([mask]), tokens, -100)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 10)
        loss = model(input_ids=tokens, labels=labels).loss
        if loss < 2e-3:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss < 0.01, loss
    model.save_pretrained(folder)
    return folder


def start_gym(python: str, tool: Path, log: Path, **env: str) -> subprocess.Popen[bytes]:
    script = Path(__file__).parents[1] / "gyms" / "nemo_servers.py"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python, str(script), str(tool)], stdout=out, stderr=subprocess.STDOUT, env=os.environ | env
        )
    deadline = time.monotonic() + 180
    while "READY" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.5)
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def config(**settings: Any) -> NemoGymConfig:
    return NemoGymConfig(**{"datasets": ("x",), "head_port": HEAD_PORT, **settings})


def completion_of(text: str) -> Completion:
    return Completion(prompt_ids=[1], ids=[5], logps=[-1.0], finish_reason="stop", text=text, versions=[(0, 1)])


def test_gym_servers_verify_their_example_rows(gym_python, rows, asset, tmp_path, tokenizer_of_tiny):
    gym_process = start_gym(gym_python, asset("tools/nemo_gym_servers.py"), tmp_path / "gym.log")
    gym = GymClient(config(), lambda text: None)
    try:
        names = ("reasoning_gym", "example_session_state_mgmt")
        datasets = [f"{rows}/{name}/data/example.jsonl@{name}" for name in names]
        prompts = load_nemo_gym(datasets, tokenizer_of_tiny)
        gym.connect(prompts, multi_turn=False)
        rewards = load_rewards(["nemo_gym:verify"])
        set_up_rewards(rewards, gym, "stop")
        puzzles = [prompt for prompt in prompts if "answer" in prompt.columns]
        right = rewards.score(puzzles, [completion_of(f"<answer>{p.columns['answer']}</answer>") for p in puzzles])
        wrong = rewards.score(puzzles, [completion_of("<answer>no</answer>") for _ in puzzles])
        assert len(puzzles) == 5
        assert [value for (value,) in right.values] == [1.0] * 5
        assert [value for (value,) in wrong.values] == [0.0] * 5
        # A counter that is never incremented keeps its initial value, but only in its own session.
        counters = [expecting(p, p.columns["initial_count"]) for p in prompts if "initial_count" in p.columns]
        assert rewards.score(counters, [completion_of("x")] * 5).values == [[1.0]] * 5
        assert rewards.score([expecting(p, -1) for p in counters], [completion_of("x")] * 5).values == [[0.0]] * 5
        # A row without a field that its server needs is rejected by name.
        bare = dataclasses.replace(puzzles[0], columns=puzzles[0].columns | {"verify_extra": without(puzzles[0])})
        with pytest.raises(ValueError, match="reasoning_gym/verify answered 422 .*question"):
            rewards.score([bare], [completion_of("x")])
    finally:
        gym.close()
        stop(gym_process)


def test_agent_plays_an_episode_with_the_endpoint(gym_python, rows, tmp_path, caller):
    """The gym's agent and model server, unmodified, over the in-process engine."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = "example_single_tool_call"
    started = {"auto_start": True, "python": gym_python, "dir": str(rows.parent), "head_port": 11000}
    started["config_paths"] = (f"resources_servers/{name}/configs/{name}.yaml",)
    tokenizer = AutoTokenizer.from_pretrained(caller)
    local = LocalEngine(AutoModelForCausalLM.from_pretrained(caller, dtype=torch.float32), tokenizer)
    lines: list[str] = []
    gym = GymClient(config(multi_turn=True, prefix_mismatch="stop", **started), lines.append)
    endpoint = Endpoint(local, tokenizer)
    endpoint.open()
    try:
        dataset = f"{rows}/{name}/data/example.jsonl:split=train[:1]@{name}"
        prompts = load_nemo_gym([dataset], tokenizer, multi_turn=True)
        gym.connect(prompts, multi_turn=True)
        gym.start((endpoint.url, endpoint.token), tmp_path)
        sampling = Sampling(temperature=0.5, max_tokens=256, stop_ids=(END,), for_training=True)
        source = RunSource(gym, sampling, endpoint)
        groups = run_groups(source, [[Request.of(prompts[0], seed) for seed in (1, 2, 1)]])
        check_weather(groups[0], prompts[0], tokenizer)
        assert groups[0][0].ids == groups[0][2].ids  # the seed reaches the engine
        assert not [line for line in lines if "failed" in line or "answered" in line]
        for completion in groups[0]:
            (expected,) = local.logps([(completion.prompt_ids, completion.ids)], temperature=0.5)
            gaps = [abs(a - b) for a, b, m in zip(expected, completion.logps, completion.mask, strict=True) if m]
            assert max(gaps) < 1e-3, gaps
    finally:
        gym.close()
        endpoint.close()


# auto start ------------------------------------------------------------------------------------------------------


REASONING = "resources_servers/reasoning_gym/configs/reasoning_gym.yaml"


def test_auto_start_starts_only_the_servers_that_rows_need(gym_python, rows, tmp_path, tokenizer_of_tiny):
    """Including a stateful server, but not reasoning_gym's agent, which verification does not need."""
    counter = "example_session_state_mgmt"
    names = {"reasoning_gym": "reasoning_gym", counter: f"{counter}_resources_server"}  # folder -> server
    files = [f"resources_servers/{folder}/configs/{folder}.yaml" for folder in names]
    cfg = config(auto_start=True, python=gym_python, dir=str(rows.parent), config_paths=files, head_port=11000)
    gym = GymClient(cfg, lambda text: None)
    try:
        datasets = [f"{rows}/{folder}/data/example.jsonl@{name}" for folder, name in names.items()]
        prompts = load_nemo_gym(datasets, tokenizer_of_tiny)
        gym.connect(prompts, multi_turn=False)
        gym.start(None, tmp_path)
        assert sorted(server.name for server in gym.servers.running) == sorted(names.values())
        rewards = load_rewards(["nemo_gym:verify"])
        set_up_rewards(rewards, gym, "stop")
        puzzles = [prompt for prompt in prompts if "answer" in prompt.columns]
        right = rewards.score(puzzles, [completion_of(f"<answer>{p.columns['answer']}</answer>") for p in puzzles])
        assert right.values == [[1.0]] * 5
        counters = [expecting(p, p.columns["initial_count"]) for p in prompts if "initial_count" in p.columns]
        assert rewards.score(counters, [completion_of("x")] * 5).values == [[1.0]] * 5
    finally:
        gym.close()
    assert not any("ray" in path.read_text().lower() for path in tmp_path.glob("gym-*.log"))


def test_run_starts_the_gym_and_its_agents_use_the_runs_vllm(gym_python, vllm_python, rows, tmp_path):
    """Two GRPO steps in episodes with reasoning_gym's score as the reward; no process is left."""
    sums = [(a, b) for a in (12, 25, 38, 41) for b in (17, 23, 36, 44)]
    examples = [
        {"responses_create_params": {"input": [{"role": "user", "content": f"{a}+{b}="}]}, "question": f"{a}+{b}=",
         "answer": str(a + b), "metadata": {"source_dataset": "chain_sum"}}
        for a, b in sums
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    run_ok(
        "--method", "grpo", "--model", "builtin:tiny", "--rollout.engine", "vllm", "--reward-funcs", "env",
        "--nemo-gym.multi-turn", "--nemo-gym.auto-start", "--nemo-gym.python", gym_python,
        "--nemo-gym.dir", rows.parent, "--nemo-gym.config-paths", REASONING,
        "--nemo-gym.datasets", f"{tmp_path}/rows.jsonl@reasoning_gym", "--nemo-gym.prefix-mismatch", "stop",
        "--num-generations", 8, "--per-device-train-batch-size", 64, "--max-completion-length", 8,
        "--learning-rate", 1e-3, "--max-steps", 2, "--output-dir", tmp_path / "run",
        cwd=tmp_path, timeout=900, STROP_TEST_RUN=str(tmp_path),
    )  # fmt: skip
    steps = metrics(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert 0.0 < row["reward/env/mean"] < 1.0, row
        assert row["rollout/env_failed"] == 0.0 and row["rollout/num_turns"] == 1.0, row
        assert row["optim/grad_norm"] > 0.0, row
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert logs >= {f"gym-{name}.log" for name in ("reasoning_gym", "reasoning_gym_simple_agent", "policy_model")}
    assert processes_with(f"STROP_TEST_RUN={tmp_path}") == []


def test_the_seeds_recommended_configuration_runs(gym_python, vllm_python, rows, caller, asset, tmp_path):
    """Multi-turn with async GRPO: prefetch, adapter sync, and the real gym servers. Only paths and sizes differ."""
    text = asset("seeds/002_14ba509aee02deeb.txt").read_text(encoding="utf-8")
    (seed,) = [yaml.safe_load(indented(lines)) for headings, lines in blocks(text, "yaml")
               if "Multi-Turn with Async GRPO" in headings[-1]]  # fmt: skip
    name = "example_single_tool_call"
    settings = json.loads((caller / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (caller / "config.json").write_text(json.dumps(settings))
    shutil.copy(rows / name / "data" / "example.jsonl", tmp_path / "rows.jsonl")
    seed |= {"base_model": str(caller), "nemo_gym_head_port": HEAD_PORT, "output_dir": "run", "max_steps": 6}
    seed |= {"nemo_gym_datasets": [{"path": str(tmp_path / "rows.jsonl"), "server_name": name}], "learning_rate": 1e-5}
    seed["vllm"].pop("gpu_memory_utilization")
    assert seed["trl"]["async_prefetch"] and seed["trl"]["vllm_lora_sync"] and seed["trl"]["vllm_sync_interval"] == 5
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(seed))
    policy = {"POLICY_URL": "http://127.0.0.1:8000/v1", "POLICY_API_KEY": "seed", "WITH_AGENTS": "1"}
    gym = start_gym(gym_python, asset("tools/nemo_gym_servers.py"), tmp_path / "gym.log", **policy)
    try:
        run_ok("--config", "config.yaml", "--dtype", "float32", cwd=tmp_path, timeout=900, **{TOKEN: "seed"})
    finally:
        stop(gym)
    steps = [row for row in metrics(tmp_path / "run") if "loss/total" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["rollout/env_failed"] == 0 and row["rollout/num_turns"] >= 1 for row in steps), steps
    assert max(row["rollout/staleness_max"] for row in steps) > 0


def check_weather(group: list[Completion], prompt: Prompt, tokenizer: Any) -> None:
    for completion in group:
        assert completion.columns["env_reward"] == 1.0
        assert completion.columns["num_turns"] == 2 and completion.columns["branches"] == 0
        assert completion.columns["tool_calls"] == 1
        assert completion.prompt_ids == render_prompt(
            tokenizer, [prompt.prompt[0] | {"role": "system"}, prompt.prompt[1]]
        )
        assert completion.versions == [(0, completion.trained)]
        assert [m["role"] for m in completion.messages] == ["assistant", "tool", "assistant"]
        assert completion.messages[1]["content"] == RESULT
        assert completion.text == "It is cold."
        text = tokenizer.decode([i for i, sampled in zip(completion.ids, completion.mask, strict=True) if not sampled])
        assert RESULT in text and "tool_call" not in text and "It is cold." not in text
        assert completion.ids[-1] == END and completion.mask[-1]


def expecting(prompt: Prompt, count: int) -> Prompt:
    row = json.loads(prompt.columns["verify_extra"]) | {"expected_count": count}
    return dataclasses.replace(prompt, columns=prompt.columns | {"verify_extra": json.dumps(row)})


def without(prompt: Prompt) -> str:
    row = json.loads(prompt.columns["verify_extra"])
    return json.dumps({key: value for key, value in row.items() if key != "question"})


@pytest.fixture
def tokenizer_of_tiny() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)
