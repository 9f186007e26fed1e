"""Test the run folder with a small training loop like a method's.

As a script, this file trains and kills itself at a given step: see test_killed_run_resumes_to_the_same_numbers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import trainer.run.run
from data.command.config_file import earlier_settings
from tests.entry import run_python
from trainer.config.blocks import Flat, ModelConfig, RunConfig, steps_per_epoch
from trainer.files.tensor_files import TensorFiles
from trainer.metrics.metrics import Counters, JsonlLog
from trainer.policy.logps import Policy
from trainer.run import checkpoint as saver
from trainer.run.run import Run, expand, load_states, open_run

KILLED_AT = (1, 3, 5, 8)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The blocks that a run reads."""

    model: Flat[ModelConfig] = field(default_factory=lambda: ModelConfig(model="builtin:tiny"))
    run: Flat[RunConfig] = field(default_factory=RunConfig)


@pytest.fixture(autouse=True)
def no_description(monkeypatch):
    """The model here is two linear layers; test_smoke.py checks that a real checkpoint is a model folder."""
    monkeypatch.setattr(trainer.run.run, "describe_model", lambda *args, **options: None)


class Draws:
    """A fake loader whose state is its position in a stream."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> int:
        self.position += 1
        return self.position * 7919 % 13

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        random.random()  # user code may draw numbers here, which must not affect the run


def config(output_dir: Path | str, **settings: Any) -> Config:
    settings = {"method": "sft", "max_steps": 10, "save_steps": 3, "save_total_limit": 2, **settings}
    return Config(run=RunConfig(output_dir=str(output_dir), **settings))


def resumed(folder: Path, **settings: Any) -> Config:
    """Return the config for --resume FOLDER."""
    return config(folder, resume="latest", **settings)


def make_policy(width: int = 4) -> Policy:
    model = nn.Sequential(nn.Linear(width, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    return Policy(model=model, tokenizer=None, source="none", device=torch.device("cpu"), compute_dtype=torch.float32)


@contextlib.contextmanager
def restored_run(cfg: Config, total_steps: int, *epoch: Any, defers: bool = False) -> Iterator[tuple[Run, tuple]]:
    """Yield a run after restore(), and the arguments of restore()."""
    with open_run(cfg, "sft") as run:
        run._defers = defers
        policy = make_policy()
        optimizer = AdamW(policy.model.parameters())
        state = (policy, optimizer, LambdaLR(optimizer, lambda step: 1.0), {})
        run.begin(total_steps, "", *epoch)
        run.restore(*state)
        yield run, state


def train(
    cfg: Config, *, width: int = 4, kill_at: int = -1, interrupt_at: int = -1, method: str = "sft", defers: bool = False
) -> Run:
    """Train like a method. All randomness comes from the global generators."""
    with open_run(cfg, method) as run:
        run._defers = defers  # True: as on a GPU
        policy = make_policy(width)
        optimizer = AdamW(policy.model.parameters(), lr=1e-2)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        loader, counters = Draws(), {"tokens": 0}
        state = {"loader": loader, "counters": counters}
        run.begin(cfg.run.max_steps, "a small run")
        first = run.restore(policy, optimizer, schedule, state)
        if first == 0:
            run.log(0, {"eval/reward/mean": 0.25})
        for step in range(first + 1, cfg.run.max_steps + 1):
            x = torch.rand(3, width) + loader.next() + random.random() + np.random.rand()
            loss = policy.model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            counters["tokens"] += 3
            last = {"eval/reward/mean": 0.75} if step == cfg.run.max_steps else {}
            metrics = {"loss/total": loss.item(), "optim/grad_norm": 50.0, "data/tokens_total": counters["tokens"]}
            run.log_later(step, partial(dict, metrics | last))
            run.sample(step, [{"prompt": "1+1=", "completion": str(step), "rewards": {"exact_match": 1.0}}])
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == interrupt_at:
                raise KeyboardInterrupt
            run.maybe_save(step, policy, optimizer, schedule, state)
    return run


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def steps(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    return [row["step"] for row in rows(folder, name)]


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_fresh_run_writes_its_folder(tmp_path):
    run = train(config(tmp_path / "a"))
    assert steps(run.dir) == list(range(11))
    assert steps(run.dir, "samples.jsonl") == list(range(1, 11))
    assert rows(run.dir, "samples.jsonl")[3] == {
        "step": 4, "prompt": "1+1=", "completion": "4", "rewards": {"exact_match": 1.0},
    }  # fmt: skip
    assert checkpoint_names(run.dir) == ["step-00000009", "step-00000010"]  # includes the last step
    saved = yaml.safe_load((run.dir / "config.yaml").read_text())
    assert saved["method"] == "sft" and saved["model"] == "builtin:tiny" and saved["max_steps"] == 10
    assert "resume" not in saved


def test_the_seed_alone_decides_the_numbers(tmp_path):
    first, again, other = (train(config(tmp_path / str(i), seed=seed)) for i, seed in enumerate([5, 5, -6]))
    text = [(run.dir / "metrics.jsonl").read_text() for run in (first, again, other)]
    assert text[0] == text[1] != text[2]


def test_saves_wait_for_the_end_of_a_rollout(tmp_path):
    """With four steps per rollout and a save due every three, saves happen at the next end of a rollout."""
    with restored_run(config(tmp_path / "a", save_total_limit=99), 22) as (run, state):
        for step in range(1, 23):
            run.log(step, {})
            if step % 4 == 0 or step == 22:
                run.maybe_save(step, *state)
    assert [int(name[-2:]) for name in checkpoint_names(run.dir)] == [4, 8, 12, 16, 20, 22]


@pytest.mark.parametrize(
    ("per_epoch", "rows", "rows_per_step", "expected"),
    [
        (1, 20, 4, [5, 10, 12]),
        (2, 20, 4, [3, 5, 8, 10, 12]),  # every 2.5 steps
        (4, 8, 4, list(range(1, 13))),  # more often than there are steps
        (1, 10, 4, [3, 5, 8, 10, 12]),  # epochs end within a step
        (3, 27, 1, [9, 12]),
        (0, 20, 4, []),
    ],
)
def test_saves_and_evaluations_are_spaced_evenly_over_epochs(per_epoch, rows, rows_per_step, expected, tmp_path):
    cfg = config(tmp_path / "a", max_steps=12, save_steps=100, saves_per_epoch=per_epoch, evals_per_epoch=per_epoch,
                 save_total_limit=99)  # fmt: skip
    with restored_run(cfg, 12, steps_per_epoch(rows, rows_per_step)) as (run, state):
        due = []
        for step in range(1, 13):
            due += [step] if run.eval_due(step) else []
            run.log(step, {})
            run.maybe_save(step, *state)
    saved = [int(name[-2:]) for name in checkpoint_names(run.dir)] if per_epoch else []
    assert saved == expected and due == (expected or [12])


def test_saves_per_epoch_need_the_length_of_an_epoch(tmp_path):
    with pytest.raises(ValueError, match="saves_per_epoch=2: .* --save-steps"):
        train(config(tmp_path / "a", save_steps=100, saves_per_epoch=2))
    assert not (tmp_path / "a").exists()


def log_losses(folder: Path, losses: list[float], **settings: Any) -> None:
    with restored_run(config(folder, loss_watchdog_threshold=5.0, **settings), len(losses)) as (run, state):
        for step, loss in enumerate(losses[run.start_step :], run.start_step + 1):
            run.log(step, {"loss/total": loss})
            run.maybe_save(step, *state)


def test_watchdog_saves_and_stops_after_consecutive_high_losses(tmp_path):
    losses = [9.0, 9.0, 1.0, 6.0, 5.0, 7.0, float("inf"), 8.0, 9.0, 9.0]  # 5 is not above 5
    with pytest.raises(ValueError, match="loss_watchdog_threshold=5: .* 3 consecutive steps, up to step 8"):
        log_losses(tmp_path / "a", losses)
    assert steps(tmp_path / "a")[-1] == 8 and checkpoint_names(tmp_path / "a")[-1] == "step-00000008"
    with pytest.raises(ValueError, match="2 consecutive steps, up to step 2"):
        log_losses(tmp_path / "b", losses, loss_watchdog_patience=2)
    log_losses(tmp_path / "c", [9.0, 9.0, 5.0] * 3)


def test_watchdog_keeps_counting_after_a_resume(tmp_path):
    losses = [1.0, 1.0, 1.0, 1.0, 7.0, 8.0, 9.0, 9.0]
    log_losses(tmp_path / "a", losses[:6], save_steps=2)
    with pytest.raises(ValueError, match="up to step 7"):
        log_losses(tmp_path / "a", losses, save_steps=2, resume="latest")


@pytest.mark.parametrize("save_steps", [1, 3, 0])
def test_deferred_lines_are_the_same(save_steps, tmp_path):
    direct, later = (
        train(config(tmp_path / str(defers), save_steps=save_steps, save_async=False), defers=defers)
        for defers in (False, True)
    )
    text = (direct.dir / "metrics.jsonl").read_text()
    assert (later.dir / "metrics.jsonl").read_text() == text and "health/grad_norm_high" in text


def test_a_deferred_line_is_written_with_the_next_step_or_before_a_save(tmp_path):
    read = []
    with restored_run(config(tmp_path / "a", save_async=False), 9, defers=True) as (run, state):
        for step in range(1, 7):
            run.log_later(step, lambda step=step: read.append(step) or {"loss/total": float(step)})
            assert read == list(range(1, step))
            run.maybe_save(step, *state)  # at 3 and 6
            assert read == list(range(1, step + (step % 3 == 0)))
            if step % 3 == 0:
                assert steps(run.dir) == list(range(1, step + 1))
        run.log_later(7, lambda: read.append(7) or {})
        run.log(8, {})  # like a step with an evaluation
        assert read == list(range(1, 8)) and steps(run.dir) == list(range(1, 9))
        run.log_later(9, dict)
    assert steps(run.dir) == list(range(1, 10))


def test_an_interrupt_or_error_writes_the_deferred_line(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt, match="interrupted after step 5"):
        train(config(tmp_path / "a", save_steps=0), interrupt_at=5, defers=True)
    assert steps(tmp_path / "a") == list(range(6))

    def lost() -> dict[str, float]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with (
        pytest.raises(ValueError, match="the real reason"),
        restored_run(config(tmp_path / "b"), 9, defers=True) as (run, _),
    ):
        run.log_later(1, lost)
        raise ValueError("the real reason")
    printed = capsys.readouterr()
    assert "metrics of step 1" in printed.out + printed.err


def test_health_findings_are_in_the_metrics_and_on_the_console(tmp_path, capsys):
    run = train(config(tmp_path / "a"))
    firing = [row["step"] for row in rows(run.dir) if "health/grad_norm_high" in row]
    assert firing and firing[-1] == 10
    assert capsys.readouterr().out.count("warning: gradient norm is 50.0") == 1


def test_killed_run_resumes_to_the_same_numbers(tmp_path):
    """kill -9 before the first checkpoint, just before a save, and between saves."""
    unbroken = train(config(tmp_path / "unbroken", save_async=False))
    killed = run_python(__file__, str(tmp_path), *map(str, KILLED_AT), cwd=tmp_path)
    assert killed.returncode == 0, killed.stderr
    for stop in KILLED_AT:
        folder = tmp_path / str(stop)
        assert steps(folder) == list(range(stop + 1))
        random.seed(1234)
        run = train(resumed(folder, save_async=False))
        assert run.start_step == (stop - 1) // 3 * 3
        for name in ("metrics.jsonl", "samples.jsonl", "config.yaml"):
            texts = {(d / name).read_text().replace(str(d), "DIR") for d in (run.dir, unbroken.dir)}
            assert len(texts) == 1, name
        for name in checkpoint_names(unbroken.dir):
            assert checkpoint_files(folder, name) == checkpoint_files(unbroken.dir, name)


def checkpoint_files(folder: Path, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "checkpoints" / name).iterdir()}


def test_training_continues_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """Step 5 waits for the start of the write, and the write for step 5; the checkpoint contains step 3."""
    unbroken = train(config(tmp_path / "unbroken", save_async=False, save_total_limit=9))
    started, five, write = threading.Event(), threading.Event(), saver.write_tensors

    def late(path, *args):
        started.set()
        assert five.wait(60)
        return write(path, *args)

    log = Run.log

    def logged(self, step, metrics):
        log(self, step, metrics)
        if step == 5:
            assert started.wait(60)
            five.set()

    monkeypatch.setattr(saver, "write_tensors", late)
    monkeypatch.setattr(Run, "log", logged)
    run = train(config(tmp_path / "a", save_total_limit=9))
    assert checkpoint_names(run.dir) == checkpoint_names(unbroken.dir)
    for name in checkpoint_names(run.dir):
        assert checkpoint_files(run.dir, name) == checkpoint_files(unbroken.dir, name)


def test_failed_background_write_ends_the_run_which_resumes_from_the_previous_checkpoint(tmp_path, monkeypatch):
    unbroken = train(config(tmp_path / "unbroken"))
    write = saver.write_tensors

    def full(path, *args):
        if "step-00000003" not in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args)

    monkeypatch.setattr(saver, "write_tensors", full)
    with pytest.raises(ValueError, match=r"step-00000006: could not be written \(No space left on device\)"):
        train(config(tmp_path / "a"))
    assert steps(tmp_path / "a")[-1] in (6, 7, 8, 9)  # at the latest at the next save
    assert checkpoint_names(tmp_path / "a") == ["step-00000003"]
    monkeypatch.setattr(saver, "write_tensors", write)
    run = train(resumed(tmp_path / "a"))
    assert run.start_step == 3
    assert (run.dir / "metrics.jsonl").read_bytes() == (unbroken.dir / "metrics.jsonl").read_bytes()


def test_ctrl_c_finishes_the_running_save_and_prints_how_to_continue(tmp_path, monkeypatch):
    write, folder = saver.write_tensors, tmp_path / "a run"
    monkeypatch.setattr(saver, "write_tensors", lambda *args: (time.sleep(0.1), write(*args))[1])
    with pytest.raises(KeyboardInterrupt) as early:
        train(config(folder), interrupt_at=2)
    command = f"python -m trainer --resume '{folder}'"
    assert str(early.value).startswith("interrupted after step 2") and str(early.value).endswith(f"step 0: {command}")
    with pytest.raises(KeyboardInterrupt) as late:
        train(resumed(folder), interrupt_at=4)
    assert str(late.value) == f"interrupted after step 4; continue from step 3 with: {command}"
    assert checkpoint_names(folder) == ["step-00000003"] and train(resumed(folder)).start_step == 3
    with pytest.raises(KeyboardInterrupt, match="interrupted while loading"):
        with open_run(config(tmp_path / "b"), "sft"):
            raise KeyboardInterrupt


def test_resume_without_a_checkpoint_starts_again_in_the_same_folder(tmp_path, capsys):
    train(config(tmp_path / "a", max_steps=2, save_steps=0))
    run = train(resumed(tmp_path / "a", max_steps=2, save_steps=0))
    assert (run.start_step, run.checkpoint) == (0, None)
    assert steps(run.dir) == [0, 1, 2]
    assert steps(run.dir, "samples.jsonl") == [1, 2]
    assert "starting at step 0" in capsys.readouterr().err


def test_the_id_of_a_run_is_random_and_survives_resumes(tmp_path):
    one, two = train(config(tmp_path / "a", max_steps=1)), train(config(tmp_path / "b", max_steps=1))
    assert one.id != two.id and len(one.id) == 16 and (one.dir / "run_id").read_text() == one.id
    assert train(resumed(one.dir, max_steps=2)).id == one.id
    assert train(config(one.dir, max_steps=1, overwrite_output_dir=True)).id != one.id
    (two.dir / "run_id").write_text("../../no id")  # damaged: the run gets a new id
    again = train(resumed(two.dir, max_steps=2))
    assert len(again.id) == 16 and train(resumed(two.dir, max_steps=3)).id == again.id


def test_finished_run_trains_no_step_when_resumed(tmp_path, capsys):
    train(config(tmp_path / "a"))
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    run = train(resumed(tmp_path / "a"))
    assert run.start_step == 10
    assert "all 10 steps are done" in capsys.readouterr().err
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before


def test_finished_run_can_be_extended(tmp_path):
    train(config(tmp_path / "a", max_steps=5))
    run = train(resumed(tmp_path / "a", max_steps=8))
    assert steps(run.dir) == list(range(9))
    assert yaml.safe_load((run.dir / "config.yaml").read_text())["max_steps"] == 8


def test_resume_records_the_settings_it_changes(tmp_path, capsys, monkeypatch):
    folder, keep = tmp_path / "a", {"save_total_limit": 9}
    train(config(folder, max_steps=6, **keep))
    saved = folder / "config.yaml"  # as if written before logging_steps existed
    saved.write_text(saved.read_text().replace("logging_steps: 1\n", ""))
    train(resumed(folder, max_steps=6, **keep))
    assert not (folder / "segments.yaml").exists() and earlier_settings(folder) == {}
    train(resumed(folder, max_steps=9, logging_steps=2, **keep))
    assert "after step 6: max_steps 6 -> 9, logging_steps 1 -> 2" in capsys.readouterr().err
    changed = {"max_steps": [(6, "6")], "logging_steps": [(6, "1")]}
    assert earlier_settings(folder) == changed
    with monkeypatch.context() as patch:  # killed between the two files, then resumed from an earlier step
        patch.setattr(trainer.run.run, "save_config", lambda path, tree: 1 / 0 if path.name == "config.yaml" else None)
        with pytest.raises(ZeroDivisionError):
            train(resumed(folder, max_steps=12, logging_steps=2, **keep))
    train(config(folder, resume=str(folder / "checkpoints" / "step-00000006"), max_steps=9, logging_steps=2, **keep))
    assert earlier_settings(folder) == changed
    train(resumed(folder, max_steps=9, logging_steps=1, **keep))
    assert earlier_settings(folder)["logging_steps"] == [(6, "1"), (9, "2")]
    train(config(folder, resume=str(folder / "checkpoints" / "step-00000003"), max_steps=6, **keep))
    assert earlier_settings(folder) == {}
    (folder / "segments.yaml").write_text("[]")
    with pytest.raises(ValueError, match="segments.yaml: "):
        train(resumed(folder, max_steps=7, **keep))


def test_resume_logs_a_new_batch_size(tmp_path, capsys):
    train(config(tmp_path / "a", max_steps=3, per_device_train_batch_size=8))
    train(resumed(tmp_path / "a", max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2))
    assert "changed from" not in capsys.readouterr().err
    train(resumed(tmp_path / "a", max_steps=5, per_device_train_batch_size=4))
    found = capsys.readouterr().err
    assert "--per-device-train-batch-size" in found and "from 8 to 4" in found
    assert "rows" not in found  # of a method that samples, these are completions


def test_finished_run_without_checkpoints_is_not_trained_again(tmp_path):
    train(config(tmp_path / "a", save_steps=0))
    (tmp_path / "a" / "final").mkdir()
    with pytest.raises(ValueError, match="resume=.*: .* has finished .* --model"):
        train(resumed(tmp_path / "a", save_steps=0))
    assert steps(tmp_path / "a") == list(range(11))


def test_resume_skips_a_damaged_checkpoint(tmp_path, capsys):
    unbroken = train(config(tmp_path / "unbroken"))
    folder = tmp_path / "a"
    train(config(folder))
    with (folder / "checkpoints" / "step-00000010" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    run = train(resumed(folder))
    assert run.start_step == 9
    assert (run.dir / "metrics.jsonl").read_bytes() == (unbroken.dir / "metrics.jsonl").read_bytes()
    assert "step-00000010 is damaged (model.safetensors has 100 bytes" in capsys.readouterr().err
    assert checkpoint_names(folder) == ["step-00000009", "step-00000010", "step-00000010.old"]


def craft(checkpoint: Path, change: Any) -> None:
    """Edit state.json and update the manifest."""
    state = json.loads((checkpoint / "state.json").read_text())
    changed = change(state)
    text = changed if isinstance(changed, str) else json.dumps(state)
    (checkpoint / "state.json").write_text(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


CRAFTED = {
    "no step": (lambda state: state.pop("step"), "has no step"),
    "another step": (lambda state: state.update(step=7), "step 7 in state.json"),
    "a list": (lambda state: "[]", "has no step"),
    "nested": (lambda state: "[" * 100_000 + "]" * 100_000, "manifest.json or state.json is not JSON"),
    "no schedule": (lambda state: state.update(schedule=3), "lacks the schedule or the state of the run"),
    "schedule of text": (lambda state: state["schedule"].update(last_epoch="9"), "lacks the schedule"),
    "no run": (lambda state: state.update(run=None), "lacks the schedule or the state of the run"),
    "no generators": (lambda state: state.pop("rng"), "generator states"),
    "a short generator": (lambda state: state["rng"]["python"][1].pop(), "generator states"),
    "numpy of text": (lambda state: state["rng"].update(numpy=["MT19937", "x"]), "generator states"),
}


def test_resume_skips_a_checkpoint_with_an_invalid_state(tmp_path, capsys):
    train(config(tmp_path / "original", max_steps=6))
    for name, (change, words) in CRAFTED.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "original", folder)
        craft(folder / "checkpoints" / "step-00000006", change)
        run = open_run(resumed(folder, max_steps=7), "sft")
        run.close()
        printed = capsys.readouterr().err
        assert "step-00000006 is damaged" in printed and words in printed and run.start_step == 3, name


def test_resume_skips_a_checkpoint_copied_to_another_step(tmp_path, capsys):
    train(config(tmp_path / "a", max_steps=6))
    checkpoints = tmp_path / "a" / "checkpoints"
    shutil.copytree(checkpoints / "step-00000003", checkpoints / "step-00000009")
    run = train(resumed(tmp_path / "a", max_steps=8))
    assert "step-00000009 is damaged" in capsys.readouterr().err
    assert run.start_step == 6 and steps(run.dir) == list(range(9))


def test_invalid_state_is_a_user_error_unless_user_code_fails(tmp_path):
    class Custom:
        value = 1

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

    checkpoint, nothing = tmp_path / "step-00000003", TensorFiles(tmp_path, {})
    with pytest.raises(ValueError, match="step-00000003: .* state of counters"):
        load_states({"counters": {}}, {"counters": 3}, nothing, checkpoint)
    with pytest.raises(ValueError, match="state of counters .*KeyError"):
        load_states({"counters": Counters()}, {"counters": {}}, nothing, checkpoint)
    with pytest.raises(KeyError, match="value"):  # this file counts as user code
        load_states({"custom": Custom()}, {"custom": {}}, nothing, checkpoint)


@pytest.mark.parametrize("num_lines, lost", [(0, 6), (4, 3)])  # the first line is step 0
def test_resume_logs_lost_metrics(tmp_path, capsys, num_lines, lost):
    train(config(tmp_path / "a", max_steps=6))
    path = tmp_path / "a" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:num_lines])) if num_lines else path.unlink()
    capsys.readouterr()
    for done in (6, 7):
        train(resumed(tmp_path / "a", max_steps=done + 1))
        assert f"{lost} of {done} steps are missing in metrics.jsonl" in capsys.readouterr().err
    train(config(tmp_path / "b", max_steps=6))
    train(resumed(tmp_path / "b", max_steps=7))
    assert "missing" not in capsys.readouterr().err


def test_a_full_disk_raises_the_first_error_and_closes_everything(tmp_path, capsys):
    class Sink:
        closed = False

        def write(self, *_: Any) -> None: ...

        def close(self) -> None:
            self.closed = True
            raise OSError(errno.ENOSPC, "No space left on device")

    sink, after = Sink(), Sink()
    with pytest.raises(ValueError, match="/dev/full: .*No space left on device"):
        with restored_run(config(tmp_path / "a"), 3) as (run, _):
            run._metrics.close()
            run._metrics = JsonlLog(Path("/dev/full"))
            run._sinks = [sink, after]
            run.log(1, {"loss/total": 1.0})
    assert sink.closed and after.closed and run._lock.closed
    assert "No space left on device" in capsys.readouterr().err


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    train(config(tmp_path / "a"))
    for folder in (tmp_path / "a" / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no undamaged checkpoint \(2 tried\)"):
        train(resumed(tmp_path / "a"))
    assert steps(tmp_path / "a") == list(range(11))


def test_resume_from_an_earlier_checkpoint(tmp_path):
    train(config(tmp_path / "a", save_total_limit=9))
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    named = tmp_path / "a" / "checkpoints" / "step-00000003"
    run = train(config(tmp_path / "a", resume=str(named), save_total_limit=9))
    assert (run.start_step, run.checkpoint) == (3, named)
    assert (run.dir / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="resume=.*step-00000004: no folder"):
        open_run(config(tmp_path / "a", resume=str(named.with_name("step-00000004"))), "sft")


def test_resume_with_another_model_is_an_error_and_changes_no_file(tmp_path):
    train(config(tmp_path / "a", max_steps=7))
    folder = tmp_path / "a"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="resume=.*: its weights do not match"):
        train(resumed(folder, max_steps=9), width=5)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_with_another_run_must_be_overwritten(tmp_path):
    folder = tmp_path / "a"
    train(config(folder))
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="output_dir=.*a: .* --resume .* --overwrite-output-dir"):
        open_run(config(folder), "sft")
    run = train(config(folder, max_steps=1, overwrite_output_dir=True))
    assert steps(run.dir) == [0, 1] and checkpoint_names(run.dir) == ["step-00000001"]
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl"])
def test_overwriting_deletes_nothing_if_it_cannot_delete_everything(tmp_path, name):
    folder = tmp_path / "a"
    train(config(folder, max_steps=1))
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name) if name == "checkpoints" else (folder / name).mkdir()
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=f"output_dir=.*a: {name} "):
        train(config(folder, max_steps=1, overwrite_output_dir=True))
    assert sorted(folder.rglob("*")) == before and (tmp_path / name).stat().st_size > 0


def test_nothing_is_written_or_deleted_before_begin(tmp_path):
    open_run(config(tmp_path / "new"), "sft").close()
    assert not (tmp_path / "new").exists()
    train(config(tmp_path / "a"))
    open_run(config(tmp_path / "a", overwrite_output_dir=True), "sft").close()
    assert steps(tmp_path / "a") == list(range(11))


def test_existing_folder_without_a_run_is_used(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "data.jsonl").touch()
    assert train(config(tmp_path / "a", max_steps=1)).dir == tmp_path / "a"
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        open_run(config(tmp_path / "file"), "sft")
    with pytest.raises(ValueError, match=r"output_dir=.*: cannot be written \(Not a directory\)"):
        train(config(tmp_path / "file" / "below"))


def test_output_dir_is_expanded(tmp_path):
    moment = time.struct_time((2026, 3, 4, 5, 6, 7, 0, 0, 0))
    assert expand("runs/{method}-{time}", "my_pkg.algo", moment) == Path("runs/algo-20260304-050607")
    run = train(config(tmp_path / "{method}-{time}", method="my_pkg.algo", max_steps=1), method="my_pkg.algo")
    assert run.dir.parent == tmp_path and run.dir.name.startswith("algo-20")
    saved = yaml.safe_load((run.dir / "config.yaml").read_text())
    assert saved["output_dir"] == str(tmp_path / "{method}-{time}")  # so that --config starts a new run
    assert saved["method"] == "my_pkg.algo"
    train(resumed(run.dir, method="my_pkg.algo", max_steps=2), method="my_pkg.algo")
    assert yaml.safe_load((run.dir / "config.yaml").read_text())["output_dir"] == saved["output_dir"]


def test_config_yaml_keeps_the_method_if_the_folder_has_another_name(tmp_path):
    run = train(config(tmp_path / "{method}", method="my_pkg.algo", max_steps=1), method="its_name")
    assert run.dir == tmp_path / "its_name" and run.method == "its_name"
    assert yaml.safe_load((run.dir / "config.yaml").read_text())["method"] == "my_pkg.algo"
    run = train(config(tmp_path / "{method}", method="", max_steps=1), method="")  # started from Python
    assert yaml.safe_load((run.dir / "config.yaml").read_text())["method"] == __name__
    assert run.dir == tmp_path / "test_run"


def test_runs_started_in_the_same_second_get_different_folders(tmp_path, monkeypatch):
    moment = time.localtime()
    monkeypatch.setattr(time, "localtime", lambda: moment)
    runs = [open_run(config(tmp_path / "{method}-{time}"), "sft") for _ in range(3)]
    for run in runs:
        run.begin(1, "")
        run.close()
    name = runs[0].dir.name
    assert [run.dir.name for run in runs] == [name, f"{name}-2", f"{name}-3"]


def test_folder_in_use_by_another_process_is_an_error(tmp_path):
    train(config(tmp_path / "a"))
    script = f"""
