"""PPO: gradients of both losses against plain float64 loops; whole runs, resumed and exported."""

from __future__ import annotations

import copy
import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollout.engine import Completion
from tests.entry import metrics, repeatable
from tests.test_resume import copy_as_if_killed
from tests.trainer.rl.group_cases import (
    CUTS,
    LENGTHS,
    TEMPERATURE,
    VOCAB,
    WHOLE,
    make_completions,
    make_llama,
    make_policy,
    moved_llama,
)
from tests.trainer.rl.test_minibatches import packed, rollout_of
from trainer.__main__ import main
from trainer.cli import parse
from trainer.config.blocks import ModelConfig, ParallelConfig, PromptConfig, RunConfig
from trainer.config.groups import AdvantageConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.methods import ppo
from trainer.policy.logps import Policy
from trainer.rl.critic import ValueHead, ValueModel
from trainer.rl.minibatch import MiniBatch

NO_REWARD = 6  # a completion without a reward
REWARD = [0.25, 1.0, -0.5, 0.0, 2.0, 0.75, math.nan, 1.125, -0.25, 0.625, 5.0, 5.0]  # exact in float32


def make_config(cut: tuple[int, int, str] = WHOLE, **settings: Any) -> ppo.Config:
    budget, accumulation, layout = cut
    run = RunConfig(
        per_device_train_batch_size=len(LENGTHS) // accumulation, gradient_accumulation_steps=accumulation,
        max_tokens_per_micro_batch=budget, packing=layout != "padded",
    )  # fmt: skip
    loss = PolicyLossConfig(epsilon=0.1, skip_zero_advantage_batches=False)
    given = {
        "model": ModelConfig(model="test"), "data": PromptConfig(data=("test",)), "run": run, "policy_loss": loss,
        "correction": CorrectionConfig(vllm_importance_sampling_correction=False), "temperature": TEMPERATURE,
        "share_prompt": layout == "shared", "num_generations": 4, "minibatches_per_rollout": 1,
        "num_iterations": 2, "max_completion_length": 12, "gamma": 0.9, "gae_lambda": 0.8, "vf_coef": 0.3,
        "cliprange_value": 0.1,
    }  # fmt: skip
    return ppo.Config(**given | settings)


@functools.cache
def make_scorer() -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    for module in (model.model, *model.model.layers):  # Llama's norm rounds to float32
        for name in [name for name, _ in module.named_children() if "norm" in name]:
            setattr(module, name, torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model.double()


def make_critic(kind: str, policy: Policy) -> ppo.Critic:
    """With random weights, because a new head is zero and passes no gradient to the trunk."""
    if kind == "model":
        model = copy.deepcopy(make_scorer())
        return ValueModel(replace(policy, model=model, reference=None))
    torch.manual_seed(7)
    head = ValueHead(policy)
    with torch.no_grad():
        for p in head.outer.parameters():
            p.normal_(std=0.5)
    return head


def move(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator, dtype=torch.float64))


def step(cfg: ppo.Config, kind: str) -> tuple[list[Tensor], dict[str, float], MiniBatch, ppo.Estimates]:
    """Gradients of the second step on a rollout, after which policy and critic have moved."""
    policy, rollout = make_policy(), rollout_of(REWARD)
    critic = make_critic(kind, policy)
    estimates = ppo.estimate(cfg, policy, critic, rollout)
    columns = {"old_value": estimates.value, "target": estimates.target}
    (batch,) = packed(cfg, policy, rollout, estimates.advantage, rows=estimates.rows, extra=columns)
    policy.model = moved_llama().train()
    move(critic)
    policy.model.zero_grad(set_to_none=True)
    sums = ppo.backward_both(cfg, policy, critic, replace(batch, is_first=False))
    gradients = [p.grad for p in (*policy.model.parameters(), *critic.parameters())]
    policy.model.zero_grad(set_to_none=True)
    return gradients, sums.means(), batch, estimates


# The same from the formulas, one completion and one token at a time.


def trained_of(c: Completion) -> list[int]:
    return [n for n, trained in enumerate(c.mask or [True] * len(c.ids)) if trained]


def states_of(model: Any, row: int) -> Tensor:  # (trained, D) before each trained token
    c = make_completions()[row]
    ids = torch.tensor([c.prompt_ids + c.ids])
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
    return hidden[[len(c.prompt_ids) + n - 1 for n in trained_of(c)]]


