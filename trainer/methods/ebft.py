"""EBFT: match the features of the true completion, not its tokens (Jelassi et al. 2026, arXiv:2603.12248).

A frozen network maps each completion to a feature vector phi. A rollout is rewarded for similarity to the true
completion and for difference from the other rollouts, so that their mean approaches it: a policy gradient without a
verifier. With n rollouts of a prompt (losses/ebft.py):

    r_j = 2 cos(phi_j, phi_true) - 2 / (n - 1) sum_{k != j} phi_j . phi_k        alignment - diversity
    loss = rl_coef * policy loss with advantages from r + ce_coef * cross-entropy of the true completion

    structured   prompts -> generate -> features -> rewards -> advantage -> pack -> (logps -> loss -> backward)* -> step
    strided      documents -> continue from anchors -> features -> rewards -> advantage -> (logps -> loss) -> step

Structured mode samples whole completions with any engine and uses GRPO's loss, corrections and overlap. Strided mode
continues a text by a few tokens from every few tokens, in one pass and in this process, and needs no prompts
(trainer/ebft/strided.py has its loss).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from data.command.checks import reject_unused
from data.errors import UserError
from data.rows.documents import load_documents
from data.rows.held_out import select, train_and_held_out
from data.rows.targets import load_targets
from data.strided import Document, require_anchors
from data.types import TargetPrompt
from rollout.engine import Engine, Sampling, Source
from trainer.config.blocks import MethodMemory
from trainer.config.ebft import EbftConfig
from trainer.ebft import strided, structured
from trainer.ebft.features import FeatureNetwork, feature_policy
from trainer.methods.grpo import backward, logps_at_start
from trainer.offline.rows import Rows, read_rows
from trainer.policy.logps import Policy
from trainer.rl.rollouts import Rollouts
from trainer.rl.setup import training_sampling
from trainer.run.run import open_run
from trainer.run.training import Training, open_policy


@dataclass(frozen=True, kw_only=True)
class Config(EbftConfig):
    """Energy-based fine-tuning: match the features of true completions with those of rollouts."""

    memory: ClassVar[MethodMemory] = MethodMemory("one pass")
    rows: ClassVar[str] = "truths"
    lora_learning_rate: ClassVar[float] = 1e-5  # ten times the authors' rate for all weights (2603.12248)

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_unused(self, "with ebft, whose evaluation samples num_generations", ("num_generations_eval",))


def train(cfg: Config) -> None:
    if cfg.mode == "strided":  # --mode strided
        return train_strided(cfg)
    with open_run(cfg, cfg.run.method) as run:
        policy = open_policy(cfg, with_reference=cfg.has_reference)
        network = feature_network(cfg, policy)
        rewards = structured.FeatureRewards(network, num_generations=cfg.num_generations)  # r, on all ranks
        rollouts = Rollouts(
            run, cfg, policy, rewards, advantage=partial(structured.estimate, cfg),
            prompts=partial(targets_of, cfg, policy, network), source=partial(target_source, cfg, policy),
        )  # fmt: skip
        evaluate = partial(structured.evaluate, cfg, policy, rollouts)
        training = Training(run, cfg, policy, rollouts, evaluate=evaluate, moving=cfg.moving)
        for rollout in training.batches():
            feature_metrics = structured.feature_metrics(cfg, rewards, rollouts.full_rollout)
            advantage = rollouts.advantage(rollout)  # (B,)
            assert isinstance(advantage, Tensor)
            # The loss is linear in the advantage, so --rl-coef can scale the advantage instead.
            batches = rollouts.pack(rollout, advantage * cfg.features.rl_coef)
            logps_at_start(cfg, policy, batches, rollouts.steps_per_batch)
            rollouts.keep_samples(rollout, advantage)
            for batch in rollouts.updates(*batches):
                sums = backward(cfg, policy, batch, is_last=not cfg.features.ce_coef)  # GRPO's loss
                prompts = [group.prompt for group in rollout.minibatches[batch.number].groups]
                num_target = structured.add_target(cfg, policy, prompts, sums)  # --ce-coef
                training.clip_and_step(sums)
                training.log(sums, batch.computed_tokens + num_target, feature_metrics)


def feature_network(cfg: Config, policy: Policy) -> FeatureNetwork:
    return FeatureNetwork(cfg.features, cfg.run, feature_policy(cfg.features, cfg.model, policy, cfg.parallel))


def target_source(cfg: Config, policy: Policy, engine: Engine, sampling: Sampling) -> Source:
    """Sample completions about as long as their targets, turn by turn; evaluations sample as in training."""
    from rollout.episodes.episode import EpisodeSource
    from rollout.episodes.target import TargetEpisode

    multiplier = cfg.gt_length_multiplier if cfg.adaptive_max_tokens else None  # --adaptive-max-tokens
    sampling = training_sampling(cfg, policy)
    return EpisodeSource(engine, sampling, TargetEpisode(policy.tokenizer, gt_length_multiplier=multiplier))


def train_strided(cfg: Config) -> None:
    with open_run(cfg, cfg.run.method) as run:
        policy = open_policy(cfg, with_reference=cfg.has_reference)
        network = feature_network(cfg, policy)
        for each in (policy, network.policy):
            if not each.can_share or each.carried_state:
                raise UserError(
                    f"mode=strided: model={each.source} cannot continue one copy of a document from several places; "
                    "use --mode structured"
                )
        read = partial(documents_of, cfg, policy, network)
        documents, held_out = train_and_held_out(
            cfg.data, cfg.run.seed, read, partial(read, limit=cfg.data.max_eval_rows)
        )
        held_out = held_out[: cfg.data.max_eval_rows]
        rows, size = Rows(cfg, documents, size=cfg.strided.plan.size), cfg.run.sequences_per_step
        evaluate = partial(strided.evaluate, cfg, policy, network, held_out, batch_size=size)
        training = Training(run, cfg, policy, rows, evaluate=evaluate)
        for batch in training.steps():  # this rank's documents
            # Seeds depend on a document's number within the run: the same after a resume, and on any number of ranks.
            numbers = [(training.step - 1) * size + index for index in rows.indices]
            multiple = network.policy.row_multiple
            step = strided.continue_all(cfg, policy, batch, seed=cfg.run.seed, numbers=numbers, multiple=multiple)
            training.timer.lap("rollout_s")
            step = strided.add_rewards(network, step)  # and advantages
            run.sample(training.step, strided.sample_rows(policy, batch, step))
            training.timer.lap("reward_s")
            sums = strided.backward(cfg, policy, step)
            if training.step == run.start_step + 1:  # once: it checks the model's code and needs a host sync
                strided.check_gap(cfg, policy, sums, training.step)
            training.clip_and_step(sums)
            training.log(sums, step.num_computed, strided.step_metrics(network, step))


def context_of(policy: Policy, network: FeatureNetwork) -> int | None:
    """Context length that both the policy and the feature network support."""
    lengths = [model.context_length for model in (policy, network.policy) if model.context_length is not None]
    return min(lengths, default=None)


def targets_of(cfg: Config, policy: Policy, network: FeatureNetwork, specs: tuple[str, ...]) -> list[TargetPrompt]:
    rows = read_rows(
        load_targets, cfg, policy, specs, context_length=context_of(policy, network), options=cfg.format,
        max_prompt_length=cfg.max_prompt_length, max_completion_length=cfg.max_completion_length,
    )  # fmt: skip
    return list(rows)


def documents_of(
    cfg: Config, policy: Policy, network: FeatureNetwork, specs: tuple[str, ...], limit: int | None = None
) -> Sequence[Document]:
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
        return documents  # a document without an anchor still has tokens for the cross-entropy
    kept = select(documents, [i for i, document in enumerate(documents) if plan.anchors(document)])
    if len(kept) < len(documents):
        skipped = len(documents) - len(kept)
        print(f"data: skipped {skipped} of {len(documents)} documents too short for an anchor", file=sys.stderr)
    return kept
