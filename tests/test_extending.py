"""docs/examples, used like a user's files: found in the working folder and run by the real command."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.command.flags import config_to_tree
from data.errors import UserError
from data.show import main as show
from data.user_code import import_beside
from losses.advantage import group_advantage, moments, weighted_sum
from losses.policy import PolicyLoss
from rollout.engine import Completion
from rollout.rewards.__main__ import main as check_rewards
from tests.entry import ROOT, metrics, repeatable, run_python
from tests.test_ranks import alike, two_ok
from tests.trainer.rl.group_cases import (
    ADVANTAGE,
    close,
    gradient,
    logps_of,
    make_completions,
    make_config,
    make_llama,
    make_policy,
    moved_llama,
    prepare,
    step,
)
from tests.trainer.rl.naive_groups import padded
from tests.trainer.rl.test_groups import groups_of, settings, words
from trainer.__main__ import main
from trainer.cli import parse
from trainer.config.groups import AdvantageConfig
from trainer.config.policy import PolicyLossConfig
from trainer.methods.grpo import backward
from trainer.policy.logps import token_loss
from trainer.rl import rollouts

EXAMPLES = ROOT / "docs" / "examples"
SHORT = ("--max-steps", "2", "--max-eval-rows", "10", "--per-device-train-batch-size", "16", "--eval-steps", "0")
ROWS = ("--data", "task:addition:split=train,size=256", "--eval-data", "task:addition:split=eval,size=10")
RAFT = ("--data", "task:addition:split=train,size=512", *ROWS[2:])


@pytest.fixture(autouse=True)
def in_examples(monkeypatch):
    monkeypatch.chdir(EXAMPLES)


def train(folder: Path, *argv: Any) -> list[dict[str, Any]]:
    """Run the real command in this process, in the folder of the examples; return its metrics."""
    assert main([*map(str, argv), "--output-dir", str(folder)]) == 0
    return metrics(folder)


def example(name: str) -> ModuleType:
    return import_beside(name)


def rewards_of(reward: torch.Tensor, **more: Any) -> Any:  # (P, G)
    """A single reward, as estimators read it."""
    rewards, weights = reward.unsqueeze(2), torch.ones(1)
    fields = {"rewards": rewards, "weights": weights, "reward": weighted_sum(rewards, weights)}
    return SimpleNamespace(**fields, **{"all_sum": lambda x: x, **more})


def completion(length: int) -> Completion:
    return Completion(
        prompt_ids=[1], ids=[5] * length, logps=[-1.0] * length, finish_reason="stop", text="", versions=[]
    )


# Advantages.


def test_batch_normalized_matches_a_loop_on_one_and_two_ranks():
    reward = torch.tensor([[1.0, 0.0, math.nan], [1.0, 1.0, 1.0], [0.5, 2.0, -1.0]])
    present = [x for x in reward.flatten().tolist() if x == x]
    mean, deviation = statistics.fmean(present), statistics.stdev(present)
    want = [[0.0 if x != x else (x - mean) / deviation for x in row] for row in reward.tolist()]
    estimate = example("my_advantage").batch_normalized
    one = estimate(rewards_of(reward))
    torch.testing.assert_close(one, torch.tensor(want))
    two = [estimate(rewards_of(shard, all_sum=lambda _: moments(reward))) for shard in reward.split([1, 2])]
    torch.testing.assert_close(torch.cat(two), one)


def test_discounted_counts_back_from_the_last_token():
    r = rewards_of(torch.tensor([[1.0, 0.0]]), completions=[completion(3), completion(1)])
    good, bad = example("my_advantage").discounted(r, discount=0.5)
    a = group_advantage(r.reward).flatten().tolist()
    assert good.tolist() == pytest.approx([a[0] / 4, a[0] / 2, a[0]]) and bad.tolist() == pytest.approx([a[1]])


def test_advantages_per_token():
    """On policy, both losses have the gradient of -A_t logp_t; reinforce divides by completions, dapo by tokens."""
    completions = make_completions()
    lists = [[math.sin(7 * row + i) for i in range(len(c.ids))] for row, c in enumerate(completions)]
    off = {"vllm_importance_sampling_correction": False}
    logp, _, mask = logps_of("start")  # (B, T) each
    mask = mask.bool()
    for kind, count in (("reinforce", mask.any(1).sum()), ("dapo", mask.sum())):
        got, _, _ = step(make_config(num_iterations=1, loss_type=kind, correction=off), completions, lists)
        loss = -torch.where(mask, padded(completions, lists) * logp, 0.0).sum() / count
        want = torch.autograd.grad(loss, list(make_llama(0).parameters()), retain_graph=True)
        assert close(got, torch.cat([g.flatten() for g in want])), kind


PLAIN = "def reinforce(r):\n    return r.reward\n"  # no baseline: a group of right answers has signal


def test_dynamic_sampling_and_replay_use_the_custom_estimator(tmp_path, monkeypatch):
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    for estimator, resampled, replayed in (
        ("group", ["yn", "ny", "yn"], [True, True, False]),
        ("plain.reinforce", ["yy", "yn", "yn"], [True, False, False]),
    ):
        options = AdvantageConfig(advantage_estimator=estimator)
        groups = groups_of(settings(options, dynamic_sampling=True), ["yy", "nn", "yn", "yn", "ny"])
        assert words(groups.next(0, 0)) == resampled
        groups = groups_of(settings(options, replay_buffer_size=8), ["yn", "ny", "yn", "nn", "yy", "yn"])
        groups.next(0, 0)
        groups.producer.done()
        assert [group.replayed for group in groups.next(1, 1).groups] == replayed


def test_options_of_an_estimator():
    chosen = AdvantageConfig(advantage_estimator="my_advantage.discounted", advantage_kwargs={"discount": 0.5})
    r = rewards_of(torch.tensor([[1.0, 0.0]]), completions=[completion(2)] * 2)
    assert chosen.estimate(r)[0].tolist() == example("my_advantage").discounted(r, discount=0.5)[0].tolist()
    with pytest.raises(ValueError, match="advantage_kwargs.discont: .*'discount'"):
        AdvantageConfig(advantage_estimator="my_advantage.discounted", advantage_kwargs={"discont": 0.5})
    with pytest.raises(ValueError, match="scale_rewards=batch: .*my_advantage.discounted"):
        AdvantageConfig(advantage_estimator="my_advantage.discounted", scale_rewards="batch")
    with pytest.raises(ValueError, match="advantage_kwargs.scale_rewards: .*--scale-rewards"):
        AdvantageConfig(advantage_kwargs={"scale_rewards": "batch"})
    with pytest.raises(ValueError, match="advantage_estimator=my_advantage.median: "):
        AdvantageConfig(advantage_estimator="my_advantage.median")


# Losses.


@pytest.mark.parametrize("cap", [1.0, 0.2])
def test_topr_matches_a_loop(cap):
    module = example("my_loss")
    t = SimpleNamespace(
        logp=torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True),
        log_ratio=torch.tensor([0.5, 0.5, 0.4, -1.0]),
        advantage=torch.tensor([2.0, -1.0, -1.0, -1.0]),
    )
    want = []
    for logp, log_ratio, a in zip(t.logp.tolist(), t.log_ratio.tolist(), t.advantage.tolist(), strict=True):
        weight = 1.0 if a > 0 else min(math.exp(log_ratio), cap)
        want.append(-weight * a * logp)
    loss, logged = module.topr_by_completion.of_tokens(t, topr_cap=cap)
    assert loss.tolist() == pytest.approx(want)
    capped, count = logged["policy/topr_cap_frac"]
    assert capped == sum(math.exp(x) > cap for x in t.log_ratio.tolist()[1:]) and count == 4
    (grad,) = torch.autograd.grad(loss.sum(), t.logp)
    assert grad.tolist() == pytest.approx([x / logp for x, logp in zip(want, t.logp.tolist(), strict=True)])


OWN = """
def soft(t, *, epsilon: float = 0.2, sharpness: float):
    return -t.advantage * t.logp * sharpness


