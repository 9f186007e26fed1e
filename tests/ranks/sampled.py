"""Cases of tests/ranks/worker.py for the sampling methods: one step on given completions.

trainer/rl/rank0_rollout.py scatters the groups; for EBFT all ranks compute rewards at rank 0's command.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from trainer.rl.session import Session

from data.strided import Document
from data.types import Prompt, TargetPrompt
from losses.policy import POLICY_LOSSES
from rollout.engine import Completion, Group
from rollout.rewards.options import RewardConfig
from tests.ranks.worker import VOCAB, Case, all_of_them, ids, make_policy
from tests.trainer.rl.group_cases import prepare
from trainer.config.blocks import DataConfig, ModelConfig, PromptConfig, RunConfig
from trainer.config.distill import DistillConfig
from trainer.config.ebft import FeatureConfig, StridedConfig
from trainer.config.groups import AdvantageConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.ebft import strided, structured
from trainer.ebft.features import FeatureNetwork
from trainer.methods.grpo import backward, score_at_start
from trainer.offline.rows import indices_of_this_rank
from trainer.parallel.comm import all_sum, of_all, rank
from trainer.policy.logps import Policy
from trainer.policy.reference import Reference
from trainer.rl.critic import ValueHead, ValueModel
from trainer.rl.groups import GroupBatch, sequence_kl
from trainer.rl.rank0_rollout import Rank0Rollout
from trainer.rl.teacher import Teacher

SIZE = 4  # completions per group
UNEVEN = 24  # tokens per micro-batch that give the two ranks different numbers of micro-batches
RUN = RunConfig(max_tokens_per_micro_batch=48, per_device_train_batch_size=8, gradient_accumulation_steps=2)
EACH_ALONE = {"max_tokens_per_micro_batch": 1}


def make_groups(target: bool) -> list[Group]:
    """Five groups of uneven lengths; one has equal rewards and is skipped without a KL term."""
    rng = random.Random(6)
    groups = []
    for row in range(5):
        prompt = Prompt(source=f"row {row}", prompt="", ids=ids(rng, rng.randrange(2, 9)))
        if target:
            prompt = TargetPrompt(**vars(prompt), target_ids=ids(rng, rng.randrange(1, 9)))
        completions = []
        for _ in range(SIZE):
            made = ids(rng, rng.randrange(1, 12))
            logps = [-math.log(VOCAB) - 0.2 * rng.random() for _ in made]  # about as likely as tokens are here
            completions.append(
                Completion(prompt_ids=prompt.ids, ids=made, logps=logps, finish_reason="stop", text="", versions=[])
            )
        values = [[float(row != 2 and rng.random() < 0.5), float(row != 2) * rng.random()] for _ in range(SIZE)]
        groups.append(Group(row, prompt, row, "fresh", completions, values))
    return groups


def group_case(method: str, *, lora: bool = False, uneven: bool = False, **options: Any) -> Case:
    """`uneven`: one rank has more micro-batches, and the other appends empty ones."""
    run = replace(RUN, max_tokens_per_micro_batch=UNEVEN) if uneven else RUN
    cfg = import_module(f"trainer.methods.{method}").Config(
        model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), run=run, num_generations=SIZE, **options
    )
    groups = make_groups(target=False)
    prompts = [group.prompt for group in groups]

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        rank0 = Rank0Rollout(policy, None, prompts)
        whole = rank0.run(lambda: GroupBatch(rows, ["right", "form"], [1.0, 0.5], {}))
        batch = rank0.scatter(whole, cfg.minibatches_per_rollout)
        kl = sequence_kl(cfg, policy, batch.completions) if cfg.advantage.kl_in_reward else None
        advantage = cfg.advantage.estimate(
            batch.for_advantage(kl, beta=cfg.policy_loss.beta, all_sum=all_sum)
        ).flatten()
        s = SimpleNamespace(cfg=cfg, policy=policy, steps_per_rollout=1, old_logps=lambda batch: None)
        rollout = Session.pack(s, batch, advantage)
        score_at_start(cfg, policy, rollout, 1)
        counts = of_all(sum(bool(mb.rows) for mb in rollout[0].batches), "micro-batches that hold something")
        assert not uneven or len(counts) == 1 or len(set(counts)) > 1, counts
        # gradients are summed over mini-batches here
        found = [backward(cfg, policy, part, is_last=part is rollout[-1]).means() for part in rollout]
        return {f"{name} of {number}": x for number, means in enumerate(found) for name, x in means.items()}

    return Case(groups, lambda: make_policy(reference=True, lora=lora), step, all_of_them, 2)


def distill_case(jsd_beta: float | None = None, *, lora: bool = False, uneven: bool = False) -> Case:
    """The teacher is the policy's reference, with other weights; without jsd_beta, rewards are added."""
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
        batch = rank0.scatter(rank0.run(lambda: GroupBatch(rows, ["right", "form"], [1.0, 0.5], {})))
        estimate = SimpleNamespace(
            advantage=lambda batch: cfg.advantage.estimate(batch.for_advantage(all_sum=all_sum)).flatten()
        )
        if jsd_beta is None:
            advantage = module.token_advantage(cfg, teacher.logps(batch.groups), estimate, batch)
            return backward(cfg, policy, prepare(cfg, policy, batch.completions, advantage), is_last=True).means()
        rollout = prepare(cfg, policy, batch.completions, torch.zeros(len(batch.completions)))
        items = teacher.items(batch.groups)
        return module.backward_jsd(cfg, policy, teacher, rollout, [items[row] for row in rollout.rows]).means()

    return Case(groups, lambda: make_policy(reference=True, lora=lora), step, all_of_them, 2)


