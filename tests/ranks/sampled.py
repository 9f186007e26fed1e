"""Cases of tests/ranks/worker.py for methods that sample: one step of their loops on given completions.

trainer/rl/rank0_rollout.py assigns the groups to ranks. All ranks measure EBFT's rewards when rank 0 requests them.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from data.strided import Document
from data.types import Prompt, TargetPrompt
from losses.policy import POLICY_LOSSES
from rollout.engine import Completion, Group
from rollout.rewards.options import RewardConfig
from tests.ranks.worker import VOCAB, Case, all_of_them, ids, make_experts, make_policy, to_policy, with_sets
from tests.trainer.rl.group_cases import prepare
from trainer.config.blocks import DataConfig, ModelConfig, PromptConfig, RunConfig
from trainer.config.distill import DistillConfig
from trainer.config.ebft import FeatureConfig, StridedConfig
from trainer.config.groups import AdvantageConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.ebft import strided, structured
from trainer.ebft.features import FeatureNetwork
from trainer.methods.grpo import backward, logps_at_start
from trainer.offline.rows import indices_of_this_rank
from trainer.parallel.comm import of_all, rank
from trainer.policy.experts import prepare_replay
from trainer.policy.logps import Policy, causal_lm
from trainer.policy.reference import Reference
from trainer.rl.critic import ValueHead, ValueModel
from trainer.rl.groups import Estimator, Groups, Rollout, sequence_kl
from trainer.rl.minibatch import Advantages, MiniBatch
from trainer.rl.rank0_rollout import Rank0Rollout
from trainer.rl.rollouts import Rollouts
from trainer.rl.teacher import Teacher

SIZE = 4  # completions per group
UNEVEN = 24  # tokens per micro-batch, so that the ranks have different numbers of micro-batches
RUN = RunConfig(max_tokens_per_micro_batch=48, per_device_train_batch_size=8, gradient_accumulation_steps=2)
EACH_ALONE = {"max_tokens_per_micro_batch": 1}


def make_groups(target: bool) -> list[Group]:
    """Five groups of uneven lengths. One has equal rewards, so it is skipped if there is no KL term."""
    rng = random.Random(6)
    groups = []
    for row in range(5):
        prompt = Prompt(source=f"row {row}", prompt="", ids=ids(rng, rng.randrange(2, 9)))
        if target:
            prompt = TargetPrompt(**vars(prompt), target_ids=ids(rng, rng.randrange(1, 9)))
        completions = []
        for _ in range(SIZE):
            sampled = ids(rng, rng.randrange(1, 12))
            logps = [-math.log(VOCAB) - 0.2 * rng.random() for _ in sampled]  # close to the policy's
            completions.append(
                Completion(prompt_ids=prompt.ids, ids=sampled, logps=logps, finish_reason="stop", text="", versions=[])
            )
        values = [[float(row != 2 and rng.random() < 0.5), float(row != 2) * rng.random()] for _ in range(SIZE)]
        groups.append(Group(row, prompt, row, "fresh", completions, values))
    return groups


def rewarded(groups: list[Group]) -> Rollout:
    return Rollout(groups, ["right", "form"], torch.tensor([1.0, 0.5]), {})


def advantages(cfg: Any, policy: Policy, rollout: Rollout, estimate: Estimator | None = None) -> Advantages:
    kl = sequence_kl(cfg, policy, rollout.completions) if cfg.advantage.kl_in_reward else None
    return Groups(cfg, None, SimpleNamespace(names=[]), None, estimate).advantage(rollout, kl)


def pack(cfg: Any, policy: Policy, rollout: Rollout, advantage: Advantages, **more: Any) -> list[MiniBatch]:
    rollouts = SimpleNamespace(cfg=cfg, _policy_gradient=cfg, policy=policy, overlap=cfg.overlap)
    batches = Rollouts.pack(rollouts, rollout, advantage, **more)
    logps_at_start(cfg, policy, batches, 1)
    return batches


def numbered(all_means: list[dict[str, float]]) -> dict[str, float]:
    return {f"{name} of {number}": x for number, means in enumerate(all_means) for name, x in means.items()}


def group_case(method: str, *, lora: bool = False, uneven: bool = False, **options: Any) -> Case:
    """uneven: one rank has more micro-batches than the other, which adds empty micro-batches."""
    run = replace(RUN, max_tokens_per_micro_batch=UNEVEN) if uneven else RUN
    cfg = import_module(f"trainer.methods.{method}").Config(
        model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), run=run, num_generations=SIZE, **options
    )
    groups = make_groups(target=False)
    prompts = [group.prompt for group in groups]

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        rank0 = Rank0Rollout(policy, None, prompts)
        rollout = rank0.scatter(rank0.run(lambda: rewarded(rows)), cfg.minibatches_per_rollout)
        batches = pack(cfg, policy, rollout, advantages(cfg, policy, rollout))
        counts = of_all(sum(bool(mb.rows) for mb in batches[0].batches), "micro-batches that are not empty")
        assert not uneven or len(counts) == 1 or len(set(counts)) > 1, counts
        # Gradients of the mini-batches add up.
        return numbered([backward(cfg, policy, b, is_last=b is batches[-1]).means() for b in batches])

    return Case(groups, lambda: make_policy(reference=True, lora=lora), step, all_of_them, 2)


def experts_case() -> Case:
    """Completions with recorded experts, which differ from the experts that the model would choose, and with sets."""
    case = group_case("grpo", policy_loss=PolicyLossConfig(beta=0.1))

    def routed(group: Group) -> Group:
        rng = np.random.default_rng(group.number)
        prompt = rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (len(group.prompt.ids), 2, 1)), axis=2)[:, :, :2]
        rest = [
            rng.permuted(np.tile(np.arange(6, dtype=np.uint8), (len(c.ids), 2, 1)), axis=2) for c in group.completions
        ]
        routes = [np.concatenate([prompt, x[:, :, :2]]) for x in rest]
        both = zip(map(with_sets, group.completions), routes, strict=True)
        return replace(group, completions=[replace(c, routes=x) for c, x in both])

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        policy.replays_routes = prepare_replay(policy, causal_lm(policy.model).model.layers, print)
        assert policy.replays_routes
        return case.step(policy, rows)

    def make() -> Policy:
        return to_policy(make_experts(0), make_experts(1).eval().requires_grad_(False))

    return Case([routed(group) for group in case.rows], make, step, all_of_them, 2)


def distill_case(jsd_beta: float | None = None, *, lora: bool = False, uneven: bool = False) -> Case:
    """The teacher is the policy's reference, with other weights. Without jsd_beta, rewards are added."""
    module = import_module("trainer.methods.opd")
    coef = 0.5 if jsd_beta is None else 0.0
    cfg = module.Config(
        model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), num_generations=SIZE, temperature=0.7,
        run=replace(RUN, max_tokens_per_micro_batch=UNEVEN) if uneven else RUN,
        reward=RewardConfig(reward_funcs=("length",)),
        distill=DistillConfig(teacher="t", jsd_beta=jsd_beta, reward_coef=coef),
    )  # fmt: skip
    groups = make_groups(target=False)
    prompts = [group.prompt for group in groups]

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        teacher, rank0 = Teacher(cfg, policy, policy), Rank0Rollout(policy, None, prompts)
        rollout = rank0.scatter(rank0.run(lambda: rewarded(rows)))
        if jsd_beta is None:
            rollouts = SimpleNamespace(advantage=partial(advantages, cfg, policy))
            advantage = module.teacher_advantage(cfg, rollouts, rollout, teacher.logps(rollout.groups))
            batch = prepare(cfg, policy, rollout.completions, advantage)
            return backward(cfg, policy, batch, loss=module.reverse_kl_loss).means()
        batch = prepare(cfg, policy, rollout.completions, torch.zeros(len(rollout.completions)))
        items = teacher.items(rollout.groups)
        return module.backward_jsd(cfg, policy, teacher, batch, [items[row] for row in batch.rows]).means()

    return Case(groups, lambda: make_policy(reference=True, lora=lora), step, all_of_them, 2)


