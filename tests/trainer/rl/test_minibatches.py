"""--minibatches-per-rollout: parts of one rollout, each with the gradient and the denominator of its own step."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data.types import Prompt
from rollout.engine import Group
from tests.entry import metrics, repeatable
from tests.test_ranks import alike, two_ok
from tests.trainer.rl.group_cases import ADVANTAGE, close, gradient, make_completions, make_config, make_policy, prepare
from trainer.__main__ import main
from trainer.cli import parse
from trainer.config.groups import AsyncConfig
from trainer.methods import grpo
from trainer.methods.grpo import backward, score_at_start
from trainer.rl.groups import GroupBatch
from trainer.rl.rank0_rollout import deal
from trainer.rl.session import Session

SHORT = (
    "--model", "builtin:tiny", "--data", "task:addition:split=train,size=256", "--reward-funcs", "exact_match",
    "--num-generations", 4, "--max-completion-length", 8, "--learning-rate", 3e-4, "--per-device-train-batch-size", 8,
)  # fmt: skip
GROUP = 4


def batch_of(part_sizes: tuple[int, ...] = ()) -> GroupBatch:
    """The three groups of group_cases; their rewards are not read here."""
    completions = make_completions()
    groups = [
        Group(row, Prompt(source=f"row {row}", prompt="", ids=[1]), row, "fresh", completions[first : first + GROUP])
        for row, first in enumerate(range(0, len(completions), GROUP))
    ]
    return GroupBatch(groups, [], [], {}, part_sizes=part_sizes)


def prepared(cfg: Any, policy: Any, batch: GroupBatch, **more: Any) -> list[Any]:
    old = {"old_logps": lambda batch: None, "steps_per_rollout": len(batch.parts) * cfg.num_iterations}
    batches = Session.pack(SimpleNamespace(cfg=cfg, policy=policy, **old), batch, ADVANTAGE, **more)
    score_at_start(cfg, policy, batches, old["steps_per_rollout"])
    return batches


def gradients(cfg: Any, part_sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Of each part, with the weights that sampled them: as with a learning rate of 0."""
    policy = make_policy()
    policy.model.zero_grad(set_to_none=True)
    found = []
    for part in prepared(cfg, policy, batch_of(part_sizes)):
        backward(cfg, policy, part)
        found.append(gradient(policy.model))
    return found


def size_of(loss_type: str, rows: range) -> float:
    """What divides the loss of some completions, by hand: their trained tokens, or those that train anything."""
    completions = [make_completions()[row] for row in rows]
    tokens = [len(c.ids) if c.mask is None else sum(c.mask) for c in completions]
    return sum(tokens) if loss_type == "dapo" else sum(n > 0 for n in tokens)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_each_part_is_divided_by_its_own_count(loss_type):
    """Two groups and one: their gradients, weighted by their counts, are together that of the whole rollout."""
    cfg = make_config(loss_type=loss_type, num_iterations=1, beta=0.1)
    (whole,), (first, second) = gradients(cfg, ()), gradients(cfg, (2, 1))
    total, a, b = (size_of(loss_type, rows) for rows in (range(12), range(8), range(8, 12)))
    assert a + b == total and close((a * first + b * second) / total, whole)
    for part, rows in ((first, slice(0, 8)), (second, slice(8, 12))):  # and each is that of its completions alone
        policy = make_policy()
        policy.model.zero_grad(set_to_none=True)
        backward(cfg, policy, prepare(cfg, policy, make_completions()[rows], ADVANTAGE[rows]))
        assert close(part, gradient(policy.model)), rows


def test_rows_are_places_in_the_rollout_and_may_be_chosen():
    cfg, policy = make_config(), make_policy()
    parts = prepared(cfg, policy, batch_of((2, 1)), rows=[1, 4, 7, 8, 11])
    completions = make_completions()
    assert [part.number for part in parts] == [0, 1]
    assert [part.rows for part in parts] == [[1, 4, 7], []]  # 8 has no advantage and 11 trains nothing
    assert parts[0].completions == [completions[row] for row in parts[0].rows]
    assert all(part.at_start is not None for part in parts)  # for the ratio of several steps
    whole = prepared(cfg, policy, batch_of())
    assert len(whole) == 1 and whole[0].number == 0 and whole[0].rows == prepared(cfg, policy, batch_of((3,)))[0].rows


def test_parts_and_ranks_have_equal_shares_of_whole_groups():
    rng = random.Random(0)
    for _ in range(50):
        ranks, parts = rng.randint(1, 4), rng.randint(1, 4)
        per_part = ranks * rng.randint(1, 3)
        sizes = [rng.randint(1, 99) for _ in range(parts * per_part)]
        dealt = deal(sizes, parts, ranks)
        assert len(dealt) == ranks and all(len(own) == parts for own in dealt)
        assert sorted(place for own in dealt for part in own for place in part) == list(range(len(sizes)))
        for part in range(parts):
            assert {place % parts for own in dealt for place in own[part]} == {part}
            assert sum(len(own[part]) for own in dealt) == per_part and all(own[part] for own in dealt)
    assert deal([3, 1, 2], 1, 1) == [[[0, 1, 2]]]