def online_dpo_case(*, lora: bool = False, **options: Any) -> Case:
    """The best vs. the worst completion of each group; one group is a tie."""
    run = replace(RUN, max_tokens_per_micro_batch=UNEVEN)
    module = import_module("trainer.methods.online_dpo")
    cfg = module.Config(model=ModelConfig(model="test"), data=PromptConfig(data=("rows",)), run=run, **options)
    groups = make_groups(target=False)

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        rank0 = Rank0Rollout(policy, None, [group.prompt for group in groups])
        batch = rank0.scatter(rank0.run(lambda: GroupBatch(rows, ["right", "form"], [1.0, 0.5], {})))
        side = module.sides(batch.for_advantage(), judged=False, missing_eos_penalty=0.0).flatten()
        (rollout,) = module.pair_up(cfg, policy, batch, side)
        sums = module.run_pairs(cfg, policy, Reference(policy), rollout.items, rollout.pairs, train=True)
        sums.add(rollout.metrics)
        return sums.means()

    return Case(groups, lambda: make_policy(reference=True, lora=lora), step, all_of_them, 2)


def ppo_case(*, lora: bool = False, own_model: bool = False) -> Case:
    """Both losses over two mini-batches. Here the critic is a submodule of the model, to compare its gradient."""
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
        made = make_policy(reference=True, lora=lora)
        torch.manual_seed(5)
        critic = ValueHead(made)
        if own_model:
            critic = ValueModel(make_policy("sequence", lora=lora))
        for parameter in critic.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        made.model.add_module("critic", critic)
        return made

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        rank0, critic = Rank0Rollout(policy, None, prompts), policy.model.critic
        whole = rank0.run(lambda: GroupBatch(rows, ["right", "form"], [1.0, 0.5], {}))
        batch = rank0.scatter(whole, cfg.minibatches_per_rollout)
        judged = module.add_rewards(cfg, policy, critic, batch)
        s = SimpleNamespace(cfg=cfg, policy=policy, steps_per_rollout=1, old_logps=lambda batch: None)
        own = {"old_value": judged.value, "target": judged.target}
        rollout = Session.pack(s, batch, judged.advantage, rows=judged.rows, own=own)
        score_at_start(cfg, policy, rollout, 1)
        found = []
        for part in rollout:
            is_last = part is rollout[-1] and not own_model  # only here a submodule of the policy
            found.append(module.backward_both(cfg, policy, critic, part, is_last=is_last).means())
        return judged.metrics | {
            f"{name} of {number}": x for number, means in enumerate(found) for name, x in means.items()
        }

    return Case(groups, policy, step, all_of_them, 2)


def loss_case(kind: str) -> Case:
    """One policy loss with every step-wide count: ratios other than 1, a KL term, an entropy bonus."""
    loss = PolicyLossConfig(loss_type=kind, beta=0.1, entropy_coef=0.05)
    correction = CorrectionConfig(proximal_policy="step" if kind == "reinforce" else "behaviour")  # it has no ratio
    return group_case("grpo", uneven=True, policy_loss=loss, correction=correction)


def six_and_one(rows: list[Any]) -> list[Any]:
    return rows[:6] if rank() == 0 else rows[6:]


def bnpo_case(*, masked: bool = False) -> Case:
    """Each completion is a micro-batch: rank 0 has six, rank 1 has one and five empty ones."""
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
        return {**backward(cfg, policy, batch, is_last=True).means(), "micro": float(batch.total.micro_batches)}

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

        def rewarded() -> GroupBatch:
            completions = [completion for group in rows for completion in group.completions]
            of_each = [group.prompt for group in rows for _ in range(SIZE)]
            table = rewards.submit(of_each, completions, step=0).result()
            values = [table.values[first : first + SIZE] for first in range(0, len(completions), SIZE)]
            scored = [replace(group, values=own) for group, own in zip(rows, values, strict=True)]
            return GroupBatch(scored, table.names, table.weights, {})

        whole = rank0.run(rewarded)
        logged = structured.feature_metrics(cfg, rewards, whole)
        batch = rank0.scatter(whole)
        advantage = structured.estimate(cfg, batch.for_advantage(all_sum=all_sum)).flatten()
        sums = backward(cfg, policy, prepare(cfg, policy, batch.completions, advantage), is_last=False)
        structured.add_target(cfg, policy, [group.prompt for group in batch.groups], sums)
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
        own = [rows[place] for place in indices_of_this_rank(rows, cfg.strided.plan.size)]
        made = strided.continue_all(cfg, policy, own, seed=3, numbers=[numbers[id(row)] for row in own])
        made = strided.add_rewards(network, made)
        sums = strided.backward(cfg, policy, made)
        return {**sums.means(), **strided.step_metrics(network, made), **held_out}

    return Case(documents, lambda: make_policy(reference=True, lora=lora), step, all_of_them)


CASES = {
    "grpo": lambda: group_case("grpo", policy_loss=PolicyLossConfig(beta=0.1)),
    "grpo-skips": lambda: group_case("grpo"),
    "gdpo-parts": lambda: group_case("gdpo", minibatches_per_rollout=2, policy_loss=PolicyLossConfig(beta=0.1)),
    # Without bnpo: it averages per micro-batch, and one process has different micro-batches.
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