def logps_of(model: Any, row: int) -> Tensor:  # (trained,)
    c = make_completions()[row]
    logits = model(input_ids=torch.tensor([c.prompt_ids + c.ids])).logits[0] / TEMPERATURE
    log_p = logits.log_softmax(dim=-1)
    return torch.stack([log_p[len(c.prompt_ids) + n - 1, c.ids[n]] for n in trained_of(c)])


def values_of(policy_model: Any, critic: ppo.Critic, row: int) -> Tensor:  # (trained,)
    if isinstance(critic, ValueModel):
        model = critic.scorer.model
        return states_of(model, row) @ model.score.weight[0]
    inner = states_of(policy_model, row) @ critic.inner.weight.T + critic.inner.bias
    return inner.clamp(min=0) @ critic.outer.weight[0] + critic.outer.bias


def by_hand(cfg: ppo.Config, kind: str) -> tuple[list[Tensor], dict[str, float]]:
    options, now = cfg.policy_loss, moved_llama()
    start_policy = make_policy()
    start_critic, critic = make_critic(kind, start_policy), make_critic(kind, start_policy)
    move(critic)
    rows = [row for row, c in enumerate(make_completions()) if c.trained and row != NO_REWARD
            and not (options.mask_truncated_completions and c.finish_reason == "length")]  # fmt: skip
    advantages, targets, old_values, old_logps, earned = {}, {}, {}, {}, {}
    for row in rows:
        with torch.no_grad():
            value = values_of(make_llama(0), start_critic, row)
            old_values[row], old_logps[row] = value, logps_of(make_llama(0), row)
            reward = [0.0] * len(value)
            if cfg.advantage.kl_in_reward:
                cost = old_logps[row] - logps_of(make_llama(1), row)
                reward = [-options.beta * x for x in cost.tolist()]
        reward[-1] += REWARD[row]
        v = [*value.tolist(), 0.0]
        deltas = [r + cfg.gamma * v[t + 1] - v[t] for t, r in enumerate(reward)]
        power = cfg.gamma * cfg.gae_lambda
        gae = [sum(power**k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]
        advantages[row] = torch.tensor(gae, dtype=torch.float64)
        targets[row] = advantages[row] + value
        earned[row] = [sum(cfg.gamma**k * r for k, r in enumerate(reward[t:])) for t in range(len(reward))]
    flat = torch.cat([advantages[row] for row in rows])
    mean, std = (flat.mean(), flat.std() + 1e-8) if cfg.whiten_advantages else (0.0, 1.0)
    policy_loss, value_loss, num_tokens = torch.zeros(()), torch.zeros(()), len(flat)
    for row in rows:
        a, logp = (advantages[row] - mean) / std, logps_of(now, row)
        ratio = (logp - old_logps[row]).exp()
        clipped = ratio.clamp(1 - options.epsilon, 1 + options.epsilon)
        policy_loss = policy_loss - torch.minimum(ratio * a, clipped * a).sum()
        if options.beta and not cfg.advantage.kl_in_reward:
            d = logps_of(make_llama(1), row).detach() - logp
            policy_loss = policy_loss + options.beta * (ratio * (d.exp() - d - 1)).sum()
        v, old, target = values_of(now, critic, row), old_values[row], targets[row]
        near = old + (v - old).clamp(-cfg.cliprange_value, cfg.cliprange_value)
        value_loss = value_loss + 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2).sum()
    coef = cfg.vf_coef if kind == "head" else 1.0
    total = (policy_loss + coef * value_loss) / num_tokens
    parameters = [*now.parameters(), *critic.parameters()]
    gradients = list(torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True))
    all_values = torch.cat([old_values[row] for row in rows])
    all_earned = torch.tensor([x for row in rows for x in earned[row]], dtype=torch.float64)
    return gradients, {
        "loss/value": value_loss.item() / num_tokens,
        "value/mean": all_values.mean().item(),
        "value/explained_variance": 1 - ((all_earned - all_values).var() / all_earned.var()).item(),
    }


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