HALVES = """
from dataclasses import replace

from trainer.config.sampling import SamplingConfig as Config
from trainer.methods.grpo import backward, score_at_start
from trainer.rl.minibatch import pack
from trainer.rl.session import Session


def train(cfg):
    with Session(cfg, steps_per_rollout=4) as s:
        while s.step < s.total_steps:
            s.sync_weights()
            batch = s.sample()
            advantage = s.advantage(batch).view(len(batch.groups), -1)
            parts = []
            for groups in ([0, 2], [1, 3]):
                completions = [c for place in groups for c in batch.groups[place].completions]
                parts.append(pack(cfg, s.policy, completions, advantage[groups].flatten()))
            score_at_start(cfg, s.policy, parts, 4)
            for number, part in enumerate((parts[0], parts[1], parts[0], parts[1])):
                if s.step < s.total_steps:
                    s.step += 1
                    part = replace(part, first=number == 0)
                    sums = backward(cfg, s.policy, part)
                    s.clip_and_step(sums, part)
                    s.log(sums, part)
            s.finish_rollout()
        s.finish()
"""


def run(folder: Path, *argv: Any) -> list[dict[str, Any]]:
    assert main([*map(str, argv), "--output-dir", str(folder)]) == 0
    return metrics(folder)


def test_two_parts_twice_equal_four_steps_written_out(tmp_path, monkeypatch):
    """Four prompts a rollout, which the other method splits and orders itself; seven steps, so the last rollout ends
    within its second half. Advantages are scaled by the whole rollout."""
    (tmp_path / "halves.py").write_text(HALVES)
    monkeypatch.chdir(tmp_path)
    shared = (*SHORT, "--max-steps", 7, "--scale-rewards", "batch", "--beta", 0.05)
    ours = run(tmp_path / "ours", "--method", "grpo", *shared, "--minibatches-per-rollout", 2, "--num-iterations", 2)
    theirs = run(tmp_path / "theirs", "--method", "halves", *shared, "--per-device-train-batch-size", 16)
    assert [row["step"] for row in ours] == list(range(1, 8))
    assert repeatable(ours) == repeatable(theirs)
    ratios = [row["policy/ratio"] for row in ours]
    assert ratios[0] == ratios[4] == 1 and all(ratios[k] != 1 for k in (1, 2, 3, 5, 6))
    assert [row["data/prompts_total"] for row in ours] == [4] * 4 + [8] * 3


def test_a_method_that_prepares_the_whole_rollout_is_refused(tmp_path, capfd):
    argv = ("--method", "tests.critic", *SHORT, "--minibatches-per-rollout", 2, "--max-steps", 2)
    assert main([*map(str, argv), "--output-dir", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    assert "minibatches_per_rollout=2: this method trains on a rollout as a whole; leave it out, or" in said


def test_counts_are_those_of_the_rollout():
    _, cfg, _ = parse([*map(str, ("--method", "grpo", *SHORT, "--minibatches-per-rollout", 3, "--num-iterations", 2))])
    assert (cfg.prompts_per_step, cfg.prompts_per_rollout, cfg.steps_per_rollout) == (2, 6, 6)


def sample_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of this process as if it were a server: configs refuse that, since it would gain nothing."""
    inner = grpo.Config.__post_init__

    def ahead(cfg: Any) -> None:
        object.__setattr__(cfg, "overlap", AsyncConfig())  # of a config that is made from another
        inner(cfg)
        object.__setattr__(cfg, "overlap", AsyncConfig(async_prefetch=True, max_staleness=BOUND))

    monkeypatch.setattr(grpo.Config, "__post_init__", ahead)


BOUND = 3


def test_staleness_counts_optimizer_steps(tmp_path, monkeypatch):
    """Four steps on a rollout. The next one may start when its age at its first step is 3: one step into this one."""
    sample_ahead(monkeypatch)
    rows = run(
        tmp_path / "run", "--method", "grpo", *SHORT, "--rollout.engine", "local", "--max-steps", 12,
        "--minibatches-per-rollout", 2, "--num-iterations", 2,
    )  # fmt: skip
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 2, 3, *(BOUND + n % 4 for n in range(8))]
    assert [row["rollout/queued_groups"] for row in rows] == [0, 4, 4, 4, 0, 4, 4, 4, 0, 0, 0, 0]


def test_two_ranks_take_the_steps_of_one(tmp_path):
    """With a reference that moves and an entropy bonus that adapts, which all ranks must do alike."""
    argv = ("--method", "grpo", *SHORT, "--minibatches-per-rollout", 2, "--max-steps", 4, "--beta", 0.1,
            "--sync-ref-model", "--ref-model-sync-steps", 2, "--entropy-target", 0.5, "--entropy-coef-step", 0.1,
            "--learning-rate", 1e-4)  # fmt: skip
    one = run(tmp_path / "one", *argv)
    half = ("--per-device-train-batch-size", 4, "--output-dir", tmp_path / "two")
    two_ok("trainer", *argv, *half, cwd=tmp_path)
    alike(metrics(tmp_path / "two"), one, 1e-3)
    assert [round(row["policy/entropy_coef"], 6) for row in one] == [0, 0.1, 0.2, 0.3]
