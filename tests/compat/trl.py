"""Every config, command and snippet in a copy of TRL through trainer.from_trl: python -m tests.compat.trl FOLDER ...

FOLDER is a source archive (trl-1.16.0.tar.gz), the same unpacked, or a checkout. Read are YAML files and blocks,
commands (`trl sft --...`, `accelerate launch ... grpo.py --...`) in documents and docstrings, and the XConfig(...)
calls of scripts, documents and notebooks. Prints a table of outcomes, and with --all a line for each. The exit code is
1 if one raised something other than an error message, or if a field of an accepted one was neither translated to its
value nor reported.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from trainer import from_trl
from trainer.translate.keys import EMPTY, OPTIMIZERS, find, leaves
from trainer.translate.trl import REWARDS, TABLE, UNCHANGED
from trainer.translate.trl_kinds import KINDS, UNSUPPORTED

CONFIGS = {entry.config for entry in KINDS.values()} | set(UNSUPPORTED)
COMMAND = re.compile(r"^[ $]*((?:[A-Z_]+=\S+ +)*(?:trl|accelerate launch|python3?|torchrun|uv run) .*--\w.*)$", re.M)
BLOCK = re.compile(r"^( *)```(yaml|python)[^\n]*\n(.*?)^ *```", re.M | re.S)
OUTCOMES = ("accepted", "accepted, with lines without equivalent", "rejected by name", "traceback", "silent difference")
# Values that become a flag of another name or value, or that are what strop does by default.
SAME = {
    "use_vllm": [True], "use_peft": [True], "bf16": [True], "fp16": [False], "report_to": ["none"], "max_steps": [-1],
    "eval_strategy": ["no", "steps", "epoch"], "save_strategy": ["no", "steps", "epoch"], "optim": list(OPTIMIZERS),
    "lr_scheduler_type": ["constant_with_warmup"], "steps_per_generation": range(1, 1000), "scale_rewards": [True],
    "generation_batch_size": range(1, 1 << 16), "dataset_text_field": ["text"], "dtype": ["float32"],
    "multi_objective_aggregation": ["sum_then_normalize"], "completion_only_loss": [True], "top_p": [1], "top_k": [0],
    "assistant_only_loss": [True], "packing": [True], "repetition_penalty": [1], "use_adaptive_entropy": [True],
    "vllm_mode": ["server"], "lora_target_modules": ["all-linear"], "model_init_kwargs.dtype": ["float32"],
    "vespo_k_pos": [2], "vespo_lambda_pos": [3], "vespo_k_neg": [3], "vespo_lambda_neg": [2], "stop_token": ["eos"],
    "f_alpha_divergence_coef": [0.5], "discopop_tau": [0.05], "kl_estimator": ["k1"],
    "train_sampling_strategy": ["random"], "shuffle_dataset": [True],
}  # fmt: skip


def items(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, text, name of the file if the text names one) in the order of the document."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix in (".yaml", ".yml"):
        yield "yaml", text, ""
        return
    cells = [text] if path.suffix == ".py" else []
    if path.suffix == ".ipynb":
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        cells = [re.sub(r"^\s*[!%].*$", "", cell, flags=re.M) for cell in cells]
    found = [(0, "snippet", call, "") for cell in cells for call in calls(cell)]
    for block in BLOCK.finditer(text):
        body = re.sub(rf"^{block[1]}", "", block[3], flags=re.M)
        if block[2] == "python":
            found += [(block.start(), "snippet", call, "") for call in calls(body)]
        elif re.search(r"^\w+:", body, re.M):
            named = re.match(r"# (\S+\.yaml)", body)
            found.append((block.start(), "yaml", body, named[1] if named else ""))
    joined = re.sub(r"\\+\n", lambda match: " " * len(match[0]), text)
    commands = [] if path.suffix == ".ipynb" else COMMAND.finditer(joined)
    found += [(one.start(), "command", re.sub(r"\s+", " ", one[1]), "") for one in commands
              if one[1].startswith("trl ") or ".py" in one[1]]  # fmt: skip
    for _, *item in sorted(found, key=lambda one: one[0]):
        yield item[0], item[1], item[2]


def calls(text: str) -> list[str]:
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    except SyntaxError:
        return []
    return [ast.unparse(node) for node in nodes if node.keywords
            and ast.unparse(node.func).rpartition(".")[2] in CONFIGS]  # fmt: skip


def run(kind: str, text: str) -> tuple[str, str]:
    """Return the outcome and what was printed or raised."""
    if kind == "command":
        argv = shlex.split(text, comments=True)
    else:
        file = Path("config.yaml" if kind == "yaml" else "config.py")
        file.write_text(text, encoding="utf-8")
        argv = [str(file)]
    seen: list[tuple[Any, Any]] = []

    def translate(tree: Any, name: str) -> Any:
        seen.append((tree, from_trl_translate(tree, name)))
        return seen[-1][1]

    from_trl_translate = from_trl.translate
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), \
                mock.patch.object(from_trl, "translate", translate):  # fmt: skip
            code = from_trl.main(argv)
    except (Exception, SystemExit):
        return "traceback", traceback.format_exc()
    if code:
        return "rejected by name", err.getvalue()
    tree, (made, without) = seen[-1]
    if lost := [f"{key}={value}" for key, value in leaves(tree, TABLE) if is_lost(key, value, made, without)]:
        return "silent difference", ", ".join(lost)
    return OUTCOMES[1 if "no equivalent:" in err.getvalue() else 0], err.getvalue()


def is_lost(key: str, value: Any, made: Any, without: list[str]) -> bool:
    """Whether a field was neither reported nor translated to its value."""
    reported = [*without, *made.notes, *(key for keys in made.idle.values() for key in keys)]
    if value in (None, *UNCHANGED.get(key, EMPTY)) or value in SAME.get(key, ()) or key in ("config_class", "env"):
        return False
    flag = f"--{key.replace('_', '-')} {value}"
    if any(re.match(rf"{re.escape(key)}\b", line) or line.endswith(flag) for line in reported):
        return False
    ours = [str(each) for each in flat(made.tree)]
    theirs = [REWARDS.get(str(each), str(each)) for each in flat(value)]
    entry = find(key, TABLE)
    text = entry.text if entry else ""
    if text == "the flag of that name":
        ours = [str(each) for each in flat(made.tree.get(key, []))]
    if "any other kernel: auto" in text or (key == "num_train_epochs" and "max_steps" in made.tree):
        return False
    return not all(any(is_same(one, each) for each in ours) for one in theirs)


def is_same(theirs: str, ours: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(theirs) == float(ours)
    return theirs in ours


def flat(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if inner is None else [leaf for item in inner for leaf in flat(item)]


def unpacked(path: Path) -> Path:
    if path.is_dir():
        return path
    folder = Path(tempfile.mkdtemp())
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main(argv: list[str]) -> int:
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in ("yaml", "command", "snippet")}
    reasons: Counter[str] = Counter()
    folders = [unpacked(Path(name)) for name in argv if name != "--all"]
    paths = [path.resolve() for folder in folders for path in sorted(folder.rglob("*"))
             if path.suffix in (".yaml", ".yml", ".md", ".py", ".ipynb") and path.is_file()]  # fmt: skip
    done: set[tuple[str, str]] = set()
    for path in paths:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for kind, text, name in items(path):
                if name:  # for the command below it, with --config
                    Path(name).write_text(text, encoding="utf-8")
                if name or (kind, text) in done and "--config" not in text:
                    continue
                done.add((kind, text))
                outcome, said = run(kind, text)
                counts[kind][outcome] += 1
                if outcome in OUTCOMES[2:]:
                    reasons[said.strip().splitlines()[-1][:150]] += 1
                if "--all" in argv or outcome in OUTCOMES[3:]:
                    print(f"{outcome} | {path} | {text.strip()[:300]} | {said.strip()}")
    for reason, count in reasons.most_common():
        print(f"{count:4} {reason}")
    print(json.dumps({kind: {name: count[name] for name in OUTCOMES} for kind, count in counts.items()}, indent=1))
    return int(any(count[name] for count in counts.values() for name in OUTCOMES[3:]))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main(sys.argv[1:]))
