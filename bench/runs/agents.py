"""GRPO of two unmodified agents, openai-agents and mini-swe-agent: success on held-out rows before and after.

    python -m bench.runs.agents --model MODEL_FOLDER --python VENV/bin/python

VENV has openai-agents and mini-swe-agent. The rows ask for the value of a key, which only a tool has, or for a file
with a number. First SFT on trajectories written here, of which most give up without the tool, for the formats.
Then GRPO with the agent as --harness, over the in-process engine. The error is the gap between the log-probs of engine
and trainer in the last step.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from bench.common import ROOT, Row, Timing, emit, environment, make_row, read, require_commit

HERE = ROOT / "tests" / "rollout" / "endpoint"  # the programs
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
RESULT = "<returncode>0</returncode>\n<output>\n</output>"
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
REWARD = """
from pathlib import Path

def solved(stdout, folder, answer, **columns):
    files = [Path(path, "x") for path in folder]
    found = [file.read_text() if file.is_file() else text for file, text in zip(files, stdout)]
    return [float(text.strip() == want) for text, want in zip(found, answer)]
"""


@dataclass(frozen=True)
class Settings:
    """GRPO of two unmodified agents: success on held-out rows before and after."""

    model: str
    """Model to start from."""
    python: str
    """Interpreter with openai-agents and mini-swe-agent."""
    folder: Path | None = None
    """Folder for rows and runs. Default: a temporary folder, removed at the end."""
    out: Path | None = None
    """File to append the results to."""
    agents: tuple[Literal["openai", "mini"], ...] = ("openai", "mini")
    """Agents to train."""
    sft_steps: int = 60
    """Optimizer steps of SFT."""
    steps: int = 20
    """Optimizer steps of GRPO."""
    prompts: int = 4
    """Prompts per step."""
    group: int = 4
    """Episodes per prompt."""
    eval_rows: int = 32
    """Held-out rows."""
    learning_rate: float = 1e-5
    """Learning rate of GRPO."""
    solved: float = 0.3
    """Fraction of the SFT trajectories that use the tool."""


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def row_of(agent: str, key: int, value: int) -> dict[str, Any]:
    text = f"{key}?" if agent == "openai" else f"Write {value} to x."
    table = {"table": {str(key): str(value)}} if agent == "openai" else {}
    return {"prompt": [{"role": "user", "content": text}], "answer": str(value), **table}


def trajectory(agent: str, row: dict[str, Any], key: int, *, solved: bool) -> list[dict[str, Any]]:
    system = {"role": "system", "content": "Use the tool." if agent == "openai" else "Use bash."}
    opening = [system, *row["prompt"]]
    if agent == "openai":
        turns = [call("lookup", key=str(key)), {"role": "tool", "content": row["answer"]}] if solved else []
        return [*opening, *turns, {"role": "assistant", "content": row["answer"] if solved else "?"}]
    turns = [call("bash", command=f"echo {row['answer']} >x"), {"role": "tool", "content": RESULT}] if solved else []
    return [*opening, *turns, call("bash", command=DONE)]


def write_rows(cfg: Settings, agent: str, folder: Path) -> None:
    rng = random.Random(0)
    keys = rng.sample(range(100, 1000), 512 + cfg.eval_rows)
    rows = [row_of(agent, key, rng.randrange(10, 100)) for key in keys]
    trajectories = [
        {"messages": trajectory(agent, row, key, solved=rng.random() < cfg.solved)}
        for row, key in zip(rows, keys, strict=True)
    ]
    files = {"train": rows[: -cfg.eval_rows], "test": rows[-cfg.eval_rows :], "sft": trajectories[: -cfg.eval_rows]}
    for name, content in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "reward.py").write_text(REWARD)


def train(folder: Path, *words: Any) -> None:
    env = environment(
        MSWEA_COST_TRACKING="ignore_errors", MSWEA_CONFIGURED="true", MSWEA_GLOBAL_CONFIG_DIR=str(folder),
        MSWEA_SILENT_STARTUP="1", LITELLM_LOCAL_MODEL_COST_MAP="True",  # do not download prices
    )  # fmt: skip
    command = [sys.executable, "-m", "trainer", *map(str, words), "--chat-template", "template.jinja"]
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=sys.stderr)


def run(cfg: Settings, agent: str, folder: Path) -> Row:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(cfg, agent, folder)
    mini = Path(cfg.python).absolute().with_name("mini")
    command = {
        "openai": f"{Path(cfg.python).absolute()} {HERE / 'openai_agent.py'} {{row}}",
        "mini": f"{mini} -c {HERE / 'mini.yaml'} --agent-class default -t {{prompt}} -o trajectory.json",
    }[agent]
    train(folder, "--method", "sft", "--model", cfg.model, "--data", "sft.jsonl", "--max-steps", cfg.sft_steps,
          "--per-device-train-batch-size", 16, "--learning-rate", 3e-4, "--output-dir", "sft")  # fmt: skip
    train(
        folder, "--method", "grpo", "--model", "sft", "--data", "train.jsonl", "--eval-data", "test.jsonl",
        "--reward-funcs", "reward.py:solved", "--harness", command, "--max-steps", cfg.steps, "--eval-steps", cfg.steps,
        "--num-generations", cfg.group, "--per-device-train-batch-size", cfg.prompts * cfg.group,
        "--max-completion-length", 300, "--learning-rate", cfg.learning_rate, "--rollout.engine", "local",
        "--rollout.eval-temperature", 1.0, "--output-dir", "grpo",
    )  # fmt: skip
    rows = read(folder / "grpo" / "metrics.jsonl")
    scores = [row["eval/reward/mean"] for row in rows if "eval/reward/mean" in row]
    steps = [row for row in rows if "reward/mean" in row]
    gaps = [row["policy/behaviour_gap"] for row in steps if "policy/behaviour_gap" in row]  # steps that train
    names = ("rollout/num_turns", "rollout/branches", "rollout/env_failed")
    return make_row(
        "agents", agent, Timing([1000 * row["time/step_s"] for row in steps], None),
        shape={"prompts": cfg.prompts, "G": cfg.group, "sft_steps": cfg.sft_steps, "steps": cfg.steps},
        dtype="bfloat16" if torch.cuda.is_available() else "float32", work=cfg.prompts * cfg.group, unit="episodes",
        errors={"logp_gap": max(gaps, default=math.nan)},
        extra={"before": scores[0], "after": scores[-1], "gain": scores[-1] - scores[0],
               **{name.rpartition("/")[2]: steps[-1][name] for name in names}},
    )  # fmt: skip


def main() -> None:
    cfg = tyro.cli(Settings)
    require_commit()
    with tempfile.TemporaryDirectory() as scratch:
        for agent in cfg.agents:
            emit([run(cfg, agent, (cfg.folder or Path(scratch)).absolute() / agent)], cfg.out)


if __name__ == "__main__":
    main()
