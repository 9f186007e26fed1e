"""The teacher of distillation: a model that computes log-probs of the student's tokens, in process or on a server.

    teacher = load_teacher(cfg, policy)          # a CrossTeacher if the vocabulary differs
    teacher.read_prompts(prompts)                # render the teacher's prompts, if they differ (--teacher-prompt)
    logps = teacher.logps(rollout.groups)        # for each completion one log-prob per id
    hidden = teacher.hidden(items)               # (N, Dt) last states before each trained token; in process only

Teacher and student may see different prompts; the ids of the completion are the same, so log-probs align by completion
token. In process, the teacher is frozen, in the compute dtype, and sharded if the policy is. `self` is the policy's
reference: its initial weights, or with LoRA the base without the adapter. Checkpoints do not contain the teacher, only
its name in config.yaml, unless --teacher-update-rate moves it.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data.chat import clean_messages, end_of_turn_id, render_prompt, stop_ids
from data.errors import UserError
from data.packing import Batch, Item
from data.types import Prompt
from data.user_code import describe_error, find_callable, where_raised
from kernels.linear_kl import Head
from rollout.engine import Completion, Group
from rollout.model_folder import resolve_model
from trainer.config.distill import OpdConfig
from trainer.policy.load import load_tokenizer
from trainer.policy.logps import Policy, as_reference, causal_lm, head_of, predictor_states, reference_logps
from trainer.policy.reference import load_frozen, named_as, values_of_items
from trainer.rl.minibatch import MiniBatch, policy_logps

UNFINISHED = "\ufffd"  # what a part of a character decodes to


def load_teacher(cfg: OpdConfig, policy: Policy) -> Teacher:
    """Load --teacher; self: the policy's initial weights."""
    if cfg.distill.teacher == "self":
        return Teacher(cfg, policy, policy)
    assert cfg.distill.teacher is not None
    with named_as("teacher"):
        is_same = check_vocabulary(cfg, policy.tokenizer)
    source = load_frozen("teacher", cfg.distill.teacher, cfg.model, policy, cfg.parallel, same_tokens=is_same)
    policy.companions.append(source)
    return (Teacher if is_same else CrossTeacher)(cfg, policy, dataclasses.replace(source, reference=source.model))


def check_vocabulary(cfg: OpdConfig, tokenizer: Any) -> bool:
    """Return whether student and teacher have the same ids for the same tokens; reads only the teacher's tokenizer.

    Raise if they differ and a setting needs the same ids.
    """
    name = cfg.distill.teacher
    assert name is not None
    settings = cfg.model.for_model(name, chat_template="tokenizer_default", chat_template_kwargs={})
    student, teacher = tokenizer.get_vocab(), load_tokenizer(resolve_model(name), settings).get_vocab()
    different = [token for token in {**student, **teacher} if student.get(token) != teacher.get(token)]
    needs_ids = {
        "jsd_beta": cfg.distill.jsd_beta is not None, "tools": bool(cfg.tools.tools),
        "rollout_func": cfg.tools.rollout_func is not None, "openenv.env": cfg.openenv.env is not None,
        "nemo_gym.multi_turn": cfg.nemo_gym.multi_turn, "verifiers.env": cfg.verifiers.env is not None,
    }  # fmt: skip
    setting = next((key for key, is_set in needs_ids.items() if is_set), None)
    if different and setting:
        token = min(different, key=lambda token: (student.get(token, len(student)), token))
        raise UserError(
            f"teacher={name}: its vocabulary ({len(teacher)} tokens) differs from that of model={cfg.model.model} "
            f"({len(student)}): {token!r} is {_id(teacher, token)} there and {_id(student, token)} here; use a teacher "
            f"with the same tokenizer, or remove {setting}, which needs the same ids"
        )
    return not different


def _id(vocab: Mapping[str, int], token: str) -> str:
    return f"id {vocab[token]}" if token in vocab else "unknown"


class TeacherPrompts(abc.ABC):
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

    def compare(self, groups: Sequence[Group]) -> tuple[list[list[float]], dict[str, list[list[float]]]]:
        """For each completion and id the teacher's log-prob to compare with, and columns that the loss needs."""
        return self.logps(groups), {}

    @abc.abstractmethod
    def logps(self, groups: Sequence[Group]) -> list[list[float]]: ...

    @abc.abstractmethod
    def close(self) -> None: ...

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

    def close(self) -> None:
        """Nothing to close in process."""

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
        return values_of_items(self.cfg.run, self.policy, items, of_batch, share_prompt=self.cfg.share_prompt)


