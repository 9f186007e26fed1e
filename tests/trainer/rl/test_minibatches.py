"""--minibatches-per-rollout: each mini-batch of a rollout has its own optimizer step and its own divisor."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
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
from trainer.methods.grpo import backward, logps_at_start
from trainer.rl.groups import Rollout
from trainer.rl.minibatch import MadeOnUse, MiniBatch
from trainer.rl.rank0_rollout import deal
from trainer.rl.rollouts import Rollouts

SHORT = (
    "--model", "builtin:tiny", "--data", "task:addition:split=train,size=256", "--reward-funcs", "exact_match",
    "--num-generations", 4, "--max-completion-length", 8, "--learning-rate", 3e-4, "--per-device-train-batch-size", 8,
)  # fmt: skip
GROUP = 4


def rollout_of(rewards: Sequence[float], minibatch_sizes: tuple[int, ...] = ()) -> Rollout:
    """The three groups of group_cases."""
    completions, values = make_completions(), [[None if r != r else r] for r in rewards]
    groups = [
        Group(n, Prompt(source=f"row {n}", prompt="", ids=[1]), n, "fresh", completions[i : i + GROUP],
              values[i : i + GROUP])
        for n, i in enumerate(range(0, len(completions), GROUP))
    ]  # fmt: skip
    return Rollout(groups, ["right"], torch.ones(1), {}, minibatch_sizes=minibatch_sizes)


def packed(cfg: Any, policy: Any, rollout: Rollout, advantage: Any = ADVANTAGE, **more: Any) -> list[MiniBatch]:
    rollouts = SimpleNamespace(_policy_gradient=cfg, policy=policy, overlap=AsyncConfig())
    batches = Rollouts.pack(rollouts, rollout, advantage, **more)
    logps_at_start(cfg, policy, batches, len(batches) * cfg.num_iterations)
    return batches


def gradients(cfg: Any, minibatch_sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The gradient of each mini-batch, all with the initial weights."""
    policy = make_policy()
    policy.model.zero_grad(set_to_none=True)
    vectors = []
    for batch in packed(cfg, policy, rollout_of(ADVANTAGE, minibatch_sizes)):
        backward(cfg, policy, batch)
        vectors.append(gradient(policy.model))
    return vectors


def size_of(loss_type: str, rows: range) -> float:
    """Divisor of the loss of some completions: their trained tokens, or the completions with a trained token."""
    completions = [make_completions()[row] for row in rows]
    tokens = [len(c.ids) if c.mask is None else sum(c.mask) for c in completions]
    return sum(tokens) if loss_type == "dapo" else sum(n > 0 for n in tokens)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_each_minibatch_is_divided_by_its_own_count(loss_type):
    """Two groups and one: the gradients, weighted by their divisors, sum to the gradient of the whole rollout."""
    cfg = make_config(loss_type=loss_type, num_iterations=1, beta=0.1)
    (whole,), (first, second) = gradients(cfg, ()), gradients(cfg, (2, 1))
    total, a, b = (size_of(loss_type, rows) for rows in (range(12), range(8), range(8, 12)))
    assert a + b == total and close((a * first + b * second) / total, whole)
    for vector, rows in ((first, slice(0, 8)), (second, slice(8, 12))):  # each equals that of its completions alone
        policy = make_policy()
        policy.model.zero_grad(set_to_none=True)
        backward(cfg, policy, prepare(cfg, policy, make_completions()[rows], ADVANTAGE[rows]))
        assert close(vector, gradient(policy.model)), rows


def test_branches_are_trained_with_the_advantage_of_their_completion():
    """A completion with a branch has the gradient of two rows, and counts once."""
    one, two, *others = make_completions()[:4]
    whole, flat = [replace(one, branches=(two,)), *others], [one, two, *others]
    advantage = ADVANTAGE[[0, 2, 3]]
    cfg, vectors = make_config(loss_type="dapo", num_iterations=1), []
    for completions, numbers in ((whole, advantage), (flat, ADVANTAGE[[0, 0, 2, 3]])):
        policy = make_policy()
        policy.model.zero_grad(set_to_none=True)
        batch = prepare(cfg, policy, completions, numbers)
        backward(cfg, policy, batch)
        vectors.append(gradient(policy.model))
    assert close(*vectors)
    batch = prepare(cfg, make_policy(), whole, advantage)
    assert batch.rows == [0, 0, 1, 2] and batch.num_completions == 3
    lengths = sorted(length for mb in batch.micro_batches for length in mb.length.tolist())
    assert lengths == sorted([10] * 10 + [4] * 4 + [2] * 2)  # a mean over the completion includes its branches
    with pytest.raises(ValueError, match="1 branches"):
        prepare(cfg, make_policy(), whole, [[1.0] * len(c.ids) for c in whole])


