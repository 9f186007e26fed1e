"""The YAML of the documents that users come with is read as it is, and trains on local rows with the tiny model.

The documents lost the white space at the beginning of their lines; the table of keys says which line belongs to which
block. What only a hub or a GPU has (models, datasets, servers) is replaced by what is here.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.entry import metrics, run_ok
from tests.test_seeds import SNIPPETS, blocks
from trainer.cli import parse
from trainer.translate.axolotl import is_axolotl
from trainer.translate.axolotl_table import TABLE
from trainer.translate.keys import find

EXAMPLES = Path(__file__).parent / "examples"
LISTS = ("datasets", "nemo_gym_datasets", "reward_funcs", "plugins", "fsdp", "data_files")
# All that is replaced in a block, or added, besides the paths of its rows.
BASE = {"base_model": "builtin:tiny", "max_steps": 2, "output_dir": "out"}
ROWS = {"chatml.intel": "questions", "chatml": "questions", "chat_template.default": "conversation",
        "chat_template.argilla": "ultra", "chatml.ultra": "labelled", "rewards.oai_gsm8k_transform": "gsm",
        "math_env.math_transform": "gsm", "rewards.prompt_transform": "gsm", "ebft_opencode.transform": "code",
        "ebft_strided_structured.transform": "solutions", "bradley_terry.chat_template": "intel",
        "stepwise_supervised": "steps"}  # fmt: skip
MORE_REWARDS = """

def accuracy_reward(completions, answer, **kwargs):
    return [float(each[0]["content"].strip() == want) for each, want in zip(completions, answer)]


def format_reward(completions, **kwargs):
    return [float(each[0]["content"].strip().isdigit()) for each in completions]


prompt_transform, correctness_reward = oai_gsm8k_transform, accuracy_reward
"""


def depth(inside: list[str], key: str) -> int:
    """In how many of the blocks a key is: where it is known by its name, else where anything may be."""
    levels = [(number, ".".join([*inside[:number], key])) for number in range(len(inside), -1, -1)]
    named = [n for n, name in levels if name in TABLE or any(other.startswith(f"{name}.") for other in TABLE)]
    return named[0] if named else next((n for n, name in levels if find(name, TABLE) is not None), 0)


def indented(lines: list[str]) -> str:
    """The same lines with their white space: a line is inside a block if the table has its key there."""
    found, inside = [], []  # the blocks that a line is in
    for line in lines:
        if line.startswith("#"):
            continue
        is_item, text = line.startswith("- "), line.removeprefix("- ")
        key = text.partition(":")[0].strip()
        if is_item:
            while inside and inside[-1].removesuffix("[]") not in LISTS:
                inside.pop()
            item_of_block = ":" in text and not re.match(r"[\w.]+$", text)
            found.append("  " * (len(inside) - 1) + f"- {text}")
            if item_of_block and not inside[-1].endswith("[]"):
                inside[-1] += "[]"
        else:
            del inside[depth(inside, key) :]
            found.append("  " * len(inside) + text)
        if text.split("#")[0].strip().endswith(":"):
            inside.append(key)
    return "\n".join(found)


def configs(seeds: list[str]) -> list[dict[str, Any]]:
    return [yaml.safe_load(indented(lines)) for text in seeds for _, lines in blocks(text, "yaml")]


@pytest.fixture
def seeds(asset) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(asset("seeds").glob("*.txt"))]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(make_folder(tmp_path / "here"))
    return Path.cwd()


def make_folder(here: Path) -> Path:
    """The rows and the user's modules that the blocks name."""
    shutil.copytree(EXAMPLES, here)
    (here / "rewards.py").write_text(SNIPPETS["rewards"] + MORE_REWARDS)
    (here / "math_env.py").write_text(SNIPPETS["math_env"])
    rows = [{**pair, "question": pair["input"], "prompt": pair["input"]} for pair in read(here, "intel")]
    write(here, "questions", [{**row, "system": "Be brief."} for row in rows])
    write(here, "pairs", [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in rows])
    write(here, "conversation", [{**row, "messages": row["conversation"]} for row in read(here, "conversations")])
    return here


def read(here: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (here / "rows" / f"{name}.jsonl").read_text().splitlines()]


