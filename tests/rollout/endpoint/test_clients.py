"""Unmodified clients from PyPI over both engines, and agents as harnesses.

Needs STROP_CLIENT_PYTHON, an interpreter with openai, anthropic, openai-agents and mini-swe-agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data.chat import render_conversation
from rollout.engine import Completion, Sampling
from rollout.engines.local import LocalEngine
from rollout.episodes.endpoint import Endpoint
from tests.entry import metrics, run_ok
from tests.rollout.scripted_engine import TINY

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def client_python() -> str:
    if not (python := os.environ.get("STROP_CLIENT_PYTHON")):
        pytest.skip("STROP_CLIENT_PYTHON is unset: set it to an interpreter with openai, anthropic and the agents")
    return python


def converse(endpoint: Endpoint, python: str, count: int, sampling: Sampling) -> list[tuple[Any, list[str]]]:
    """Run `count` conversations of clients.py; return (session, texts that the client got) of each."""

    async def run() -> list[tuple[Any, list[str]]]:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(endpoint.session(sampling, seed=number)) for number in range(count)]
            env = os.environ | {"OPENAI_BASE_URL": endpoint.url}
            process = await asyncio.create_subprocess_exec(
                python, str(HERE / "clients.py"), stdin=-1, stdout=-1, stderr=-1, env=env
            )
            out, errors = await process.communicate("\n".join(key for _, key in opened).encode())
            assert process.returncode == 0, errors.decode()[-2000:]
            texts = [json.loads(line) for line in out.decode().splitlines()]
            return [(session, got) for (session, _), got in zip(opened, texts, strict=True)]

    future = endpoint.loop.start(run())
    future.add_done_callback(lambda _: endpoint.wake())
    while not future.done():
        if not endpoint.advance():
            future.result()
    return future.result()


def check_conversations(results: list[tuple[Any, list[str]]], sampled: list[Completion]) -> None:
    """Each conversation trains exactly the ids of the engine's completions, in the context they were sampled in."""
    known = {(*c.prompt_ids, -1, *c.ids): c for c in sampled}
    for number, (session, texts) in enumerate(results):
        whole = session.completion([1], {})
        assert whole.columns["num_turns"] == len(texts) == 3, number
        assert whole.columns["branches"] == 0, (number, texts)
        turns = [known.pop((*turn.completion.prompt_ids, -1, *turn.completion.ids)) for turn in session.turns]
        position, ids = len(whole.prompt_ids), whole.prompt_ids + whole.ids
        mask = [False] * position + (whole.mask or [True] * len(whole.ids))
        assert [i for i, m in zip(ids, mask, strict=True) if m] == [i for turn in turns for i in turn.ids]
        for turn, text in zip(turns, texts, strict=True):
            end = len(turn.prompt_ids) + len(turn.ids)
            assert ids[:end] == turn.prompt_ids + turn.ids and all(mask[len(turn.prompt_ids) : end])
            assert turn.text == text
        assert [logp for logp, m in zip(whole.logps, mask[position:], strict=True) if m] == [
            logp for turn in turns for logp in turn.logps
        ]
    assert not known


@pytest.mark.proof
@pytest.mark.parametrize("count", [1000])
def test_trained_ids_are_sampled_ids_in_process(client_python, count):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    engine = LocalEngine(AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), tokenizer)
    sampled: list[Completion] = []
    stream = engine.stream

    def recorded(*args: Any) -> Any:
        for ended in stream(*args):
            sampled.extend(completion for _, completion in ended)
            yield ended

    engine.stream = recorded
    endpoint = Endpoint(engine, tokenizer)
    endpoint.open()
    try:
        sampling = Sampling(max_tokens=300, temperature=1.5, stop_ids=(2,), for_training=True)
        check_conversations(converse(endpoint, client_python, count, sampling), sampled)
    finally:
        endpoint.close()


# harnesses -------------------------------------------------------------------------------------------------------

TEMPLATE = """{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
    {%- for call in message['tool_calls'] or [] -%}
        {{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
        {{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def turns(system: str, user: str, *rest: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}, *rest]


CONVERSATIONS = [
    turns("Use the tool.", "a?", call("lookup", key="a"), {"role": "tool", "content": "37"},
          {"role": "assistant", "content": "37"}),
    turns("Use bash.", "3?", call("bash", command="echo 3 >x"),
          {"role": "tool", "content": "<returncode>0</returncode>\n<output>\n</output>"}, call("bash", command=DONE)),
]  # fmt: skip


@pytest.fixture(scope="session")
def caller(tmp_path_factory) -> Path:
    """The tiny model, trained on one conversation with each program."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("caller") / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "teacher"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [render_conversation(tokenizer, conversation) for conversation in CONVERSATIONS]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 10)
        optimizer.zero_grad()
        losses = []
        for ids, mask in rows:
            tokens = torch.tensor([ids])
            loss = model(input_ids=tokens, labels=torch.where(torch.tensor([mask]), tokens, -100)).loss
            loss.backward()
            losses.append(loss.item())
        if max(losses) < 5e-3:
            break
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert max(losses) < 0.05, losses
    model.save_pretrained(folder)
    return folder


REWARD = """
from pathlib import Path

def solved(prompts, completions, stdout, folder, **columns):
    return [float("37" in text or Path(path, "x").exists()) for text, path in zip(stdout, folder)]
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["openai-agents", "mini-swe-agent"])
def test_a_run_with_an_unmodified_agent_finishes(client_python, caller, tmp_path, program):
    """Two GRPO steps over the in-process engine. Every episode needs a tool and two turns."""
    mini = Path(client_python).with_name("mini")
    command, question = {
        "openai-agents": (f"{client_python} {HERE / 'openai_agent.py'} {{row}}", "a?"),
        "mini-swe-agent": (f"{mini} -c {HERE / 'mini.yaml'} --agent-class default -t {{prompt}} -o traj.json", "3?"),
    }[program]
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": question}]}) + "\n")
    run_ok(
        "--method", "grpo", "--model", caller, "--data", "rows.jsonl", "--reward-funcs", "reward.py:solved",
        "--harness", command, "--harness-max-concurrent", 2, "--num-generations", 4, "--temperature", 1.1,
        "--per-device-train-batch-size", 4, "--max-completion-length", 400, "--learning-rate", 1e-6, "--max-steps", 2,
        "--output-dir", tmp_path / "run", "--rollout.engine", "local", cwd=tmp_path, timeout=900,
        MSWEA_COST_TRACKING="ignore_errors", MSWEA_CONFIGURED="true", MSWEA_GLOBAL_CONFIG_DIR=str(tmp_path),
        MSWEA_SILENT_STARTUP="1",
    )  # fmt: skip
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/env_failed"] == 0.0 and row["rollout/num_turns"] > 1, row
    assert sum(row["rollout/tool_calls"] for row in rows) > 0 and rows[0]["reward/mean"] > 0
