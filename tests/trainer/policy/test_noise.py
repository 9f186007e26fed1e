"""NEFTune noise: its size in packed rows, passes without noise, and resume."""

from __future__ import annotations

import math

import pytest
import torch

from data.packing import Item, make_batches
from tests.entry import metrics, repeatable, small_model
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.offline import rows
from trainer.policy.load import load_policy
from trainer.policy.logps import causal_lm, token_logps
from trainer.policy.noise import add_noise, sequence_lengths

CPU = torch.device("cpu")


def test_lengths_of_packed_and_padded_sequences():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])  # row 0 ends with two padding positions
    assert sequence_lengths(positions).tolist() == [[3, 3, 3, 2, 2, 1, 1], [7] * 7]


@pytest.mark.parametrize("packing", [True, False])
def test_noise_is_uniform_within_alpha_over_sqrt_length(packing):
    policy = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), CPU, with_reference=False)
    lm, alpha, lengths = causal_lm(policy.model), 5.0, (40, 9, 160)
    seen = {}
    embedding = lm.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, out: seen.update(plain=out.detach()))
    add_noise(policy, alpha)
    embedding.register_forward_hook(lambda module, args, out: seen.update(noisy=out.detach()))
    items = [Item(ids=list(range(3, 3 + n)), mask=[False] + [True] * (n - 1)) for n in lengths]
    for batch in make_batches(items, max_tokens=1024, packing=packing):
        token_logps(policy, batch)
        noise = seen["noisy"] - seen["plain"]  # (R, T, D)
        position_lengths = sequence_lengths(batch.position_ids)
        for length in lengths:
            sample = noise[position_lengths == length]
            assert len(sample) == length
            bound = alpha / math.sqrt(length * noise.shape[-1])
            assert sample.abs().max() <= bound + 1e-6 and sample.abs().max() > 0.9 * bound
            assert sample.mean().abs() < 0.1 * bound and sample.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        with torch.no_grad():
            token_logps(policy, batch)
        assert torch.equal(seen["noisy"], seen["plain"]), "no-grad pass"
        policy.model.eval()
        token_logps(policy, batch)
        assert torch.equal(seen["noisy"], seen["plain"]), "evaluation"
        policy.model.train()


ARGV = ["--method", "sft", "--data", "task:addition:split=sft,size=16", "--save-steps", "2",
        "--per-device-train-batch-size", "4", "--learning-rate", "1e-3", "--lr-scheduler-type", "constant"]  # fmt: skip


@pytest.mark.parametrize("extra", [["--neftune-noise-alpha", "5"], ["--optim", "muon", "--weight-decay", "0.1"]])
def test_resumed_run_matches_an_uninterrupted_run(extra, tmp_path, capfd):
    model = small_model(tmp_path / "model")
    for name, steps in (("plain", 4), ("whole", 4), ("half", 2)):
        flags = extra if name != "plain" else []
        argv = [*ARGV, "--model", model, "--max-steps", str(steps), *flags]
        assert main([*argv, "--output-dir", str(tmp_path / name)]) == 0
    assert main(["--resume", str(tmp_path / "half"), "--max-steps", "4"]) == 0
    rows = {name: repeatable(metrics(tmp_path / name)) for name in ("plain", "whole", "half")}
    assert rows["whole"] == rows["half"]
    assert rows["whole"][-1]["loss/nll"] != rows["plain"][-1]["loss/nll"]


@pytest.mark.parametrize("argv", [["grpo"], ["ebft"], ["ebft", "--mode", "strided"]])
def test_sampling_methods_reject_noise(argv, tmp_path, capsys):
    assert main(["--method", *argv, "--neftune-noise-alpha", "5", "--output-dir", str(tmp_path / "run")]) == 2
    assert "neftune_noise_alpha=5.0" in capsys.readouterr().err


def test_pairs_do_not_share_prompts_with_noise(tmp_path, monkeypatch):
    """The scale depends on the length of each sequence, which a shared prompt would hide."""
    shared: list[bool] = []

    def record(items, *, share_prompt=False, **options):
        shared.append(share_prompt)
        return make_batches(items, share_prompt=share_prompt, **options)

    monkeypatch.setattr(rows, "make_batches", record)
    argv = ["--method", "dpo", "--data", "task:addition:split=train,size=8", "--max-steps", "1"]
    for name, flags in (("plain", []), ("noise", ["--neftune-noise-alpha", "5"])):
        assert main([*argv, *flags, "--output-dir", str(tmp_path / name)]) == 0
    assert shared == [True, False]