def write(here: Path, name: str, rows: list[dict]) -> None:
    (here / "rows" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def local(config: dict[str, Any]) -> dict[str, Any]:
    """With what is here: the tiny model and rows of this folder."""
    made = copy.deepcopy({**config, **BASE})
    if made.get("chat_template") == "gemma":  # the tiny tokenizer has no delimiters of Gemma
        made["chat_template"] = "chatml"
    for dataset in made.get("datasets", []):
        kind = dataset.get("type")
        if kind == "llama3.ultra":  # the tiny tokenizer has no delimiters of Llama 3
            kind = dataset["type"] = "chatml.ultra"
        if isinstance(kind, dict):
            name = "labelled" if "field_label" in kind else "pairs"
        else:
            name = ROWS.get(kind, "gsm")
        dataset.pop("name", None)
        if "data_files" in dataset:
            dataset["data_files"] = [f"rows/{name}.jsonl"]
        else:
            dataset["path"] = f"rows/{name}.jsonl"
        if "split" in dataset:
            dataset["split"] = "train[:12]"
    return made


def test_white_space_is_restored(seeds):
    found = configs(seeds)
    assert len(found) == 34
    first, full = found[0], next(config for config in found if "max_steps" in config)
    assert [row["type"] for row in first["datasets"]] == ["chatml.intel", "chatml"]
    assert full["trl"]["reward_funcs"] == ["rewards.accuracy_reward"] and full["datasets"][0]["split"] == "train"
    assert full["micro_batch_size"] == 2 and full["vllm"]["gpu_memory_utilization"] == 0.35
    assert found[2]["datasets"][0]["type"]["prompt_format"] == "{prompt}"
    assert found[1]["datasets"][0]["roles"] == {"user": ["user"], "assistant": ["assistant"], "system": ["system"]}


def test_every_config_of_the_documents_is_read(seeds, folder, monkeypatch):
    for config in configs(seeds):
        monkeypatch.setenv("WORLD_SIZE", str(config.get("context_parallel_size", 1)))
        whole = local(config)
        assert is_axolotl({**BASE, **config})
        if not {"reward_model", "process_reward_model"} & config.keys():
            whole.setdefault("rl", "grpo" if "trl" in config else "dpo")
        prompts = whole.get("rl") in ("grpo", "gdpo")
        whole.setdefault("datasets", [{"path": "rows/gsm.jsonl" if prompts else "rows/pairs.jsonl"}])
        Path("c.yml").write_text(yaml.safe_dump(whole))
        parse(["--config", "c.yml"])


def test_the_gyms_configs_use_the_gym(seeds, folder):
    single, turns = (config for config in configs(seeds) if "nemo_gym_datasets" in config)
    Path("single.yml").write_text(yaml.safe_dump(local(single)))
    _, cfg, _ = parse(["--config", "single.yml"])
    assert cfg.nemo_gym.datasets[0].endswith("train_basic_arithmetic.jsonl@reasoning_gym")
    assert cfg.reward.reward_funcs == ("nemo_gym:verify",) and not cfg.data.data
    Path("turns.yml").write_text(yaml.safe_dump(local(turns)))
    _, cfg, _ = parse(["--config", "turns.yml"])
    assert cfg.nemo_gym.multi_turn and cfg.reward.reward_funcs == ("env",) and cfg.nemo_gym.endpoint_port == 8000
    assert cfg.overlap.async_prefetch and cfg.sync.backend == "lora" and cfg.overlap.vllm_sync_interval == 5


FAST = (6,)  # number of the config, from 0: KTO with fields of the user's
SLOW = (0, 1, 2, 4, 5, 8, 9, 19, 22, 26, 27, 30, 32, 33)


def train(seeds: list[str], number: int, folder: Path) -> None:
    whole = local(configs(seeds)[number])
    if not {"reward_model", "process_reward_model"} & whole.keys():
        whole.setdefault("rl", "dpo")
    words = []
    if whole.get("rl") in ("grpo", "gdpo", "ebft") and whole.get("ebft", {}).get("mode") != "strided":
        words = ["--rollout.engine", "local", "--max-completion-length", 8]
        whole["trl"].pop("reward_num_workers", None)  # workers start slowly
        if whole["trl"].get("reward_funcs") == [
            "math_env.math_reward"
        ]:  # fails on chats, which its own transform makes
            whole["trl"]["reward_funcs"] = ["rewards.rand_reward_func"]
    Path("c.yml").write_text(yaml.safe_dump(whole))
    run_ok("--config", "c.yml", *words, cwd=folder)
    assert [row["step"] for row in metrics(folder / "out") if "loss/total" in row][-1] == 2


@pytest.mark.parametrize("number", FAST)
def test_it_trains(number, seeds, folder):
    train(seeds, number, folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", SLOW)
def test_the_others_train_too(number, seeds, folder):
    train(seeds, number, folder)