KL = PolicyLossConfig(epsilon=0.1, skip_zero_advantage_batches=False, beta=0.2)
MASKED = PolicyLossConfig(epsilon=0.1, skip_zero_advantage_batches=False, mask_truncated_completions=True)
SETTINGS = {
    "plain": {},
    "not whitened, kl in the loss": {"whiten_advantages": False, "policy_loss": KL},
    "kl in the reward": {"policy_loss": KL, "advantage": AdvantageConfig(kl_in_reward=True)},
    "truncated completions masked": {"policy_loss": MASKED},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["head", "model"])
def test_gradients_of_both_losses_match_the_formulas(kind, name):
    settings = SETTINGS[name] | ({"vf_coef": 0.1, "value_model": "test"} if kind == "model" else {})
    cfg = make_config(**settings)
    gradients, logged, batch, estimates = step(cfg, kind)
    want, numbers = by_hand(cfg, kind)
    scale = flat(want).norm()
    assert len(gradients) == len(want) and scale > 0.01
    for got, expected in zip(gradients, want, strict=True):
        assert (got - expected).norm() < 1e-9 * scale, (got, expected)
    assert {**logged, **estimates.metrics}.items() >= {
        k: pytest.approx(v, rel=1e-5) for k, v in numbers.items()
    }.items()
    assert 0 < logged["value/clip_frac"] < 1 and 0 < logged["policy/clip_frac"] < 1  # both clips bind somewhere
    assert NO_REWARD not in batch.rows and set(estimates.advantage[NO_REWARD]) == {0.0}
    total = logged["loss/policy"] + (cfg.policy_loss.beta * logged["loss/kl"] if "loss/kl" in logged else 0.0)
    total += cfg.vf_coef * logged["loss/value"] if kind == "head" else 0.0
    assert logged["loss/total"] == pytest.approx(total, rel=1e-5)
    assert (estimates.kl is None) != (name == "kl in the reward")


@pytest.mark.parametrize("kind", ["head", "model"])
def test_the_gradient_does_not_depend_on_micro_batches(kind):
    options = {"vf_coef": 0.1, "value_model": "test"} if kind == "model" else {}
    gradients, numbers, _, _ = step(make_config(**options), kind)
    want = flat(gradients)
    for cut in CUTS:
        gradients, logged, _, _ = step(make_config(cut, **options), kind)
        assert (flat(gradients) - want).norm() < 1e-9 * want.norm(), cut
        shared = {"loss/value", "loss/total", "value/clip_frac", "policy/clip_frac"}
        assert {k: logged[k] for k in shared} == pytest.approx({k: numbers[k] for k in shared}, rel=1e-4), cut


def test_with_a_new_critic_the_advantage_is_the_decayed_reward():
    policy, cfg = make_policy(), make_config(gamma=1.0, gae_lambda=0.95, whiten_advantages=False)
    estimates = ppo.estimate(cfg, policy, ValueHead(policy), rollout_of(REWARD))
    assert estimates.metrics["value/mean"] == 0 == estimates.metrics["value/explained_variance"]
    for row in estimates.rows:
        trained = trained_of(make_completions()[row])
        want = [REWARD[row] * 0.95**k for k in reversed(range(len(trained)))]
        for numbers in (estimates.advantage, estimates.target):
            assert [numbers[row][n] for n in trained] == pytest.approx(want)


# Whole runs.

SHORT = [
    "--method", "ppo", "--model", "builtin:tiny", "--data", "task:addition:split=train,size=256", "--eval-data",
    "task:addition:split=eval,size=8", "--reward-funcs", "exact_match", "--max-completion-length", "8",
    "--learning-rate", "1e-4", "--critic-learning-rate", "1e-3", "--per-device-train-batch-size", "16",
    "--minibatches-per-rollout", "2", "--num-iterations", "1", "--max-steps", "4", "--save-steps", "2",
    "--eval-steps", "3", "--seed", "5",
]  # fmt: skip
RUNS = {
    "head": [],
    "head, lora, kl in the reward": ["--lora.r", "4", "--lora.dropout", "0.1", "--beta", "0.05", "--kl-in-reward"],
    "model, lora": ["--value-model", "builtin:tiny", "--lora.r", "4", "--num-generations", "2"],
}


def run(argv: list[Any], folder: Any) -> list[dict[str, Any]]:
    assert main([*map(str, argv), "--output-dir", str(folder)]) == 0
    return metrics(folder)


