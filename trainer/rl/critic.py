"""The critic of PPO: the value of the state before each trained token, what the policy expects to earn from there on.

    critic = load_critic(cfg, s.policy)            # for Session(trained=...): a head on the policy, or its own model
    values_of(critic, policy, micro_batches)       # (N,) each, without gradient
    critic(states)                                 # ValueHead: (N, D) -> (N,), with gradient
    critic(mb)                                     # ValueModel: (N,), with gradient

A new head gives 0 everywhere. Checkpoints hold the critic beside the model (TrainedModule); exports do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from data.errors import UserError
from data.packing import Batch
from rollout.engine import Completion
from trainer.policy.heads import head_of, load_scorer
from trainer.policy.logps import Policy, causal_lm, hidden_states, predictor_states
from trainer.policy.reference import check_same_tokens, named_as


class ValueHead(nn.Module):
    """A head of two layers on the policy's own states; its loss trains the trunk, too.

    Of one layer it learns too slowly to be of use while the policy moves: the states of a language model have a large
    common part, which single weights can hardly tell from the rest (docs/ppo.md has figures).
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        width = causal_lm(policy.model).config.get_text_config().hidden_size
        dtype = torch.promote_types(policy.compute_dtype, torch.float32)
        self.inner, self.outer = nn.Linear(width, 2 * width, dtype=dtype), nn.Linear(2 * width, 1, dtype=dtype)
        for parameter in self.outer.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        states: Tensor,  # (N, D)
    ) -> Tensor:  # (N,)
        return self.outer(torch.relu(self.inner(states.to(self.inner.weight.dtype)))).squeeze(1)


class ValueModel(nn.Module):
    """A model of its own with a scalar head, read at the token before each trained one.

    Only what is trained is registered: checkpoints hold no frozen base of an adapter, which is in its files.
    """

    def __init__(self, scorer: Policy) -> None:
        super().__init__()
        self._scorer = [scorer]  # in a list, so that it is not registered
        for name, parameter in scorer.model.named_parameters():
            if parameter.requires_grad:
                self.register_parameter(name.replace(".", ":"), parameter)

    @property
    def scorer(self) -> Policy:
        return self._scorer[0]

    def forward(self, mb: Batch) -> Tensor:  # (N,)
        head = head_of(self.scorer.model)
        states = hidden_states(self.scorer, causal_lm(self.scorer.model), mb)[mb.index]  # (N, D)
        return head(states.to(next(head.parameters()).dtype)).squeeze(1)


Critic = ValueHead | ValueModel


def load_critic(cfg: Any, policy: Policy) -> Critic:
    """`cfg` is a Config with model, lora and value_model: None, or where to load the critic from."""
    if cfg.value_model is None:
        return ValueHead(policy)
    own = replace(cfg.model, model=cfg.value_model)
    with named_as("value_model"):
        scorer = load_scorer(own, cfg.lora, policy.device, kind="sequence", zero_head=True)
    check_same_tokens(policy, scorer, f"value_model={cfg.value_model}", cfg.model.model)
    if policy.row_multiple % scorer.row_multiple:
        raise UserError(
            f"value_model={cfg.value_model}: runs with flex attention, and model={cfg.model.model} cannot; set "
            "--attn-implementation sdpa"
        )
    policy.companions.append(scorer)
    return ValueModel(scorer)


@torch.no_grad()
def values_of(critic: Critic, policy: Policy, micro_batches: Sequence[Batch]) -> list[Tensor]:  # (N,) each
    """Of the current weights, without an adapter's dropout."""
    owner = critic.scorer if isinstance(critic, ValueModel) else policy
    was_training = owner.model.training
    owner.model.eval()
    try:
        if isinstance(critic, ValueModel):
            return [critic(mb) for mb in micro_batches]
        lm = causal_lm(policy.model)
        return [critic(predictor_states(policy, lm, mb)) for mb in micro_batches]
    finally:
        owner.model.train(was_training)


# Numbers of trained tokens: packed in micro-batches, one row per completion, or a list with one number per id.


def pad_completions(
    completions: Sequence[Completion],
    micro_batches: Sequence[Batch],  # of these completions
    packed: Sequence[Tensor],  # (N,) of each
) -> tuple[Tensor, Tensor]:  # (B, T) 0 where masked, and (B, T) bool: True = trained. In main memory
    lengths = [c.trained for c in completions]
    found: dict[int, Tensor] = {}
    for mb, own in zip(micro_batches, packed, strict=True):
        found |= zip(mb.rows, own.cpu().split([lengths[row] for row in mb.rows]), strict=True)
    if not lengths:
        return torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)
    rows = pad_sequence([found[row] for row in range(len(lengths))], batch_first=True)
    return rows, torch.arange(rows.shape[1]) < torch.tensor(lengths).unsqueeze(1)


def scatter_to_ids(
    completions: Sequence[Completion],
    rows: Sequence[int],  # those of them that `values` has
    values: Tensor,  # (B, T) from in_rows
) -> list[list[float]]:
    """For each completion one number per id, 0 where there is none."""
    found = [[0.0] * len(c.ids) for c in completions]
    for row, own in zip(rows, values.tolist(), strict=True):
        mask = completions[row].mask or [True] * len(completions[row].ids)
        for place, x in zip((place for place, trained in enumerate(mask) if trained), own, strict=False):
            found[row][place] = x
    return found
