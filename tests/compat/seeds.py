"""Run all that the seeds contain through the commands: python -m tests.compat.seeds FOLDER [--vllm] [BLOCK ...]

Prints one line for each YAML block (numbered from 0), row, snippet and shell command: what happened, or the sentence of
the error. Replaced in a block: base_model, paths of rows, output_dir, max_steps, the templates gemma and llama3, whose
delimiters the tiny tokenizer lacks, and the gym, whose agents and verifier are simulated. Without --vllm completions
are sampled in the trainer; with it, the run starts a vLLM server, in float32 and without the number of GPUs and the
share of memory, for the CPU build. A block without rows is a fragment: it is added to the DPO or GRPO block of its
document. FOLDER is created, for the files and the runs. STROP_ASSETS names the folder with seeds/.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from data.show import main as show
from rollout.rewards.__main__ import main as check
from rollout.serve import parse as serve
from rollout.servers.command import TOKEN
from tests.data.conftest import make_tokenizer
from tests.entry import ROOT, metrics, run_python, run_ranks
from tests.rollout.gyms.nemo_replay import Replay
from tests.rollout.gyms.test_nemo_gym import item, reply_of
from tests.test_seeds import ANSWERS, BROKEN, OTHERS, REWARDS, SNIPPETS, blocks, example_row, shared, write_rows
from tests.trainer.translate.test_seed_configs import indented, local, make_folder
from trainer.from_trl import main as from_trl

DPO, GRPO = 0, 8  # whole blocks that fragments are about
# Commands of the documents and their counterparts here; the first pattern that is found decides.
COMMANDS = {
    r"axolotl vllm-serve (\S+)": r"python -m rollout.serve --config \1 (not needed: the run starts servers)",
    r"axolotl train (\S+) --num-processes (\d+)": r"torchrun --nproc-per-node \2 -m trainer --config \1",
    r"CUDA_VISIBLE_DEVICES=\d+,\d+ axolotl train (\S+)": r"torchrun --nproc-per-node 2 -m trainer --config \1",
    r"axolotl train (\S+)": r"python -m trainer --config \1",
    r"python -m vllm\.entrypoints": "python -m rollout.serve --config config.yaml (not needed, as above)",
    r"ng_run": "unchanged; not needed with nemo_gym_auto_start: true",
    r"git clone|cd ~/Gym|uv ": "unchanged: installs NeMo Gym",
}


class Gym(Replay):
    """Verifies 1 for an even number of characters, otherwise 0; an agent's episode is always the same."""

    def answer(self, route: str, body: dict[str, Any], cookies: str) -> tuple[int, Any, str | None]:
        if route == "/verify":
            return 200, {"reward": float(len(json.dumps(body["response"]["output"])) % 2)}, None
        if route == "/run":
            self.ask(json.loads(body["responses_create_params"]["metadata"]["extra_body"]))
            return 200, reply_of(item(), reward=len(self.requests) % 2), None
        return super().answer(route, body, cookies)


def outcome(status: int, errors: str) -> str:
    found = [line.removeprefix("error: ") for line in errors.splitlines() if line.startswith("error: ")]
    return f"rejected: {' '.join(found) or errors[-2000:]}" if status else "accepted"


def called(command: Callable[[list[str]], int], *words: str) -> str:
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        return outcome(command(list(words)), err.getvalue())


def whole(config: dict[str, Any], configs: list[dict[str, Any]]) -> dict[str, Any]:
    if "datasets" in config and {"rl", "reward_model", "process_reward_model"} & config.keys():
        return config
    samples = config.get("rl") in ("grpo", "gdpo") or {"trl", "fsdp", "deepspeed"} & config.keys()
    base = configs[GRPO if samples else DPO]
    return base | config | ({"trl": base["trl"] | config.get("trl", {})} if samples else {})


def train(number: int, config: dict[str, Any], gym: Gym, here: Path, with_vllm: bool) -> str:
    """Two steps in FOLDER/out-NUMBER, and the address that rollout.serve reads from the same file."""
    made = local(config) | {"base_model": str(here / "tiny"), "output_dir": f"out-{number}"}
    os.environ[TOKEN] = "seed"  # of the endpoint, at which the gym's model server expects the model
    gym.endpoint = SimpleNamespace(token="seed", url="http://127.0.0.1:8000/v1")
    for rows in made.get("nemo_gym_datasets", ()):
        made |= {"nemo_gym_head_port": gym.port, "nemo_gym_dir": str(here)}
        question = {"input": [{"role": "user", "content": "2+2="}]}
        (here / rows["path"]).parent.mkdir(parents=True, exist_ok=True)
        write_rows(here / rows["path"], *({"responses_create_params": question, "id": number} for number in range(8)))
    for key in ("tensor_parallel_size", "gpu_memory_utilization") if with_vllm else ():
        made.get("vllm", {}).pop(key, None)
    file = here / f"{number}.yml"
    file.write_text(yaml.safe_dump(made, sort_keys=False))
    use_vllm = bool(made.get("trl", {}).get("use_vllm"))
    words = ["-m", "trainer", "--config", file.name]
    if use_vllm:
        words += ["--dtype", "float32"] if with_vllm else ["--rollout.engine", "local"]
    several = {"fsdp", "deepspeed", "context_parallel_size"} & made.keys()
    done = (run_ranks if several else run_python)(*words, cwd=here, timeout=900)
    if done.returncode:
        return outcome(done.returncode, done.stderr)
    steps = [row["step"] for row in metrics(here / f"out-{number}") if "loss/total" in row]
    ended = f"trained {steps[-1]} steps" + (" on 2 processes" if several else "")
    if use_vllm:
        with contextlib.redirect_stderr(io.StringIO()):
            cfg = serve(["--config", str(file)])
        ended += f"; rollout.serve: {cfg.vllm.host}:{cfg.vllm.port}, lora.r {cfg.lora.r}"
    return ended


