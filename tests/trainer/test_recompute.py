"""Blocks that are recomputed with --gradient-checkpointing auto."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.entry import metrics
from trainer import plan
from trainer.__main__ import main
from trainer.cli import parse
from trainer.methods import sft

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