def online_dpo_case(*, lora: bool = False, **options: Any) -> Case:
    """One of the groups is a tie."""
    run = replace(RUN, max_tokens_per_micro_batch=UNEVEN)
    module = import_module("trainer.methods.online_dpo")
    cfg = module.Config(model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), run=run, **options)
    groups = make_groups(target=False)

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        rank0 = Rank0Rollout(policy, None, [group.prompt for group in groups])
        rollout = rank0.scatter(rank0.run(lambda: rewarded(rows)))
        (batch,) = module.pair_up(cfg.run, policy, rollout, module.sides(cfg, rollout).flatten())
        sums = module.run_pairs(cfg, policy, Reference(policy), batch.items, batch.pairs, train=True)
        sums.add(batch.metrics)
        return sums.means()

    return Case(groups, lambda: make_policy(reference=True, lora=lora), step, all_of_them, 2)


def ppo_case(*, lora: bool = False, own_model: bool = False) -> Case:
    """Both losses over two mini-batches. The critic is a submodule of the model here, to compare its gradients."""
    module = import_module("trainer.methods.ppo")
    loss = PolicyLossConfig(beta=0.1, skip_zero_advantage_batches=False)
    run = replace(RUN, max_tokens_per_micro_batch=UNEVEN)
    cfg = module.Config(
        model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), run=run,
        num_generations=SIZE, minibatches_per_rollout=2, policy_loss=loss, value_model="test" if own_model else None,
        advantage=AdvantageConfig(kl_in_reward=own_model),
    )  # fmt: skip
    groups = make_groups(target=False)
    prompts = [group.prompt for group in groups]

    def policy() -> Policy:
        policy = make_policy(reference=True, lora=lora)
        torch.manual_seed(5)
        critic = ValueModel(make_policy("sequence", lora=lora)) if own_model else ValueHead(policy)
        for parameter in critic.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        policy.model.add_module("critic", critic.to(policy.device))
        return policy

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        rank0, critic = Rank0Rollout(policy, None, prompts), policy.model.critic
        rollout = rank0.scatter(rank0.run(lambda: rewarded(rows)), cfg.minibatches_per_rollout)
        estimates = module.estimate(cfg, policy, critic, rollout)
        columns = {"old_value": estimates.value, "target": estimates.target}
        batches = pack(cfg, policy, rollout, estimates.advantage, rows=estimates.rows, extra=columns)
        all_means = []
        for batch in batches:
            is_last = batch is batches[-1] and not own_model  # its backward comes later, and is in the model only here
            all_means.append(module.backward_both(cfg, policy, critic, batch, is_last=is_last).means())
        return estimates.metrics | numbered(all_means)

    return Case(groups, policy, step, all_of_them, 2)