def run_blocks(texts: list[str], here: Path, numbers: list[int], with_vllm: bool) -> Iterator[tuple[str, str]]:
    found = [(headings[-1].strip("# "), lines) for text in texts for headings, lines in blocks(text, "yaml")]
    configs = [yaml.safe_load(indented(lines)) for _, lines in found]
    with Gym() as gym:
        for number, (title, _) in enumerate(found):
            if number in (numbers or range(len(found))):
                made = whole(configs[number], configs)
                part = "" if made is configs[number] else " (fragment)"
                yield f"{number} {title}{part}", train(number, made, gym, here, with_vllm)


def run_rows(text: str, here: Path) -> Iterator[tuple[str, str]]:
    for kind in ("chatml", "llama3"):
        tokenizer = make_tokenizer(kind)
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        tokenizer.save_pretrained(here / kind)
    for headings, lines in blocks(text, "json"):
        section = next(heading for heading in reversed(headings) if re.match(r"### ", heading)).strip("# ")
        name = headings[-1].strip("# ")
        rows = write_rows(here / "row.jsonl", shared(example_row(lines)))
        kind = "unpaired" if section == "KTO" else "pairs"
        model = str(here / ("llama3" if name.startswith("llama3") else "chatml"))
        yield f"{section} {name}", called(show, "--data", rows, "--data-format", name, "--kind", kind, "--model", model)


def run_snippets(texts: list[str], here: Path) -> Iterator[tuple[str, str]]:
    made = {"adaptive": "from format import format_reward\nby_format = AdaptiveReward(format_reward)\n"}
    for name, source in SNIPPETS.items():
        if name != "rewards":  # is here, with what its document does not define
            (here / f"{name}.py").write_text(source + made.get(name, ""))
    row = {"prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "answers": "4"}
    data = write_rows(here / "scored.jsonl", *({**row, "completion": text} for text in ANSWERS))
    for name in [*REWARDS, *BROKEN]:
        yield name, called(check, "--check", name, "--data", data)
    for lines in [lines for text in texts for _, lines in blocks(text, "python") if lines[0] in OTHERS]:
        calls = re.search(r"GRPOConfig\(\n.*?\n\)", "\n".join(lines), re.S)
        if calls is None:
            yield lines[0], OTHERS[lines[0]]
            continue
        keywords = ast.parse(calls[0]).body[0].value.keywords
        (here / "trl.yaml").write_text(yaml.safe_dump({word.arg: ast.literal_eval(word.value) for word in keywords}))
        yield f"GRPOConfig of {lines[0]}", called(from_trl, str(here / "trl.yaml"), "--kind", "grpo")


def run_commands(texts: list[str]) -> Iterator[tuple[str, str]]:
    for lines in [lines for text in texts for _, lines in blocks(text, "bash")]:
        for line in "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", "").splitlines():
            found = ((re.search(pattern, line), there) for pattern, there in COMMANDS.items())
            yield line, next((match.expand(there) for match, there in found if match), "no counterpart")


def main(argv: list[str]) -> None:
    words = [word for word in argv if word != "--vllm"]
    seeds = Path(os.environ["STROP_ASSETS"], "seeds")
    texts = [path.read_text(encoding="utf-8") for path in sorted(seeds.glob("*.txt"))]
    here = make_folder(Path(words[0]).resolve())
    shutil.copytree(ROOT / "trainer" / "tiny", here / "tiny")
    config = json.loads((here / "tiny" / "config.json").read_text())
    (here / "tiny" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    os.chdir(here)
    sys.path.insert(0, str(here))
    numbers = [int(word) for word in words[1:]]
    parts = {"block": run_blocks(texts, here, numbers, "--vllm" in argv)}
    if not numbers:
        parts |= {"row": run_rows(texts[2], here), "snippet": run_snippets(texts, here), "command": run_commands(texts)}
    for part, results in parts.items():
        for name, ended in results:
            print(f"| {part} | {name} | {ended} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
