"""The teacher of distillation: a model that computes log-probs of the student's tokens, in process or on a server.

    teacher = load_teacher(cfg, policy)          # raises if the vocabulary differs
    teacher.read_prompts(prompts)                # render the teacher's prompts, if they differ (--teacher-prompt)
    logps = teacher.logps(rollout.groups)        # for each completion one log-prob per id
    hidden = teacher.hidden(items)               # (N, Dt) last states before each trained token; in process only

Teacher and student may see different prompts; the ids of the completion are the same, so log-probs align by completion
token. In process, the teacher is frozen, in the compute dtype, and sharded if the policy is. `self` is the policy's
reference: its initial weights, or with LoRA the base without the adapter. Checkpoints do not contain the teacher, only
its name in config.yaml, unless --teacher-update-rate moves it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data.chat import clean_messages, render_prompt
from data.errors import UserError
from data.packing import Batch, Item, make_batches
from data.types import Prompt
from data.user_code import describe_error, find_callable, where_raised
from kernels.linear_kl import Head
from rollout.engine import Completion, Group
from rollout.model_folder import resolve_model
from trainer.config.distill import OpdConfig
from trainer.policy.load import load_tokenizer
from trainer.policy.logps import Policy, as_reference, causal_lm, head_of, predictor_states, reference_logps
from trainer.policy.reference import load_frozen, named_as
from trainer.policy.sharding import to_device_and_pad


def load_teacher(cfg: OpdConfig, policy: Policy) -> Teacher:
    """Load --teacher; self: the policy's initial weights."""
    if cfg.distill.teacher == "self":
        return Teacher(cfg, policy, policy)
    assert cfg.distill.teacher is not None
    with named_as("teacher"):
        check_vocabulary(cfg, policy.tokenizer)
    source = load_frozen("teacher", cfg.distill.teacher, cfg.model, policy, cfg.parallel)
    policy.companions.append(source)
    return Teacher(cfg, policy, dataclasses.replace(source, reference=source.model))


def check_vocabulary(cfg: OpdConfig, tokenizer: Any) -> None:
    """Raise unless student and teacher have the same ids for the same tokens; reads only the teacher's tokenizer."""
    name = cfg.distill.teacher
    assert name is not None
    settings = cfg.model.for_model(name, chat_template="tokenizer_default", chat_template_kwargs={})
    student, teacher = tokenizer.get_vocab(), load_tokenizer(resolve_model(name), settings).get_vocab()
    different = [token for token in {**student, **teacher} if student.get(token) != teacher.get(token)]
    if different:
        token = min(different, key=lambda token: (student.get(token, len(student)), token))
        raise UserError(
            f"teacher={name}: its vocabulary ({len(teacher)} tokens) differs from that of model={cfg.model.model} "
            f"({len(student)}): {token!r} is {_id(teacher, token)} there and {_id(student, token)} here; use a teacher "
            "with the same tokenizer"
        )


def _id(vocab: Mapping[str, int], token: str) -> str:
    return f"id {vocab[token]}" if token in vocab else "unknown"