def wrong(t):
    return -t.advantage * t.total_log_ratio


def detached(t):
    return (-t.advantage * t.logp).detach(), {}


def none(t):
    -t.advantage * t.logp


def summed(t):
    return (-t.advantage * t.logp).sum()
"""


def test_a_loss_gets_the_flags_it_names_and_rejects_others(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    own = {"loss_type": "own.soft", "loss_kwargs": {"sharpness": 2.0}}
    assert PolicyLossConfig(**own, epsilon=0.1).loss_options == {"epsilon": 0.1, "sharpness": 2.0}
    for options, message in (
        (own | {"dual_clip": 3.0}, "dual_clip=3.0: .*loss_type=own.soft"),
        (own | {"loss_kwargs": {"sharpness": 1, "epsilon": 1}}, "loss_kwargs.epsilon.*--epsilon"),
        (own | {"loss_kwargs": {"sharpnes": 1}}, "loss_kwargs.sharpnes.*'sharpness'"),
        (own | {"loss_kwargs": {}}, "loss_type=own.soft: .*sharpness.*--loss-kwargs"),
        ({"loss_type": "own.sof"}, "loss_type=own.sof: "),
    ):
        with pytest.raises(ValueError, match=message):
            PolicyLossConfig(**options)


def test_a_loss_without_a_declared_ratio_of_completions_fails_if_it_reads_it(tmp_path, monkeypatch):
    """total_log_ratio is missing, not 0, which would be wrong after the first step."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    cfg = make_config(num_iterations=2)
    cfg.policy_loss = PolicyLossConfig(loss_type="own.wrong")
    with pytest.raises((AttributeError, TypeError)):
        step(cfg)


