"""Metrics of every method, kept to compare a refactoring with: python -m tests.record FOLDER [--against FOLDER].

    python -m tests.record /tmp/before            # on the commit before the change; about ten minutes on two cores
    python -m tests.record /tmp/after --against /tmp/before

Every method and its main variants train three steps on the local engine with one thread. With --against, every number
of metrics.jsonl must be equal, clocks and memory aside; the exit status says whether all were. --only NAME runs the
cases whose name contains it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.entry import environment, metrics, repeatable
from trainer.cli import method_names

STEPS = ["--max-steps", "3", "--save-steps", "3", "--eval-steps", "2"]
SAMPLED = ["--per-device-train-batch-size", "16", "--eval-data", "task:addition:split=eval,size=20"]
STRIDED = [
    "--method", "ebft", "--mode", "strided", "--per-device-train-batch-size", "2",
    "--data", "task:steps:split=sft,size=16,difficulty=5", "--eval-data", "task:steps:split=eval,size=4,difficulty=5",
]  # fmt: skip
STRUCTURED = [
    "--method", "ebft", "--per-device-train-batch-size", "16",
    "--data", "task:addition:split=train,size=64", "--eval-data", "task:addition:split=eval,size=4",
]  # fmt: skip
LOSSES = ("grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo", "rloo", "reinforce")


OPTIONS = {
    "delta": "--delta 4 --epsilon-high 0.28",
    "two minibatches": "--minibatches-per-rollout 2 --num-iterations 2",
    "ratio to the engine": "--proximal-policy behaviour --num-iterations 2",
    "geometric and off policy": "--geometric-min 0.999 --geometric-max 1.001 --off-policy-mask-threshold 0.0001",
    "sequence mask": "--vllm-importance-sampling-mode sequence_mask --beta 0.05 --kl-estimator k2",
    "no correction": "--no-vllm-importance-sampling-correction --mask-truncated-completions",
    "entropy target": "--entropy-target 1.0 --entropy-coef 0.01",
    "batch scale": "--scale-rewards batch --overlong-margin 2",
    "vespo iterations": "--loss-type vespo --num-iterations 2",
}
OTHERS = {
    "ppo kl in reward": "--method ppo --beta 0.1 --kl-in-reward",
    "opd whole distribution": "--method opd --jsd-beta 0.5",
    "online_dpo iterations": "--method online_dpo --num-iterations 2",
    "dpo mixture": "--method dpo --loss-type sigmoid bco_pair sft --loss-weights 0.8 0.2 1.0",
    "dpo aot": "--method dpo --loss-type aot",
    "dpo weighted": "--method dpo --use-weighting --ld-alpha 0.5 --rpo-alpha 0.5",
    "dpo moving reference": "--method dpo --sync-ref-model --ref-model-sync-steps 1",
    "kto apo": "--method kto --loss-type apo_zero_unpaired",
    "sft dft": "--method sft --sft-loss dft",
}


def cases() -> dict[str, list[str]]:
    """Name of a case -> its flags. Names that end in `2 ranks` run under torchrun."""
    grpo = ["--method", "grpo", *SAMPLED]
    found = {name: ["--method", name] for name in method_names() if name not in ("grpo", "ebft")}
    found |= {
        "grpo": grpo,
        "grpo lora kl": [*grpo, "--lora.r", "4", "--beta", "0.1"],
        "grpo kl in reward": [*grpo, "--beta", "0.1", "--kl-in-reward"],
        "grpo iterations": [*grpo, "--num-iterations", "2"],
        "grpo dynamic replay": [*grpo, "--dynamic-sampling", "--replay-buffer-size", "8"],
        "grpo sequence level": [*grpo, "--importance-sampling-level", "sequence", "--num-iterations", "2"],
        "grpo entropy": [*grpo, "--top-entropy-quantile", "0.5", "--entropy-coef", "0.01"],
        "grpo not shared": [*grpo, "--no-share-prompt", "--max-tokens-per-micro-batch", "64"],
        "ebft structured": STRUCTURED,
        "ebft structured lora": [*STRUCTURED, "--lora.r", "4", "--ce-coef", "0.1", "--use-whitening"],
        "ebft strided": STRIDED,
        "dpo lora precomputed": ["--method", "dpo", "--lora.r", "4", "--ref", "precomputed"],
        "sft lora": ["--method", "sft", "--lora.r", "4"],
    }
    found |= {f"grpo {name}": [*grpo, *words.split()] for name, words in OPTIONS.items()}
    found |= {name: words.split() for name, words in OTHERS.items()}
    found |= {f"grpo loss {name}": [*grpo, "--loss-type", name] for name in LOSSES}
    for name in ("sft", "dpo", "kto", "grpo", "grpo lora kl", "ebft structured", "ebft strided"):
        found[f"{name} 2 ranks"] = found[name]
    return found


def run_case(name: str, argv: list[str], folder: Path) -> str | None:
    """None, or why it failed."""
    run_dir = folder / name.replace(" ", "_")
    words = [*argv, *STEPS, "--seed", "3", "--output-dir", str(run_dir), "--overwrite-output-dir"]
    launcher = [sys.executable, "-m"]
    if name.endswith("2 ranks"):
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = subprocess.run(
        [*launcher, "trainer", *words], env=environment(threads=1), capture_output=True, text=True, timeout=900
    )
    return None if done.returncode == 0 else f"{name}: exit code {done.returncode}\n{done.stderr[-1500:]}"


def differences(name: str, folder: Path, against: Path) -> list[str]:
    """One line per step whose numbers differ."""
    paths = [root / name.replace(" ", "_") for root in (folder, against)]
    after, before = (repeatable(metrics(path)) for path in paths)
    if [row["step"] for row in after] != [row["step"] for row in before]:
        return [f"{name}: steps {[row['step'] for row in after]}, before {[row['step'] for row in before]}"]
    lines = []
    for new, old in zip(after, before, strict=True):
        keys = [key for key in {**old, **new} if json.dumps(old.get(key)) != json.dumps(new.get(key))]
        if keys:
            shown = ", ".join(f"{key} {old.get(key)} -> {new.get(key)}" for key in keys[:3])
            lines.append(f"{name}: step {new['step']}: {len(keys)} differ: {shown}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.record", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    chosen = {name: words for name, words in cases().items() if args.only in name}
    bad: list[str] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for name, failed in zip(
            chosen, pool.map(lambda case: run_case(*case, args.folder), chosen.items()), strict=True
        ):
            found = [failed] if failed else differences(name, args.folder, args.against) if args.against else []
            bad += found
            print("\n".join(found) or f"{name}: {'equal' if args.against else 'kept'}", flush=True)
    print(f"{len(chosen)} cases, {len(bad)} differences")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
