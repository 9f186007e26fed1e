"""Proofs for hybrid models: random weights learn the demo's sums by SFT, then by GRPO; killed runs resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.entry import metrics, repeatable, run_ok
from tests.test_resume import GRPO, start_and_kill
from trainer.tiny.build import RECIPE, make_tokenizer

COMMON = dict(
    hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=6,
    max_position_embeddings=512, bos_token_id=None, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
    "qwen3_5_text": dict(
        layer_types=["linear_attention", "full_attention"] * 2, head_dim=32, linear_num_key_heads=4,
        linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
    ),
}  # fmt: skip


def build(kind: str, folder: Path) -> int:
    """Save random weights and the demo's tokenizer; return the number of weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **COMMON | KINDS[kind])
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def learns(
    scratch: Path, kind: str, *, sft_steps: int = 2500, grpo_steps: int = 300, rows: int = 64
) -> tuple[str, bool]:
    """SFT on the sloppy sums of the built-in model, then GRPO: at least 0.85 of the held-out sums are right."""
    size = build(kind, scratch / "random")
    options = {"cwd": scratch, "timeout": 7200, "threads": 1}
    data = f"task:addition:split=sft,size={rows * sft_steps},sloppy=0.6,boxed=0.2"
    sft = ["--config", RECIPE, "--model", scratch / "random", "--data", data, "--eval-steps", 0]
    sft += ["--per-device-train-batch-size", rows]
    run_ok(*sft, "--output-dir", scratch / "sft", **options)
    nll = [row["eval/nll"] for row in metrics(scratch / "sft") if "eval/nll" in row]
    trained = ["--model", scratch / "sft" / "final"]
    demo = ["--config", RECIPE.parent / "grpo_tiny.yaml", "--save-steps", 0]
    grpo = [*demo, *trained, "--max-steps", grpo_steps]  # of the demo's 128 rows
    run_ok(*grpo, "--output-dir", scratch / "grpo", **options)
    right = [row["eval/exact_match/mean"] for row in metrics(scratch / "grpo") if "eval/exact_match/mean" in row]
    equal = [resumes([*argv, *trained], scratch / name) for name, argv in (("kill-grpo", GRPO), ("kill-sft", SHORT))]
    figure = (
        f"{size / 1e6:.1f} million weights: held-out nll {nll[0]:.2f} -> {nll[-1]:.2f}, accuracy {right[0]:.3f} -> "
        f"{right[-1]:.3f}, killed and resumed runs {'equal' if all(equal) else 'DIFFER'}"
    )
    return figure, right[-1] >= 0.85 > right[0] and all(equal)


SHORT = [
    "--method", "sft", "--max-steps", 6, "--save-steps", 2, "--per-device-train-batch-size", 16,
    "--data", "task:addition:split=sft,size=256", "--eval-data", "task:addition:split=eval,size=8",
]  # fmt: skip


def resumes(argv: list[Any], folder: Path) -> bool:
    """Return whether a run killed after step 3 and resumed has the metrics and samples of an unbroken run."""
    folder.mkdir()
    run_ok(*argv, "--output-dir", folder / "whole", cwd=folder)
    start_and_kill(argv, folder / "broken", at_step=3)
    run_ok("--resume", "--output-dir", folder / "broken", cwd=folder)
    logs = [(folder / name / "samples.jsonl") for name in ("whole", "broken")]
    texts = [log.read_text() if log.exists() else "" for log in logs]
    return texts[0] == texts[1] and repeatable(metrics(folder / "whole")) == repeatable(metrics(folder / "broken"))
