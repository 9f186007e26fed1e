"""Proofs that energy-based fine-tuning learns, beside SFT on the same rows in the same order.

What each is held to: the held-out distance between the features of rollouts and those of the target falls, or ends
below that of SFT. Cross-entropy and the figures of SFT are reported as found.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import yaml

from tests.entry import metrics, run_ok

STORIES_STEPS = 80


def tiny(scratch: Path, mode: str) -> tuple[str, bool]:
    """The two bare commands."""
    run_ok("--method", "ebft", "--mode", mode, "--output-dir", scratch / "ebft", cwd=scratch, timeout=1800, threads=2)
    return beside_sft(scratch)


def stories(scratch: Path, mode: str) -> tuple[str, bool]:
    """A model of children's stories, on Shakespeare."""
    assets = os.environ.get("STROP_ASSETS")
    assert assets, "STROP_ASSETS: not set; it names the folder with models/stories260K and data/tinyshakespeare.txt.gz"
    model = Path(assets) / "models" / "stories260K"
    data, held_out = passages(Path(assets) / "data" / "tinyshakespeare.txt.gz", scratch, mode)
    if mode == "structured":
        flags = ("--num-generations", 8, "--per-device-train-batch-size", 64, "--max-completion-length", 8)
    else:
        flags = ("--per-device-train-batch-size", 8, "--max-length", 96)
    run_ok(
        "--method", "ebft", "--mode", mode, "--model", model, "--data", data, "--eval-data", held_out, *flags,
        "--ce-coef", 0.1, "--learning-rate", 5e-4, "--warmup-ratio", 0.05, "--max-steps", STORIES_STEPS,
        "--max-tokens-per-micro-batch", 512, "--max-eval-rows", 60, "--save-steps", 0, "--eval-steps", 40,
        "--output-dir", scratch / "ebft", cwd=scratch, timeout=3600, threads=2,
    )  # fmt: skip
    return beside_sft(scratch)


def passages(path: Path, scratch: Path, mode: str) -> tuple[Path, Path]:
    """Passages of a play: whole as text, or the first half as prompt and the second as its true completion."""
    text = gzip.open(path, "rt", encoding="utf-8").read()
    length = 160
    cut = [text[start : start + length] for start in range(0, len(text) - length, length)]
    rows = [{"text": x} if mode == "strided" else {"prompt": x[:120], "completion": x[120:]} for x in cut if x.strip()]
    files = scratch / "train.jsonl", scratch / "eval.jsonl"
    for file, part in zip(files, (rows[:-100], rows[-100:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return files


def beside_sft(scratch: Path) -> tuple[str, bool]:
    """SFT with the rows, order and rate of the run in scratch/ebft; then its model by the same features."""
    config = scratch / "ebft" / "config.yaml"
    ran = yaml.safe_load(config.read_text())
    group = ran["num_generations"] if ran["mode"] == "structured" else 1
    same = [f"--{name}={ran[name]}" for name in ("model", "learning_rate", "warmup_ratio", "max_steps", "max_length")]
    run_ok(
        "--method", "sft", "--data", *ran["data"], "--eval-data", *ran["eval_data"], *same,
        "--per-device-train-batch-size", ran["per_device_train_batch_size"] // group, "--max-tokens-per-micro-batch",
        1024, "--save-steps", 0, "--output-dir", scratch / "sft", cwd=scratch, timeout=1800, threads=2,
    )  # fmt: skip
    run_ok(
        "--config", config, "--model", scratch / "sft", "--feature-model", ran["model"], "--max-steps", 1,
        "--save-steps", 0, "--eval-steps", 0, "--output-dir", scratch / "judged", cwd=scratch, timeout=900, threads=2,
    )  # fmt: skip
    rows = [row for row in metrics(scratch / "ebft") if "eval/cfm" in row]
    before, after, imitated = rows[0], rows[-1], metrics(scratch / "judged")[0]
    names = (("eval/cfm", "CFM"), ("eval/cfm_unbiased", "without bias"), ("eval/nll", "cross-entropy"))
    figure = "; ".join(
        f"{shown} {before[name]:.3f} -> {after[name]:.3f} (SFT {imitated[name]:.3f})" for name, shown in names
    )
    names = ("eval/cfm", "eval/cfm_unbiased")
    return figure, all(after[name] < max(before[name], imitated[name]) for name in names)
