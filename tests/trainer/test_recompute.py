"""Blocks that are recomputed with --gradient-checkpointing auto."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from data.packing import Item, make_batches
from tests.entry import metrics
from trainer import plan
from trainer.__main__ import main
from trainer.cli import parse
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.methods import sft
from trainer.policy.load import blocks_of, load_policy, recomputing
from trainer.policy.logps import causal_lm, token_logps

ARGV = ["--method", "sft", "--model", "builtin:tiny", "--max-steps", "1"]


def pretend(monkeypatch: pytest.MonkeyPatch, cfg: sft.Config, share: float) -> None:
    """Let the run find a GPU with this share of the memory that its activations need, in addition to the least."""
    monkeypatch.setattr(plan, "device_here", lambda: "cuda")
    monkeypatch.setattr(plan, "memory_here", lambda: math.inf)
    s = plan.sizes_for(cfg)
    whole = plan.work_of(cfg, s)
    least = plan.peak(s, replace(whole, checkpointing=True))
    room = least + share * (plan.peak(s, whole) - least)
    monkeypatch.setattr(plan, "memory_here", lambda: room / plan.USABLE)


def test_a_run_recomputes_blocks_by_memory_and_gives_the_same_numbers(tmp_path, monkeypatch, capfd):
    rows = (f'{{"prompt": "{i}+1=", "completion": "{i + 1}"}}\n' for i in range(8))
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    results = {}
    for share in (1.0, 0.5):
        argv = [*ARGV, "--data", str(tmp_path / "rows.jsonl"), "--output-dir", str(tmp_path / str(share))]
        _, cfg, _ = parse(argv)
        with monkeypatch.context() as patch:
            pretend(patch, cfg, share)
            assert main(argv) == 0
        results[share] = {k: v for k, v in metrics(tmp_path / str(share))[-1].items() if k[:4] in ("loss", "opti")}
        err = capfd.readouterr().err
        assert ("auto: off" in err) == (share == 1) and ("recomputing" in err) == (share < 1), err
        assert ("of 3 blocks" in err) == (share < 1) and "still needs" not in err, err
    assert results[1.0] == results[0.5]


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(r=4)], ids=["full", "lora"])
def test_gradients_do_not_depend_on_the_number_of_recomputed_blocks(lora):
    items = [Item(list(range(9)), [False] + [True] * 8), Item([5, 7, 2], [False, True, True])]
    batch = make_batches(items, max_tokens=64)[0]
    results = []
    for num in range(4):
        torch.manual_seed(0)
        with recomputing(num):
            policy = load_policy(ModelConfig(model="builtin:tiny"), lora, torch.device("cpu"), with_reference=True)
        passes = []
        for index, block in enumerate(blocks_of(causal_lm(policy.model), "builtin:tiny")):
            block.mlp.register_forward_pre_hook(lambda *_, index=index, passes=passes: passes.append(index))
        logp = token_logps(policy, batch).logp
        logp.sum().backward()
        assert passes == [0, 1, 2, *range(num - 1, -1, -1)], "the first blocks run again in the backward pass"
        results.append([logp.detach(), *(p.grad for p in policy.model.parameters() if p.grad is not None)])
    for result in results[1:]:
        assert len(result) == len(results[0]) > 1 and all(map(torch.equal, result, results[0]))


def test_other_settings_and_failures_choose_no_number(monkeypatch, capfd):
    _, cfg, _ = parse([*ARGV, "--data", "task:addition"])
    assert plan.blocks_to_recompute(cfg) == 0 and "auto" not in capfd.readouterr().err, "a CPU has no limit"
    pretend(monkeypatch, cfg, -0.5)
    assert plan.blocks_to_recompute(cfg) == 3 and "still needs" in capfd.readouterr().err
    for setting in (True, False):
        assert plan.blocks_to_recompute(replace(cfg, model=replace(cfg.model, gradient_checkpointing=setting))) == 0

    def fail(cfg):
        raise ValueError("no decoder")

    monkeypatch.setattr(plan, "sizes_for", fail)
    assert plan.blocks_to_recompute(cfg) == 0 and "no decoder" in capfd.readouterr().err