def loss_case(kind: str) -> Case:
    """With ratios other than 1, a KL term and an entropy bonus."""
    loss = PolicyLossConfig(loss_type=kind, beta=0.1, entropy_coef=0.05)
    correction = CorrectionConfig(proximal_policy="step" if kind == "reinforce" else "behaviour")  # it has no ratio
    return group_case("grpo", uneven=True, policy_loss=loss, correction=correction)


def six_and_one(rows: list[Any]) -> list[Any]:
    return rows[:6] if rank() == 0 else rows[6:]


def bnpo_case(*, masked: bool = False) -> Case:
    """One completion per micro-batch: rank 0 has six, rank 1 has one and adds five empty micro-batches."""
    cfg = import_module("trainer.methods.grpo").Config(
        model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), run=replace(RUN, **EACH_ALONE),
        num_generations=SIZE, share_prompt=False,
        policy_loss=PolicyLossConfig(loss_type="bnpo", beta=0.1, entropy_coef=0.1, mask_truncated_completions=masked),
    )  # fmt: skip
    completions = [completion for group in make_groups(target=False) for completion in group.completions][:7]
    if masked:  # rank 1's only completion, and one of rank 0
        completions = [replace(c, finish_reason="length") if n in (2, 6) else c for n, c in enumerate(completions)]

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        advantage = torch.tensor([1.0 - 0.4 * len(completion.ids) for completion in rows], dtype=torch.float64)
        batch = prepare(cfg, policy, rows, advantage)
        return {**backward(cfg, policy, batch).means(), "micro": float(batch.num_micro_batches)}

    return Case(completions, lambda: make_policy(reference=True), step, six_and_one)


