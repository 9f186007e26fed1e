"""Proofs that energy-based fine-tuning learns, compared with SFT on the same rows in the same order.

Criterion: the held-out distance between rollout and target features falls, or ends below SFT's. Cross-entropy and SFT's
figures are only reported.
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
    """Compare the two default commands."""
    run_ok("--method", "ebft", "--mode", mode, "--output-dir", scratch / "ebft", cwd=scratch, timeout=1800, threads=2)
    return compare_with_sft(scratch)


def stories(scratch: Path, mode: str) -> tuple[str, bool]:
    """Train a model of children's stories on Shakespeare."""
    assets = os.environ.get("STROP_ASSETS")
    assert assets, "STROP_ASSETS: set it to a folder with models/stories260K and data/tinyshakespeare.txt.gz"
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
    return compare_with_sft(scratch)


def passages(path: Path, scratch: Path, mode: str) -> tuple[Path, Path]:
    """Write passages of a play as training and held-out rows: as text, or split into prompt and target completion."""
    text = gzip.open(path, "rt", encoding="utf-8").read()
    length = 160
    texts = [text[start : start + length] for start in range(0, len(text) - length, length)]
    if mode == "strided":
        rows = [{"text": x} for x in texts if x.strip()]
    else:
        rows = [{"prompt": x[:120], "completion": x[120:]} for x in texts if x.strip()]
    files = scratch / "train.jsonl", scratch / "eval.jsonl"
    for file, part in zip(files, (rows[:-100], rows[-100:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return files


def compare_with_sft(scratch: Path) -> tuple[str, bool]:
    """Run SFT with the rows, order and learning rate of scratch/ebft, and evaluate it with the same features."""
    config = scratch / "ebft" / "config.yaml"
    cfg = yaml.safe_load(config.read_text())
    group = cfg["num_generations"] if cfg["mode"] == "structured" else 1
    same = [f"--{name}={cfg[name]}" for name in ("model", "learning_rate", "warmup_ratio", "max_steps", "max_length")]
    run_ok(
        "--method", "sft", "--data", *cfg["data"], "--eval-data", *cfg["eval_data"], *same,
        "--per-device-train-batch-size", cfg["per_device_train_batch_size"] // group, "--max-tokens-per-micro-batch",
        1024, "--save-steps", 0, "--output-dir", scratch / "sft", cwd=scratch, timeout=1800, threads=2,
    )  # fmt: skip
    run_ok(
        "--config", config, "--model", scratch / "sft", "--feature-model", cfg["model"], "--max-steps", 1,
        "--save-steps", 0, "--eval-steps", 0, "--output-dir", scratch / "eval", cwd=scratch, timeout=900, threads=2,
    )  # fmt: skip
    rows = [row for row in metrics(scratch / "ebft") if "eval/cfm" in row]
    before, after, sft = rows[0], rows[-1], metrics(scratch / "eval")[0]
    labels = {"eval/cfm": "CFM", "eval/cfm_unbiased": "unbiased", "eval/nll": "cross-entropy"}
    figure = "; ".join(
        f"{label} {before[name]:.3f} -> {after[name]:.3f} (SFT {sft[name]:.3f})" for name, label in labels.items()
    )
    return figure, all(after[name] < max(before[name], sft[name]) for name in ("eval/cfm", "eval/cfm_unbiased"))