import fcntl, sys
file = open({str(tmp_path / "a" / ".lock")!r}, "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="output_dir=.*a: another process"):
            open_run(resumed(tmp_path / "a"), "sft")
        process.communicate("\n")
    open_run(resumed(tmp_path / "a"), "sft").close()


def test_state_that_cannot_be_saved_is_an_error_before_training(tmp_path):
    with restored_run(config(tmp_path / "a"), 3) as (run, (*state, _)):
        with pytest.raises(ValueError, match="state_dict of rewards: contains a Tensor"):
            run.restore(*state, {"rewards": {"seen": torch.ones(1)}})


def test_non_finite_metric_is_null(tmp_path):
    with restored_run(config(tmp_path / "a"), 3) as (run, _):
        run.log(1, {"loss/total": float("nan"), "optim/lr": 1e-3})
    assert rows(tmp_path / "a") == [{"step": 1, "loss/total": None, "optim/lr": 1e-3}]


def test_finish_exports_reports_and_prints_the_paths(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizers = pytest.importorskip("tokenizers")
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1))
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(8)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="7")
    model.save_pretrained(tmp_path / "base")
    policy = Policy(model, tokenizer, str(tmp_path / "base"), torch.device("cpu"), torch.float32)
    optimizer = AdamW(model.parameters())
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    with open_run(config(tmp_path / "a", max_steps=1), "sft") as run:
        run.begin(1, "a small run")
        run.restore(policy, optimizer, schedule, {})
        run.log(0, {"eval/exact_match/mean": 0.25})
        run.log(1, {"loss/total": 1.0, "eval/exact_match/mean": 0.75})
        run.maybe_save(1, policy, optimizer, schedule, {})
        run.finish(policy)
    loaded = AutoModelForCausalLM.from_pretrained(run.dir / "final")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert (run.dir / "report.html").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "held-out exact_match: 0.250 before, 0.750 after (1 step)" in printed
    assert f"model: {run.dir / 'final'}" in printed and f"report: {run.dir / 'report.html'}" in printed


if __name__ == "__main__":  # a separate process that forks for each kill
    trainer.run.run.describe_model = lambda *args, **options: None
    for stop in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            train(config(Path(sys.argv[1], stop), save_async=False), kill_at=int(stop))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
