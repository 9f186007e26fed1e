"""Call GRPO's policy_loss on a few packed tokens: the code that training runs, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from losses.importance import sequence_length, sequence_mean, sequence_sum
from losses.policy import POLICY_LOSSES
from losses.types import Metrics
from trainer.config.policy import PolicyLossConfig
from trainer.methods.grpo import PolicyLossFunction, policy_loss, step_divisor
from trainer.rl.minibatch import MicroBatch

MAX_LENGTH = 4


class Tokens:
    """Trained tokens of some completions. `weight` is the correction for the gap to the engine; None: off."""

    def __init__(
        self,
        logp: Tensor,  # (N,)
        old: Tensor,  # (N,)
        advantage: Tensor,  # (N,)
        sequence: Tensor | None = None,  # (N,) completion of each token; None: one token each
        *,
        weight: Tensor | None = None,  # (N,)
        ref: Tensor | None = None,  # (N,)
        entropy: Tensor | None = None,  # (N,)
        keep_entropy: Tensor | None = None,  # (N,) bool
        total_log_ratio: Tensor | None = None,  # (N,) instead of the sum of logp - old over the completion
    ) -> None:
        self.logp = logp.clone().requires_grad_()
        self.old, self.advantage, self.weight, self.ref = old, advantage, weight, ref
        self.sequence = torch.arange(len(logp)) if sequence is None else sequence
        self.entropy = torch.zeros_like(logp) if entropy is None else entropy
        self.keep_entropy, self.total_log_ratio = keep_entropy, total_log_ratio

    def micro_batch(self, logp: Tensor) -> MicroBatch:
        size, moved = int(self.sequence.max()) + 1 if len(self.sequence) else 0, (logp - self.old).detach()
        length = sequence_length(self.sequence, num_sequences=size)[self.sequence]
        mean, total = (f(moved, self.sequence, num_sequences=size) for f in (sequence_mean, sequence_sum))
        mb = MicroBatch(
            SimpleNamespace(target=logp), is_idle=False, advantage=self.advantage, length=length,
            engine_logp=self.old, old_logp=self.old, ref_logp=self.ref,
            engine_gap=None if self.weight is None else self.weight.log(), keep_entropy=self.keep_entropy,
        )  # fmt: skip
        mb.mean_log_ratio = mean[self.sequence]
        mb.total_log_ratio = total[self.sequence] if self.total_log_ratio is None else self.total_log_ratio
        return mb

    def loss(
        self,
        name: str,
        *,
        level: str = "token",
        rows: Tensor | slice = slice(None),
        logp: Tensor | None = None,
        entropy_coef: float = 0.0,
        divide: bool = True,
        function: PolicyLossFunction = policy_loss,
        **options: Any,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of the tokens `rows` of one step, which has no others."""
        logp = self.logp if logp is None else logp
        mb = self.micro_batch(logp.detach() if len(logp) == len(self.old) else self.logp.detach())
        index = torch.arange(len(self.old))[rows]
        t = mb.at(index)
        t.logp, t.entropy = (logp[index] if len(logp) == len(self.old) else logp), self.entropy[index]
        cfg, batch = config(name, level, self.weight is not None, options), self.step(entropy_coef)
        divisor = step_divisor(cfg, batch) if divide else torch.ones(())
        return function(cfg, t, batch, divisor)

    def step(self, entropy_coef: float = 0.0) -> Any:
        """The counts of a MiniBatch with these tokens."""
        kept = len(self.old) if self.keep_entropy is None else int(self.keep_entropy.sum())
        counts = {"num_tokens": len(self.old), "num_completions": len(self.sequence.unique()), "num_micro_batches": 1}
        return SimpleNamespace(
            **{name: torch.tensor(float(x)) for name, x in counts.items()}, num_uncertain=torch.tensor(kept),
            entropy_coef=entropy_coef,
        )  # fmt: skip

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.logp, materialize_grads=True)[0]


def config(name: str, level: str, is_weighted: bool, options: dict[str, Any]) -> Any:
    """The settings that policy_loss reads; options that only other losses read are dropped."""
    known = {key: x for key, x in options.items() if key not in CLIP_OPTIONS or key in POLICY_LOSSES[name].options}
    flags = {key: x for key, x in known.items() if key in PolicyLossConfig.__dataclass_fields__}
    kwargs = {key: x for key, x in known.items() if key not in flags}
    loss = PolicyLossConfig(loss_type=name, loss_kwargs=kwargs, **flags)
    object.__setattr__(loss, "importance_sampling_level", level)
    correction = SimpleNamespace(is_on=is_weighted, bounds=(None, 1e30), drops=False)
    return SimpleNamespace(policy_loss=loss, correction=correction, max_completion_length=MAX_LENGTH)


CLIP_OPTIONS = ("epsilon", "epsilon_high", "delta", "dual_clip")