def test_a_micro_batch_is_made_once_when_it_is_read():
    """So that the device computes the first one while the host makes the next."""
    cfg = make_config((16, 1, "packed"), num_iterations=1)
    batch = prepare(cfg, make_policy(), make_completions(), ADVANTAGE)
    made = batch.micro_batches._made
    assert len(batch.micro_batches) > 2 and batch.num_micro_batches == len(batch.micro_batches) and not made
    assert batch.micro_batches[0] is next(iter(batch.micro_batches)) and list(made) == [0]
    assert batch.micro_batches[-1] is list(batch.micro_batches)[-1] and len(made) == len(batch.micro_batches)


def test_an_error_in_making_a_micro_batch_does_not_end_the_loop_over_them():
    with pytest.raises(IndexError):
        list(MadeOnUse([lambda: 1, lambda: [][0]]))


def test_rows_select_completions_by_their_index_in_the_rollout():
    cfg, policy = make_config(), make_policy()
    batches = packed(cfg, policy, rollout_of(ADVANTAGE, (2, 1)), rows=[1, 4, 7, 8, 11])
    completions = make_completions()
    assert [batch.number for batch in batches] == [0, 1]
    assert [batch.rows for batch in batches] == [[1, 4, 7], []]  # 8 has zero advantage and 11 no trained token
    assert batches[0].completions == [completions[row] for row in batches[0].rows]
    assert all(batch.at_start is not None for batch in batches)  # for the ratio of several steps
    (whole,), (same,) = (packed(cfg, policy, rollout_of(ADVANTAGE, sizes)) for sizes in ((), (3,)))
    assert whole.number == 0 and whole.rows == same.rows


def test_minibatches_take_groups_round_robin_and_every_rank_has_some():
    rng = random.Random(0)
    for _ in range(50):
        num_ranks, num_minibatches = rng.randint(1, 4), rng.randint(1, 4)
        per_minibatch = num_ranks * rng.randint(1, 3)
        sizes = [rng.randint(1, 99) for _ in range(num_minibatches * per_minibatch)]
        ranks = deal(sizes, num_minibatches, num_ranks)
        assert len(ranks) == num_ranks and all(len(rank) == num_minibatches for rank in ranks)
        assert sorted(i for rank in ranks for indices in rank for i in indices) == list(range(len(sizes)))
        for number in range(num_minibatches):
            assert {i % num_minibatches for rank in ranks for i in rank[number]} == {number}
            assert sum(len(rank[number]) for rank in ranks) == per_minibatch and all(rank[number] for rank in ranks)
    assert deal([3, 1, 2], 1, 1) == [[[0, 1, 2]]]


HALVES = """
from dataclasses import replace

from trainer.config.sampling import SamplingConfig as Config
from trainer.methods.grpo import backward, logps_at_start
from trainer.rl.minibatch import pack
from trainer.rl.rollouts import Rollouts, open_rewards
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


def train(cfg):
    with open_run(cfg, cfg.run.method) as run:
        rewards, policy = open_rewards(cfg, run), open_policy(cfg, with_reference=True)
        rollouts = Rollouts(run, cfg, policy, rewards, steps_per_rollout=4)
        training = Training(run, cfg, policy, rollouts)
        for rollout in training.batches():
            advantage = rollouts.advantage(rollout).view(len(rollout.groups), -1)
            halves = []
            for groups in ([0, 2], [1, 3]):
                completions = [c for i in groups for c in rollout.groups[i].completions]
                halves.append(pack(cfg, policy, completions, advantage[groups].flatten()))
            logps_at_start(cfg, policy, halves, 4)
            for number, batch in enumerate((*halves, *halves)):
                if training.step < training.total_steps:
                    training.step += 1
                    batch = rollouts.batch = replace(batch, is_first=number == 0)
                    sums = backward(cfg, policy, batch)
                    training.clip_and_step(sums)
                    training.log(sums, batch.computed_tokens)
"""