def test_a_loss_without_a_gradient_is_named(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    for name, found in (("detached", "without a gradient"), ("none", "NoneType"), ("summed", r"shape \(\)")):
        with pytest.raises(UserError, match=f"^own.py:{name}: returned .*{found}"):
            step(make_config(loss_type=f"own.{name}", beta=0.1, epsilon=0.2))  # the KL term has a gradient
    cfg, policy = make_config(num_iterations=1), make_policy()
    batch = prepare(cfg, policy, make_completions(), ADVANTAGE)
    for loss in (lambda cfg, t, batch, divisor: None, lambda cfg, t, batch, divisor: (t.logp.detach().sum(), {})):
        with pytest.raises(UserError, match="^test_extending.py:.*lambda.*: returned "):
            backward(cfg, policy, batch, loss=loss)
        with pytest.raises(UserError, match="^test_extending.py:.*lambda.*: returned "):
            token_loss(policy, batch.micro_batches[0].batch, lambda tokens, rows, loss=loss: loss(cfg, tokens, None, 1))


def test_the_second_minibatch_of_a_rollout_has_a_ratio():
    """num_steps is 2, even with num_iterations 1."""
    completions, half = make_completions(), slice(6, 12)
    once, twice = (make_config(num_iterations=n) for n in (1, 2))
    ratios, vectors = [], []
    for cfg, more in ((once, {"num_steps": 2}), (twice, {}), (once, {})):
        policy = make_policy()
        batch = prepare(cfg, policy, completions[half], ADVANTAGE[half], **more)
        policy.model = moved_llama().train()  # after the step on the first mini-batch
        ratios.append(backward(cfg, policy, replace(batch, is_first=False)).means()["policy/ratio"])
        vectors.append(gradient(policy.model))
    assert ratios[0] == ratios[1] != 1 == ratios[2] and torch.equal(vectors[0], vectors[1])


# Real runs.


def test_estimators_and_losses_train(tmp_path):
    first = train(
        tmp_path / "first", "--method", "grpo", *SHORT, *ROWS, "--num-iterations", 2, "--proximal-policy", "behaviour",
        "--advantage-estimator", "my_advantage.batch_normalized", "--loss-type", "my_loss.topr",
    )  # fmt: skip
    assert first[1]["loss/policy"] != 0 and first[2]["policy/ratio"] != 1 and "policy/topr_cap_frac" in first[2]
    second = train(
        tmp_path / "second", "--method", "grpo", *SHORT, *ROWS, "--advantage-estimator", "my_advantage.discounted",
        "--advantage-kwargs", '{"discount": 0.9}', "--loss-type", "my_loss.topr_by_completion",
        "--loss-kwargs", '{"topr_cap": 0.5}', "--reward-funcs", "my_reward.closeness", "my_reward.digits_only",
        "--reward-weights", "1.0", "0.2",
    )  # fmt: skip
    assert all(row["optim/grad_norm"] > 0 for row in second[1:])
    assert 0 < second[1]["reward/closeness/mean"] < 1 and second[1]["reward/digits_only/mean"] > 0.5
    samples = [json.loads(line) for line in (tmp_path / "second" / "samples.jsonl").read_text().splitlines()]
    assert {"closeness", "digits_only"} == samples[0]["rewards"].keys()


def test_rewards_of_text_and_column(capsys):
    module = example("my_reward")
    messages = [[{"role": "assistant", "content": text}] for text in ("42", " 41", "x", "42")]
    assert module.digits_only(messages) == [1, 1, 0, 1]
    assert module.closeness(messages, ["42", "43", "1", None]) == [1, 1 / 3, 0, None]
    spec = ["--check", "my_reward.closeness", "--data", "task:addition:size=4", "--model", "builtin:tiny"]
    assert check_rewards(spec) == 0 and "closeness: mean" in capsys.readouterr().out


def test_a_custom_format_reads_rows_that_built_in_formats_reject(tmp_path, capsys):
    argv = ["--method", "grpo", *SHORT, "--data", "sums.jsonl"]
    assert main([*argv, "--output-dir", str(tmp_path / "refused")]) == 2
    assert "columns: terms, total" in capsys.readouterr().err
    train(tmp_path / "run", *argv, "--data-format", "my_format.sums")
    rows = [json.loads(line) for line in Path("sums.jsonl").read_text().splitlines()]
    questions = {f"{a}+{b}=" for a, b in (row["terms"] for row in rows)}
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert samples and {row["prompt"][0]["content"] for row in samples} <= questions


def test_functions_from_python(tmp_path):
    from data.command.config_file import load_config
    from rollout.rewards.options import RewardConfig
    from trainer.config.blocks import ModelConfig, PromptConfig, RunConfig
    from trainer.methods.grpo import Config
    from trainer.methods.grpo import train as train_grpo

    loss, advantage, reward = example("my_loss"), example("my_advantage"), example("my_reward")
    settings = RunConfig(max_steps=1, per_device_train_batch_size=8, output_dir=str(tmp_path / "run"))
    train_grpo(
        Config(
            model=ModelConfig(model="builtin:tiny"),
            data=PromptConfig(data=("task:addition:size=64",)),
            run=settings,
            reward=RewardConfig(reward_funcs=(reward.closeness,)),
            policy_loss=PolicyLossConfig(loss_type=loss.topr),
            advantage=AdvantageConfig(advantage_estimator=advantage.discounted),
            max_completion_length=8,
        )
    )
    saved = load_config(tmp_path / "run" / "config.yaml")
    assert saved["loss_type"] == "my_loss.topr" and saved["advantage_estimator"] == "my_advantage.discounted"
    assert len(train(tmp_path / "run", "--resume", tmp_path / "run", "--max-steps", 2)) == 2


# A method: RAFT.


def test_raft_keeps_the_best_of_each_group():
    nan = math.nan
    reward = torch.tensor([[0.5, 1.0, 0.0, 1.0], [0.0, 0.0, nan, 0.0], [nan, 1.0, 2.0, 1.0]])
    cfg = SimpleNamespace(keep_best=2, reward_above=0.0)
    kept = example("raft").best_of_group(cfg, rewards_of(reward))
    assert kept.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]]