@pytest.mark.parametrize("name", [pytest.param("head", marks=pytest.mark.slow), *list(RUNS)[1:]])
def test_a_resumed_run_equals_an_uninterrupted_run_and_exports_only_the_policy(name, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rows = run([*SHORT, *RUNS[name]], whole)
    copy_as_if_killed(whole, broken, saved=2, logged=3)
    assert repeatable(run(["--resume"], broken)) == repeatable(rows)
    assert {"value/mean", "value/explained_variance", "value/clip_frac", "loss/value"} <= rows[-1].keys()
    assert rows[1]["value/mean"] == 0 != rows[-1]["value/mean"]
    assert ("reward/zero_std_frac" in rows[1]) == ("--num-generations" in RUNS[name])
    assert ("policy/ref_kl" in rows[1]) == ("--kl-in-reward" in RUNS[name])
    critic = load_file(whole / "checkpoints" / "step-00000004" / "extra.safetensors")
    again = load_file(broken / "checkpoints" / "step-00000004" / "extra.safetensors")
    assert critic.keys() == again.keys() and all(torch.equal(critic[key], again[key]) for key in critic)
    assert any("exp_avg" in key for key in critic)
    if name == "model, lora":  # without the frozen base
        assert all("lora_" in key or "score" in key for key in critic), sorted(critic)
    for exported in (whole / "final", whole / "checkpoints" / "step-00000004"):
        (weights,) = (p for p in exported.glob("*model*.safetensors"))
        names = load_file(weights).keys()
        assert not any("inner" in key or "outer" in key or "score" in key for key in names)
        assert all("lora_" in key for key in names) == (name != "head")
    if name == "head":
        from transformers import AutoModelForCausalLM

        _, info = AutoModelForCausalLM.from_pretrained(whole / "final", output_loading_info=True)
        assert not info["unexpected_keys"] and not info["missing_keys"]


def test_a_reward_model_as_critic_keeps_its_head(tmp_path):
    rm = ["--method", "rm", "--max-steps", "2", "--max-eval-rows", "4", "--per-device-train-batch-size", "8",
          "--data", "task:addition:split=train,size=64"]  # fmt: skip
    assert main([*rm, "--output-dir", str(tmp_path / "rm")]) == 0
    short = [*SHORT, "--max-steps", "2", "--eval-steps", "0", "--value-model", str(tmp_path / "rm")]
    rows = run(short, tmp_path / "run")
    assert rows[1]["value/mean"] != 0
    (kind,) = json.loads((tmp_path / "run" / "final" / "config.json").read_text())["architectures"]
    assert kind.endswith("ForCausalLM")


REJECTED = {
    "advantage_estimator=leave_one_out: ": ["--advantage-estimator", "leave_one_out"],
    "scale_rewards=none: ": ["--scale-rewards", "none"],
    "advantage_estimator=normalize_then_sum: ": ["--multi-objective-aggregation", "normalize_then_sum"],
    "dynamic_sampling=True: ": ["--dynamic-sampling"],
    "replay_buffer_size=8: ": ["--replay-buffer-size", "8"],
    "skip_zero_advantage_batches=True: ": ["--skip-zero-advantage-batches"],
    "vf_coef=0.5: ": ["--value-model", "builtin:tiny", "--vf-coef", "0.5"],
    "gae_lambda=1.5: ": ["--gae-lambda", "1.5"],
    "gamma=0.0: ": ["--gamma", "0"],
    "cliprange_value=0.0: ": ["--cliprange-value", "0"],
    "critic_learning_rate=0.0: ": ["--critic-learning-rate", "0"],
    "num_generations=0: ": ["--num-generations", "0"],
    "kl_in_reward=True: ": ["--kl-in-reward"],
    "value_model=./nowhere: ": ["--value-model", "./nowhere"],
}  # fmt: skip


def test_settings_that_do_not_apply_are_rejected(capfd, monkeypatch):
    for name, flags in REJECTED.items():
        assert main([*SHORT, *flags]) == 2, flags
        message = capfd.readouterr().err
        assert name in message, (flags, message)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="parallel.context=2: "):
        make_config(parallel=ParallelConfig(context=2))


def test_defaults():
    _, cfg, _ = parse(SHORT)
    assert (cfg.gae_lambda, cfg.gamma, cfg.cliprange_value, cfg.value_model) == (0.95, 1.0, 0.2, None)
    assert cfg.num_generations == 1 and cfg.prompts_per_rollout == 32 and cfg.steps_per_rollout == 2