class CrossTeacher(Teacher):
    """A teacher with another tokenizer: its tokens and the student's are compared by the text that they spell.

        student   4|2| apples|.|<end>        spans end where a token of both ends:   4 2|  apples|  .|  <end>
        teacher   42| app|les|.|<eos>        the ends of turns are a span too

    The alignment and the chain rule within a span are GOLD's (Patino et al. 2025, "Unlocking On-Policy Distillation for
    Any Model Family"; GOLDTrainer in TRL 1.16, which compares distributions over the vocabulary, not sampled text):

        log p(span) = sum over its tokens of log p(token | everything before it)

    The objective is opd's on spans. Every student token of a span s gets the advantage

        A = log teacher(s) - log student(s)

    which is teacher_logp - logp if the span is one token of both. The student's part is that of the current policy, so
    fill_spans runs a no-grad pass before each optimizer step, to know the other tokens of a span.
    """

    def __init__(self, cfg: OpdConfig, student: Policy, policy: Policy) -> None:
        super().__init__(cfg, student, policy)
        assert cfg.distill.teacher is not None
        settings = cfg.model.for_model(cfg.distill.teacher, chat_template="tokenizer_default", chat_template_kwargs={})
        self.student = student.tokenizer
        self.tokenizer = load_tokenizer(resolve_model(cfg.distill.teacher), settings)
        if not self.tokenizer.is_fast:
            raise UserError(
                f"teacher={cfg.distill.teacher}: needs a fast tokenizer, which gives the offsets of its tokens"
            )
        self.function = self.function or (lambda row: row["prompt"])  # always rendered: the ids differ
        self.ends = set(stop_ids(self.student, student.generation_eos))
        end = end_of_turn_id(self.tokenizer)
        self.end = self.tokenizer.eos_token_id if end is None else end

    def compare(self, groups: Sequence[Group]) -> tuple[list[list[float]], dict[str, list[list[float]]]]:
        """Return for each completion and id: log teacher(span of the id), and the number of the span."""
        pairs = [(group, c) for group in groups for c in group.completions]
        texts = [self._read(c) for _, c in pairs]
        items = []
        for (group, _), (ids, _, _) in zip(pairs, texts, strict=True):
            prompt = self._ids[group.row]
            items.append(Item([*prompt, *ids], [False] * len(prompt) + [True] * len(ids), len(prompt)))
            if self.context_length is not None and len(items[-1].ids) > self.context_length:
                raise UserError(
                    f"{group.prompt.source}: prompt and completion have {len(items[-1].ids)} tokens of the teacher, "
                    f"above its context of {self.context_length}; lower --max-completion-length"
                )
        logps: list[list[float]] = []
        spans: list[list[float]] = []
        for values, (_, teacher_ends, student_ends) in zip(self.item_logps(items), texts, strict=True):
            ours, theirs = align(student_ends, teacher_ends)
            total = [0.0] * (max([*ours, *theirs], default=-1) + 1)
            for span, logp in zip(theirs, values, strict=True):
                total[span] += logp
            logps.append([total[span] for span in ours])
            spans.append([float(span) for span in ours])
        return logps, {"span": spans}

    def _read(self, c: Completion) -> tuple[list[int], list[int], list[int | None]]:
        """Return the teacher's ids of a completion, and where each id of teacher and student ends in the text."""
        has_end = bool(c.ids) and c.ids[-1] in self.ends
        text, ends = token_ends(self.student, c.ids[: len(c.ids) - has_end])
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]
        offsets[-1:] = [len(text)] if ids else []  # a tokenizer may drop the end of the text
        if has_end:
            ids, offsets, ends = [*ids, self.end], [*offsets, len(text) + 1], [*ends, len(text) + 1]
        return ids, offsets, ends


def token_ends(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[int | None]]:
    """Return the text of the ids, and how much of it each id completes; None inside a character."""
    text, start, known = "", 0, 0
    ends: list[int | None] = []
    for index in range(1, len(ids) + 1):
        # Decoded with the tokens before: some tokenizers drop the space of the first token.
        before, now = (tokenizer.decode(ids[start:stop], skip_special_tokens=False) for stop in (known, index))
        if now.endswith(UNFINISHED) and index < len(ids):
            ends.append(None)
            continue
        text += now[len(before) :]
        ends.append(len(text))
        start, known = known, index
    return text, ends


def align(student: Sequence[int | None], teacher: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """Number the span of each token: a span ends where a token of both ends."""
    shared = sorted({end for end in student if end is not None} & {end for end in teacher if end is not None})

    def numbers(ends: Sequence[int | None]) -> list[int]:
        found: list[int] = []
        end: int | None = None
        for own_end in reversed(ends):
            end = end if own_end is None else own_end
            found.append(len(shared) if end is None else bisect_left(shared, end))
        return found[::-1]

    return numbers(student), numbers(teacher)


@torch.no_grad()
def fill_spans(cfg: OpdConfig, policy: Policy, batch: MiniBatch) -> None:
    """Return columns under the current weights: log-prob of the rest of each token's span, and 1 / its tokens."""
    logps = policy_logps(policy, batch.batches, temperature=cfg.temperature)
    for mb, now in zip(batch.micro_batches, logps, strict=True):
        keys = torch.stack([mb.batch.slot.to(mb.extra["span"]), mb.extra["span"]])  # (2, N)
        _, span = keys.unique(dim=1, return_inverse=True)
        total, count = (
            torch.zeros(len(span), dtype=now.logp.dtype, device=now.logp.device).index_add(0, span, x)[span]
            for x in (now.logp, torch.ones_like(now.logp))
        )
        mb.extra |= {"rest": total - now.logp, "share": 1 / count}
