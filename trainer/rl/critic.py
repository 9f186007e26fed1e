"""PPO's critic: the value (expected return) of the state before each trained token.

    critic = load_critic(cfg, policy)              # a head on the policy's trunk, or a separate model
    values_of(critic, policy, batches)             # (N,) each, no gradient
    critic(states)                                 # ValueHead: (N, D) -> (N,), with gradient
    critic(batch)                                  # ValueModel: (N,), with gradient

A new head returns 0. Checkpoints contain the critic (TrainedModule); exports do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from data.errors import UserError
from data.packing import Batch
from rollout.engine import Completion
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.heads import head_of, load_scorer
from trainer.policy.logps import Policy, causal_lm, hidden_states, predictor_states, share_batches
from trainer.policy.reference import check_same_tokens, named_as


class ValueHead(nn.Module):
    """A head of two layers on the policy's states; its loss also trains the trunk.

    With one layer it learns too slowly to keep up with the policy: hidden states share a large common component, which
    a linear layer can hardly separate (figures in docs/ppo.md).
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
    """A separate model with a scalar head, read at the token before each trained token.

    Only trained parameters are registered, so checkpoints do not contain the frozen base of an adapter.
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


def load_critic(value_model: str | None, model: ModelConfig, lora: LoraConfig, policy: Policy) -> Critic:
    """Build a head on the policy, or load --value-model."""
    if value_model is None:
        return ValueHead(policy)
    with named_as("value_model"):
        scorer = load_scorer(model.for_model(value_model), lora, policy.device, kind="sequence", zero_head=True)
    check_same_tokens(policy, scorer, f"value_model={value_model}", model.model)
    share_batches(policy, scorer)
    if policy.row_multiple % scorer.row_multiple:
        raise UserError(
            f"value_model={value_model}: uses flex attention, which model={model.model} does not support; set "
            "--attn-implementation sdpa"
        )
    policy.companions.append(scorer)
    return ValueModel(scorer)


@torch.no_grad()
def values_of(critic: Critic, policy: Policy, batches: Sequence[Batch]) -> list[Tensor]:  # (N,) each
    """Values under the current weights, with dropout off."""
    owner = critic.scorer if isinstance(critic, ValueModel) else policy
    was_training = owner.model.training
    owner.model.eval()
    try:
        if isinstance(critic, ValueModel):
            return [critic(batch) for batch in batches]
        lm = causal_lm(policy.model)
        return [critic(predictor_states(policy, lm, batch)) for batch in batches]
    finally:
        owner.model.train(was_training)


# Numbers of trained tokens: packed in micro-batches, padded to one row per completion, or a list per id.


def pad_completions(
    completions: Sequence[Completion],
    batches: Sequence[Batch],  # these completions, packed
    packed: Sequence[Tensor],  # (N,) for each batch
) -> tuple[Tensor, Tensor]:  # (B, T) 0 where masked, and (B, T) bool: True = trained. In main memory
    lengths = [c.trained for c in completions]
    values: dict[int, Tensor] = {}
    for batch, column in zip(batches, packed, strict=True):
        values |= zip(batch.rows, column.cpu().split([lengths[row] for row in batch.rows]), strict=True)
    if not lengths:
        return torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)
    rows = pad_sequence([values[row] for row in range(len(lengths))], batch_first=True)
    return rows, torch.arange(rows.shape[1]) < torch.tensor(lengths).unsqueeze(1)


def scatter_to_ids(
    completions: Sequence[Completion],
    rows: Sequence[int],  # indices of the completions in `values`
    values: Tensor,  # (B, T) from pad_completions
) -> list[list[float]]:
    """For each completion one number per id; 0 for untrained ids and other completions."""
    numbers = [[0.0] * len(c.ids) for c in completions]
    for row, padded in zip(rows, values.tolist(), strict=True):
        mask = completions[row].mask or [True] * len(completions[row].ids)
        trained = (index for index, is_trained in enumerate(mask) if is_trained)
        for index, x in zip(trained, padded, strict=False):
            numbers[row][index] = x
    return numbers