class TeacherPrompts:
    """The teacher's prompts: the student's, or what --teacher-prompt returns for each row."""

    def __init__(self, cfg: OpdConfig, policy: Policy, context_length: int | None) -> None:
        self.cfg, self.tokenizer, self.context_length = cfg, policy.tokenizer, context_length
        self.label = f"teacher_prompt={cfg.distill.teacher_prompt}"
        self.function: Callable[[dict[str, Any]], Any] | None = None
        if cfg.distill.teacher_prompt is not None:
            self.function = find_callable(cfg.distill.teacher_prompt, self.label)[1]
        self._ids: list[list[int]] = []  # by row

    def read_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Render all prompts up front, so that errors surface before training."""
        if self.function is not None:
            self._ids = [self._of_row(prompt) for prompt in prompts]
        longest, context = self.cfg.max_completion_length, self.context_length
        if context is None:
            return
        for row, prompt in enumerate(prompts):
            size = len(prompt.ids if self.function is None else self._ids[row])
            if size + longest > context:
                raise UserError(
                    f"{prompt.source}: {size} tokens of the teacher's prompt + max_completion_length={longest} exceed "
                    f"its context of {context}; lower --max-completion-length, or skip long prompts with "
                    "--max-prompt-length"
                )

    def of(self, row: int, completion: Completion) -> list[int]:
        return completion.prompt_ids if self.function is None else self._ids[row]

    def items(self, groups: Sequence[Group]) -> list[Item]:
        """One item per completion: the teacher's prompt, then the student's ids."""
        items = []
        for group in groups:
            for c in group.completions:
                prompt = self.of(group.row, c)
                mask = [False] * len(prompt) + (c.mask or [True] * len(c.ids))
                items.append(Item([*prompt, *c.ids], mask, len(prompt)))
        return items

    def close(self) -> None:
        """Nothing to close in process."""

    def _of_row(self, prompt: Prompt, **more: Any) -> list[int]:
        assert self.function is not None
        row = {**copy.deepcopy(prompt.columns), **more, "prompt": copy.deepcopy(prompt.prompt)}
        try:
            answer = self.function(row)
        except Exception as error:  # the user's code may raise anything
            where = where_raised(error, self.function)
            form = "text" if isinstance(prompt.prompt, str) else "a list of messages"
            raise UserError(
                f"{self.label}: failed on {prompt.source} ({describe_error(error)}{where}); row['prompt'] is "
                f"{form}, the other keys are {', '.join(sorted(prompt.columns)) or 'none'}"
            ) from None
        is_messages = isinstance(answer, list) and bool(answer) and all(isinstance(turn, Mapping) for turn in answer)
        if not is_messages and not (isinstance(answer, str) and answer.strip()):
            shown = type(answer).__name__ if answer else f"empty {type(answer).__name__}"
            raise UserError(
                f"{self.label}: returned {shown} for {prompt.source}; return a prompt, as text or a list of messages"
            )
        try:
            answer = clean_messages(answer) if is_messages else answer
            settings = prompt.settings or self.cfg.model.chat_template_kwargs
            ids = render_prompt(self.tokenizer, answer, self.cfg.model.system_prompt, settings)
        except ValueError as error:
            raise UserError(f"{self.label}: returned an invalid prompt for {prompt.source}: {error}") from None
        return ids


class Teacher(TeacherPrompts):
    """A teacher in process: the reference of `policy`, which is the student for teacher=self."""

    def __init__(self, cfg: OpdConfig, student: Policy, policy: Policy) -> None:
        super().__init__(cfg, student, policy.context_length)
        self.policy = policy

    def logps(self, groups: Sequence[Group]) -> list[list[float]]:
        """For each completion one log-prob per id; 0 for ids that the student did not sample."""
        return self.item_logps(self.items(groups))

    def item_logps(self, items: Sequence[Item]) -> list[list[float]]:
        def of_batch(batch: Batch) -> Tensor:
            return reference_logps(self.policy, batch, temperature=self.cfg.temperature).cpu()

        logps = []
        for item, trained in zip(items, self._passes(items, of_batch), strict=True):
            numbers = iter(trained.tolist())
            logps.append([next(numbers) if is_trained else 0.0 for is_trained in item.mask[item.prompt_length :]])
        return logps

    @torch.no_grad()
    def hidden(self, items: Sequence[Item]) -> Tensor:  # (N, Dt)
        """States that predict the trained tokens of the items, in item order."""

        def of_batch(batch: Batch) -> Tensor:
            with as_reference(self.policy) as model:
                return predictor_states(self.policy, causal_lm(model), batch)

        with as_reference(self.policy) as model:
            width = causal_lm(model).get_output_embeddings().weight.shape[1]
        none = torch.zeros(0, width, device=self.policy.device, dtype=self.policy.compute_dtype)
        return torch.cat([none, *self._passes(items, of_batch)])

    @torch.no_grad()
    def head(self) -> Head:
        with as_reference(self.policy) as model:
            return Head(**head_of(causal_lm(model)))

    def _passes(self, items: Sequence[Item], of_batch: Callable[[Batch], Tensor]) -> list[Tensor]:
        """of_batch of the trained tokens of each item. All ranks call this together."""
        run = self.cfg.run
        batches = make_batches(
            items, max_tokens=run.max_tokens_per_micro_batch,
            **self.policy.layout(packing=run.packing, share_prompt=self.cfg.share_prompt),
        )  # fmt: skip
        by_item: dict[int, Tensor] = {}
        for batch in to_device_and_pad(self.policy, batches):
            columns = of_batch(batch).split([sum(items[row].mask) for row in batch.rows])
            by_item |= zip(batch.rows, columns, strict=True)
        return [by_item[row] for row in range(len(items))]