def test_a_custom_method_has_the_default_learning_rates_of_methods_that_sample():
    argv = ["--method", "raft", "--model", "m", "--data", "d"]
    assert [parse([*argv, *more])[1].optim.learning_rate for more in ([], ["--lora.r", "4"])] == [1e-6, 1e-5]


def test_errors_of_a_custom_method(tmp_path, monkeypatch, capsys):
    def error_of(*argv):
        assert main([*argv, "--output-dir", str(tmp_path / "run")]) == 2
        return capsys.readouterr().err

    assert "--method=raft.py: " in error_of("--method", "raft.py")
    estimator = error_of("--method", "raft", "--advantage-estimator", "leave_one_out")
    assert "advantage_estimator=leave_one_out: has no effect with raft" in estimator
    text = (EXAMPLES / "raft.py").read_text().replace("@dataclass(frozen=True, kw_only=True)", "@dataclass")
    (tmp_path / "thawed.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert "its Config must be a @dataclass(frozen=True, kw_only=True)" in error_of("--method", "thawed")
    with pytest.raises(AssertionError, match="3 advantages for 2 completions"):
        prepare(SimpleNamespace(policy_loss=None), None, [None, None], torch.zeros(3))


@pytest.fixture(scope="module")
def raft(tmp_path_factory) -> tuple[Path, list[list[Completion]]]:
    """A run folder, and the completions that each of its two steps trained on."""
    folder, kept = tmp_path_factory.mktemp("raft") / "run", []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(EXAMPLES)
        pack = rollouts.pack

        def spy(cfg, policy, completions, *rest, **more):
            kept.append(completions)
            return pack(cfg, policy, completions, *rest, **more)

        monkeypatch.setattr(rollouts, "pack", spy)
        train(folder, "--method", "raft", "--keep-best", 1, *SHORT, *RAFT)
    return folder, kept


def test_raft_divides_by_the_number_of_kept_completions(raft):
    folder, kept = raft
    rows = metrics(folder)
    for row, completions in zip(rows[1:], kept, strict=True):
        nll = -sum(x for c in completions for x in c.logps) / len(completions)
        assert row["loss/policy"] == row["loss/total"] == pytest.approx(nll, rel=1e-5)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {row["advantage"] for row in samples} == {0, 1}
    assert all(row["advantage"] <= row["rewards"]["exact_match"] for row in samples)
    assert 0 < rows[1]["rollout/kept_frac"] < rows[1]["reward/mean"] and rows[1]["optim/grad_norm"] > 0


def test_raft_on_two_ranks_equals_raft_on_one(raft, tmp_path):
    one = metrics(raft[0])
    argv = [*SHORT, *RAFT, "--per-device-train-batch-size", "8", "--output-dir", tmp_path / "two"]
    two_ok("trainer", "--method", "raft", "--keep-best", "1", *argv, cwd=EXAMPLES)
    two = metrics(tmp_path / "two")
    alike(two[:2], one[:2], 1e-5)
    assert two[1]["rollout/kept_frac"] == one[1]["rollout/kept_frac"]


@pytest.mark.slow
def test_raft_learns_to_add(tmp_path):
    """A quarter of the steps of its recipe."""
    rows = train(tmp_path / "run", "--method", "raft", "--max-steps", 30, "--save-steps", 0)
    assert rows[0]["eval/exact_match/mean"] < 0.4 and rows[-1]["eval/exact_match/mean"] >= 0.9


# docs/extending.md.

PAGE = (ROOT / "docs" / "extending.md").read_text()


def test_line_counts_of_the_page():
    assert len(PAGE.splitlines()) < 290
    counted = dict(re.findall(r"^### .*\[(\w+\.py)\]\(examples/\w+\.py\), (\d+) lines", PAGE, flags=re.MULTILINE))
    assert counted.keys() == {path.name for path in EXAMPLES.glob("*.py")}
    assert counted == {name: str(len((EXAMPLES / name).read_text().splitlines())) for name in counted}


def test_the_other_commands_of_the_page_run(capsys):
    for module, run in (("data.show", show), ("rollout.rewards", check_rewards)):
        (command,) = re.findall(rf"python -m {module} (--.*)", PAGE)
        assert run(shlex.split(command)) == 0, capsys.readouterr().err


def test_the_script_of_the_page_runs(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    done = run_python("script.py", cwd=tmp_path, PYTHONPATH=f"{EXAMPLES}:{ROOT}")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "runs" / "short")] == [1, 2, 3, 4]