def run(folder: Path, *argv: Any) -> list[dict[str, Any]]:
    assert main([*map(str, argv), "--output-dir", str(folder)]) == 0
    return metrics(folder)


def test_two_minibatches_twice_equal_four_explicit_steps(tmp_path, monkeypatch):
    """Four prompts per rollout, split and ordered by HALVES. Seven steps, so the last rollout is not used up.
    Advantages are scaled over the whole rollout."""
    (tmp_path / "halves.py").write_text(HALVES)
    monkeypatch.chdir(tmp_path)
    shared = (*SHORT, "--max-steps", 7, "--scale-rewards", "batch", "--beta", 0.05)
    rows = run(tmp_path / "grpo", "--method", "grpo", *shared, "--minibatches-per-rollout", 2, "--num-iterations", 2)
    explicit = run(tmp_path / "halves", "--method", "halves", *shared, "--per-device-train-batch-size", 16)
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert repeatable(rows) == repeatable(explicit)
    ratios = [row["policy/ratio"] for row in rows]
    assert ratios[0] == ratios[4] == 1 and all(ratios[k] != 1 for k in (1, 2, 3, 5, 6))
    assert [row["data/prompts_total"] for row in rows] == [4] * 4 + [8] * 3


def test_a_method_that_packs_the_whole_rollout_is_rejected(tmp_path, capfd):
    argv = ("--method", "tests.critic", *SHORT, "--minibatches-per-rollout", 2, "--max-steps", 2)
    assert main([*map(str, argv), "--output-dir", str(tmp_path / "run")]) == 2
    assert "minibatches_per_rollout=2: this method trains on 1;" in capfd.readouterr().err


def test_prompts_and_steps_per_rollout():
    _, cfg, _ = parse([*map(str, ("--method", "grpo", *SHORT, "--minibatches-per-rollout", 3, "--num-iterations", 2))])
    assert (cfg.prompts_per_step, cfg.prompts_per_rollout, cfg.steps_per_rollout) == (2, 6, 6)


def sample_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow --async-prefetch with the local engine, which configs reject as useless."""
    check = grpo.Config.__post_init__

    def ahead(cfg: Any) -> None:
        object.__setattr__(cfg, "overlap", AsyncConfig())  # may be a copy of a patched config
        check(cfg)
        object.__setattr__(cfg, "overlap", AsyncConfig(async_prefetch=True, max_staleness=BOUND))

    monkeypatch.setattr(grpo.Config, "__post_init__", ahead)


BOUND = 3


def test_staleness_counts_optimizer_steps(tmp_path, monkeypatch):
    """Four steps per rollout. Sampling for the next starts after one of them, to be 3 steps old at its first step."""
    sample_ahead(monkeypatch)
    rows = run(
        tmp_path / "run", "--method", "grpo", *SHORT, "--rollout.engine", "local", "--max-steps", 12,
        "--minibatches-per-rollout", 2, "--num-iterations", 2,
    )  # fmt: skip
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 2, 3, *(BOUND + n % 4 for n in range(8))]
    assert [row["rollout/queued_groups"] for row in rows] == [0, 4, 4, 4, 0, 4, 4, 4, 0, 0, 0, 0]


def test_two_ranks_take_the_steps_of_one(tmp_path):
    """With a moving reference and an adaptive entropy bonus, which must be the same on all ranks."""
    argv = ("--method", "grpo", *SHORT, "--minibatches-per-rollout", 2, "--max-steps", 4, "--beta", 0.1,
            "--sync-ref-model", "--ref-model-sync-steps", 2, "--entropy-target", 0.5, "--entropy-coef-step", 0.1,
            "--learning-rate", 1e-4)  # fmt: skip
    one = run(tmp_path / "one", *argv)
    half = ("--per-device-train-batch-size", 4, "--output-dir", tmp_path / "two")
    two_ok("trainer", *argv, *half, cwd=tmp_path)
    alike(metrics(tmp_path / "two"), one, 1e-3)
    assert [round(row["policy/entropy_coef"], 6) for row in one] == [0, 0.1, 0.2, 0.3]