def structured_case(*, lora: bool = False, loss_type: str = "dapo", run: RunConfig = RUN) -> Case:
    module = import_module("trainer.methods.ebft")
    cfg = module.Config(
        model=ModelConfig(model="test"), data=DataConfig(data=("rows",)), run=run, num_generations=SIZE,
        features=FeatureConfig(ce_coef=0.1, use_whitening=True), policy_loss=PolicyLossConfig(loss_type=loss_type),
    )  # fmt: skip
    groups = make_groups(target=True)
    prompts = [group.prompt for group in groups]

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        rewards = structured.FeatureRewards(FeatureNetwork(cfg.features, cfg.run, policy), num_generations=SIZE)
        rank0 = Rank0Rollout(policy, None, prompts)
        rank0.handlers |= rewards.handlers

        def sample() -> Rollout:
            completions = [completion for group in rows for completion in group.completions]
            repeated = [group.prompt for group in rows for _ in range(SIZE)]
            table = rewards.submit(repeated, completions, step=0).result()
            values = [table.values[first : first + SIZE] for first in range(0, len(completions), SIZE)]
            groups = [replace(group, values=of_group) for group, of_group in zip(rows, values, strict=True)]
            return Rollout(groups, table.names, torch.tensor(table.weights), {})

        full_rollout = rank0.run(sample)
        logged = structured.feature_metrics(cfg, rewards, full_rollout)
        rollout = rank0.scatter(full_rollout)
        advantage = advantages(cfg, policy, rollout, partial(structured.estimate, cfg))
        sums = backward(cfg, policy, prepare(cfg, policy, rollout.completions, advantage), is_last=False)
        structured.add_target(cfg, policy, [group.prompt for group in rollout.groups], sums)
        return {**logged, **sums.means()}

    return Case(groups, lambda: make_policy(reference=True, lora=lora), step, all_of_them, 2)


def strided_case(*, lora: bool = False) -> Case:
    module = import_module("trainer.methods.ebft")
    cfg = module.Config(
        model=ModelConfig(model="test"), data=DataConfig(data=("rows",)), run=RUN, mode="strided",
        features=FeatureConfig(ce_coef=0.1),
        strided=StridedConfig(stride=4, context_length=3, generate_max_len=3, n_samples_per_prompt=3),
    )  # fmt: skip
    rng = random.Random(8)
    documents = [
        Document(ids(rng, length), source=f"row {length}") for length in (21, 4, 9, 16, 2, 12)
    ]  # two are short
    numbers = {id(document): number for number, document in enumerate(documents)}

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        network = FeatureNetwork(cfg.features, cfg.run, policy)
        held_out = strided.evaluate(cfg, policy, network, documents[:3], batch_size=2)  # as after a step
        shard = [rows[i] for i in indices_of_this_rank(rows, cfg.strided.plan.size)]
        continued = strided.continue_all(cfg, policy, shard, seed=3, numbers=[numbers[id(row)] for row in shard])
        continued = strided.add_rewards(network, continued)
        sums = strided.backward(cfg, policy, continued)
        return {**sums.means(), **strided.step_metrics(network, continued), **held_out}

    return Case(documents, lambda: make_policy(reference=True, lora=lora), step, all_of_them)


CASES = {
    "grpo": lambda: group_case("grpo", policy_loss=PolicyLossConfig(beta=0.1)),
    "grpo-skips": lambda: group_case("grpo"),
    "grpo-experts": experts_case,
    "gdpo-parts": lambda: group_case("gdpo", minibatches_per_rollout=2, policy_loss=PolicyLossConfig(beta=0.1)),
    # Not bnpo: it averages over micro-batches, which differ between one rank and two.
    **{f"grpo-{kind}": partial(loss_case, kind) for kind in POLICY_LOSSES if kind != "bnpo"},
    "grpo-bnpo": bnpo_case,
    "grpo-bnpo-masked": lambda: bnpo_case(masked=True),
    "ppo": ppo_case,
    "ppo-model-lora": lambda: ppo_case(lora=True, own_model=True),
    "online_dpo": online_dpo_case,
    "online_dpo-aot": lambda: online_dpo_case(loss_type=("aot", "sft"), lora=True),
    "ebft-bnpo": lambda: structured_case(loss_type="bnpo", run=replace(RUN, **EACH_ALONE)),
    "ebft-structured-lora": lambda: structured_case(lora=True),
    "ebft-strided": strided_case,
    "ebft-strided-lora": lambda: strided_case(lora=True),
}