# A module trained alongside the policy.

CRITIC = (
    "--method", "tests.critic", "--model", "builtin:tiny", *ROWS[:2], "--max-completion-length", "8",
    "--learning-rate", "1e-4", "--save-steps", "2", "--max-steps", "4",
)  # fmt: skip


def critic_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "step-00000004" / "extra.safetensors")


@pytest.fixture(scope="module")
def with_critic(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("critic") / "run"
    train(folder, *CRITIC, "--per-device-train-batch-size", 16)
    return folder


@pytest.mark.slow
def test_a_critic_trains_and_resumes(with_critic, tmp_path):
    whole = critic_of(with_critic)
    assert whole["trained.critic/num_seen"] == 64 and whole["trained.critic/linear.weight/step"] == 4
    shutil.copytree(with_critic, tmp_path / "broken")
    for gone in ("checkpoints/step-00000004", "final"):
        shutil.rmtree(tmp_path / "broken" / gone)
    resumed = train(tmp_path / "broken", "--resume", tmp_path / "broken")
    assert repeatable(resumed) == repeatable(metrics(with_critic))
    again = critic_of(tmp_path / "broken")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_critic_on_two_ranks_equals_a_critic_on_one(with_critic, tmp_path):
    argv = [*CRITIC, "--per-device-train-batch-size", "8", "--output-dir", tmp_path / "two"]
    two_ok("trainer", *argv, cwd=EXAMPLES)
    alike(metrics(tmp_path / "two"), metrics(with_critic))
    one, two = critic_of(with_critic), critic_of(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.gpu
def test_a_critic_resumes_on_a_gpu(tmp_path):
    """There AdamW is fused and keeps its step count on the device."""
    train(tmp_path / "run", *CRITIC, "--per-device-train-batch-size", 16)
    for gone in ("checkpoints/step-00000004", "final"):
        shutil.rmtree(tmp_path / "run" / gone)
    assert len(train(tmp_path / "run", "--resume", tmp_path / "run")) == 4
    assert critic_of(tmp_path / "run")["trained.critic/linear.weight/step"] == 4


def test_a_record_given_from_python_is_saved_by_name():
    loss = import_beside("my_loss")
    saved = config_to_tree(PolicyLossConfig(loss_type=loss.topr_by_completion))["loss_type"]
    assert saved == "my_loss.topr_by_completion" and PolicyLossConfig(loss_type=saved).loss is loss.topr_by_completion
    nameless = config_to_tree(PolicyLossConfig(loss_type=PolicyLoss(loss.topr)))["loss_type"]
    assert nameless.startswith("python:")
    with pytest.raises(ValueError, match="^loss_type=python:"):
        PolicyLossConfig(loss_type=nameless)


def test_a_flag_overrides_the_default_of_a_custom_function_only_if_it_is_set():
    def loss(t, *, epsilon=0.05):
        return t.logp

    def estimate(r, *, scale_rewards="none"):
        return r.reward

    def needs_scale(r, *, scale_rewards):
        return r.reward

    assert AdvantageConfig(advantage_estimator=needs_scale).estimate.keywords == {"scale_rewards": "group"}
    assert PolicyLossConfig(loss_type=loss).loss_options == {}
    assert PolicyLossConfig(loss_type=loss, epsilon=0.1).loss_options == {"epsilon": 0.1}
    assert AdvantageConfig(advantage_estimator=estimate).estimate.keywords == {}
    assert AdvantageConfig(advantage_estimator=estimate, scale_rewards="batch").estimate.keywords == {
        "scale_rewards": "batch"
    }
