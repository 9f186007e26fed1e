"""EBFT: match the features of the true completion, not its tokens (Jelassi et al. 2026, arXiv:2603.12248).

A frozen network gives a vector for each completion. Rollouts are rewarded for being like the true completion there, and
for being unlike each other (losses/ebft.py), so that their mean meets it: a policy gradient without a verifier.

    structured   prompts -> generate -> features -> rewards -> advantage -> pack -> (logps -> loss -> backward)* -> step
    strided      documents -> continue from anchors -> features -> rewards -> advantage -> (logps -> loss) -> step

Structured mode samples whole completions by any engine and takes GRPO's losses, corrections and overlap. Strided mode
continues a text by a few tokens every few tokens, all at once and in this process, and needs no prompts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from data.errors import UserError
from data.rows.documents import load_documents
from data.rows.held_out import train_and_held_out
from data.rows.targets import load_targets
from data.strided import Document, require_anchors
from data.types import TargetPrompt
from rollout.engine import Source
from rollout.episodes.episode import EpisodeSource
from rollout.episodes.target import TargetEpisode
from trainer.config.blocks import MethodMemory
from trainer.config.ebft import EbftConfig
from trainer.ebft import strided, structured
from trainer.ebft.features import FeatureNetwork, feature_policy
from trainer.methods.grpo import backward, score_at_start
from trainer.offline.loop import Offline, read_rows
from trainer.parallel.comm import pick_device
from trainer.policy.load import load_policy
from trainer.policy.logps import Policy
from trainer.policy.sharding import parallelize
from trainer.rl.session import Session
from trainer.run.run import open_run


@dataclass(frozen=True, kw_only=True)
class Config(EbftConfig):
    """Energy-based fine-tuning: match the features of true completions with those of rollouts."""

    memory: ClassVar[MethodMemory] = MethodMemory("one pass", "always", samples=True)
    rows: ClassVar[str] = "truths"
    lora_learning_rate: ClassVar[float] = 1e-5  # ten times the authors' rate for all weights (2603.12248)


def train(cfg: Config) -> None:
    if cfg.mode == "strided":
        return train_strided(cfg)
    with Session(
        cfg,
        frozen=lambda s: {"features": feature_network(cfg, s.policy)},
        prompts=lambda s, specs: targets_of(cfg, s.policy, s.frozen["features"], specs),
        source=lambda s, sampling: target_source(cfg, s),
        rewards=lambda s: structured.FeatureRewards(s.frozen["features"], num_generations=cfg.num_generations),
        advantage=partial(structured.estimate, cfg),
        evaluate=lambda s: structured.evaluate(
            cfg, s.policy, s.rank0, s.held_out_source, s.rewards, s.held_out, version=s.step
        ),
    ) as s:
        for batch in s.rollouts():  # rewards come from the feature networks of all ranks
            feature_metrics = structured.feature_metrics(cfg, s.rewards, s.whole)
            advantage = s.advantage(batch)  # (B,)
            # Losses grow in step with their advantages, so the weight of the policy loss can be theirs.
            weighted = advantage * cfg.features.rl_coef
            rollout = s.pack(batch, weighted)
            score_at_start(cfg, s.policy, rollout, s.steps_per_rollout)
            s.keep_samples(batch, advantage)
            for part in s.updates(*rollout):
                sums = backward(cfg, s.policy, part, is_last=not cfg.features.ce_coef)
                prompts = [group.prompt for group in batch.parts[part.number].groups]
                num_target = structured.add_target(cfg, s.policy, prompts, sums)
                s.clip_and_step(sums, part, extra_tokens=num_target)
                s.log(sums, part, feature_metrics)


def feature_network(cfg: Config, policy: Policy) -> FeatureNetwork:
    return FeatureNetwork(cfg.features, cfg.run, feature_policy(cfg.features, cfg.model, policy, cfg.parallel))


def target_source(cfg: Config, s: Session) -> Source:
    """Completions about as long as their targets, turn by turn; those of an evaluation are sampled as in training."""
    multiplier = cfg.gt_length_multiplier if cfg.adaptive_max_tokens else None
    return EpisodeSource(s.engine, s.sampling, TargetEpisode(s.policy.tokenizer, gt_length_multiplier=multiplier))


def train_strided(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = load_policy(cfg.model, cfg.lora, pick_device(), with_reference=cfg.has_reference)
        policy = parallelize(cfg.parallel, policy)
        network = feature_network(cfg, policy)
        size = cfg.run.sequences_per_step
        read = partial(documents_of, cfg, policy, network)
        documents, held_out = train_and_held_out(
            cfg.data, cfg.run.seed, read, partial(read, limit=cfg.data.max_eval_rows)
        )
        held_out = held_out[: cfg.data.max_eval_rows]
        multiple = network.policy.row_multiple
        offline = Offline(run, cfg, policy, documents, size=cfg.strided.plan.size)

        def evaluate() -> dict[str, float]:
            return strided.evaluate(cfg, policy, network, held_out, batch_size=size)

        offline.begin(evaluate)
        for batch in offline.steps():
            # A document's number in the run decides its seeds: the same after a resume, and on any number of ranks.
            numbers = [(offline.step - 1) * size + place for place in offline.places]
            step = strided.continue_all(cfg, policy, batch, seed=cfg.run.seed, numbers=numbers, multiple=multiple)
            offline.timer.lap("rollout_s")
            step = strided.judge(network, step)
            run.sample(offline.step, strided.sample_rows(policy, batch, step))
            offline.timer.lap("reward_s")
            sums = strided.backward(cfg, policy, step)
            if offline.step == run.start_step + 1:  # once: it is about the model's code, and waits for the device
                strided.check_gap(cfg, policy, sums, offline.step)
            offline.take_step(sums)
            offline.log_and_save(sums, step.num_computed, evaluate, strided.step_metrics(network, step))
        run.finish(policy)


def context_of(policy: Policy, network: FeatureNetwork) -> int | None:
    """Tokens that both the policy and the feature network can read."""
    lengths = [both.context_length for both in (policy, network.policy) if both.context_length is not None]
    return min(lengths, default=None)


def targets_of(cfg: Config, policy: Policy, network: FeatureNetwork, specs: tuple[str, ...]) -> list[TargetPrompt]:
    return read_rows(
        load_targets, cfg, policy, specs, context_length=context_of(policy, network), options=cfg.format,
        max_prompt_length=cfg.max_prompt_length, max_completion_length=cfg.max_completion_length,
    )  # fmt: skip


def documents_of(
    cfg: Config, policy: Policy, network: FeatureNetwork, specs: tuple[str, ...], limit: int | None = None
) -> list[Document]:
    if not specs:
        return []
    context_length, plan = context_of(policy, network), cfg.strided.plan
    documents = read_rows(
        load_documents, cfg, policy, specs, max_length=cfg.strided.max_length, context_length=context_length
    )[:limit]
    require_anchors(documents, plan)
    if plan.min_completion_prefix and not any(document.prompt_length for document in documents):
        raise UserError(
            f"min_completion_prefix={plan.min_completion_prefix}: has no effect because no document has a prompt; use "
            "context_length"
        )
    if cfg.features.ce_coef:
        return documents  # one without an anchor still has tokens of its own
    kept = [document for document in documents if plan.anchors(document)]
    if len(kept) < len(documents):
        left_out = len(documents) - len(kept)
        print(f"data: left out {left_out} of {len(documents)} documents without room for an anchor", file=sys.stderr)
    return kept
