"""The teacher of distillation: another model that scores the student's tokens, in this process or on a server.

    teacher = open_teacher(cfg, policy)          # refuses another vocabulary
    teacher.read_prompts(prompts)                # those it sees, if not the student's (teacher_prompt)
    logps = teacher.logps(batch.groups)          # for each completion a log-prob for each of its ids
    hidden = teacher.hidden(items)               # (N, Dt) last states before each trained token; in this process only

Teacher and student may see different prompts; the ids of the completion are the same, so what the teacher says is
aligned by completion token. In this process the teacher is frozen, held in compute_dtype, and sharded if the policy is;
`self` is the policy's reference: its starting weights, or with LoRA the base without its adapter. A server is a plain
vLLM, asked for prompt_logprobs by /v1/completions. No teacher is part of a checkpoint: its name is in config.yaml.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
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
from rollout.servers.client import ConnectError, HttpClient, error_text, read_scores
from rollout.servers.loop import Loop, together
from rollout.servers.model_folder import resolve_model
from rollout.servers.token import find_token
from trainer.policy.load import load_tokenizer
from trainer.policy.logps import Policy, as_reference, causal_lm, head_of, predictor_states, reference_logps
from trainer.policy.reference import load_frozen, named_as
from trainer.policy.sharding import to_device_and_pad

AT_ONCE = 64  # requests to a server
ATTEMPTS = 3
PAUSE_S = 1.0  # before the second attempt; twice that before the third
TIMEOUT_S = 240.0
PROBES = (
    "The quick brown fox, 3.14 x 10^-5; ok?",
    "def f(x):\n    return {'a': [x ** 2]}\n\n",
    "Caf\u00e9 na\u00efve \u4f60\u597d \u0437\u0434\u0440\u0430\u0432 \U0001f600 $\\frac{1}{2}$",
)


def open_teacher(cfg: Any, policy: Policy) -> Teacher | TeacherServer:
    """The teacher that --teacher or --teacher-url names."""
    if cfg.distill.teacher_url is not None:
        return TeacherServer(cfg, policy)
    if cfg.distill.teacher == "self":
        return Teacher(cfg, policy, policy)
    with named_as("teacher"):
        check_vocabulary(cfg, policy.tokenizer)
        source = load_frozen("teacher", cfg.distill.teacher, cfg.model, policy, cfg.parallel)
    policy.companions.append(source)
    return Teacher(cfg, policy, dataclasses.replace(source, reference=source.model))


def check_vocabulary(cfg: Any, tokenizer: Any) -> None:
    """Student and teacher must give the same ids to the same tokens; this reads only the teacher's tokenizer."""
    name = cfg.distill.teacher
    own = dataclasses.replace(cfg.model, model=name, chat_template="tokenizer_default", chat_template_kwargs={})
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(resolve_model(name), own).get_vocab()
    different = [token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)]
    if different:
        token = min(different, key=lambda token: (ours.get(token, len(ours)), token))
        raise UserError(
            f"teacher={name}: its vocabulary of {len(theirs)} tokens is not that of model={cfg.model.model} with "
            f"{len(ours)}: {token!r} is {_id(theirs, token)} there and {_id(ours, token)} here; take a teacher with "
            "the same tokenizer"
        )


def _id(vocab: Mapping[str, int], token: str) -> str:
    return f"id {vocab[token]}" if token in vocab else "unknown"


class TeacherPrompts:
    """The prompts that a teacher sees: those of the student, or what the user's function makes of each row."""

    def __init__(self, cfg: Any, policy: Policy, context_length: int | None) -> None:
        self.cfg, self.tokenizer, self.context_length = cfg, policy.tokenizer, context_length
        self.label = f"teacher_prompt={cfg.distill.teacher_prompt}"
        self.function: Callable[[dict[str, Any]], Any] | None = None
        if cfg.distill.teacher_prompt is not None:
            self.function = find_callable(cfg.distill.teacher_prompt, self.label)[1]
        self._ids: list[list[int]] = []  # by row

    def read_prompts(self, prompts: Sequence[Prompt]) -> None:
        """All of them before the run begins: what fails on one of them does so at once."""
        if self.function is not None:
            self._ids = [self._of_row(prompt) for prompt in prompts]
        longest, context = self.cfg.max_completion_length, self.context_length
        for row, prompt in enumerate(prompts if context is not None else ()):
            size = len(prompt.ids if self.function is None else self._ids[row])
            if size + longest > context:
                raise UserError(
                    f"{prompt.source}: the teacher's prompt of {size} tokens and max_completion_length={longest} do "
                    f"not fit its context of {context}; shorten either, or leave long prompts out with "
                    "--max-prompt-length"
                )

    def of(self, row: int, completion: Completion) -> list[int]:
        return completion.prompt_ids if self.function is None else self._ids[row]

    def items(self, groups: Sequence[Group]) -> list[Item]:
        """One for each completion: the teacher's prompt, followed by the student's ids."""
        items = []
        for group in groups:
            for c in group.completions:
                prompt = self.of(group.row, c)
                mask = [False] * len(prompt) + (c.mask or [True] * len(c.ids))
                items.append(Item([*prompt, *c.ids], mask, len(prompt)))
        return items

    def close(self) -> None:
        """A model in this process has nothing to close."""

    def _of_row(self, prompt: Prompt) -> list[int]:
        row = {**copy.deepcopy(prompt.columns), "prompt": copy.deepcopy(prompt.prompt)}
        try:
            made = self.function(row)
        except Exception as error:  # the user's code may raise anything
            where = where_raised(error, self.function)
            form = "text" if isinstance(prompt.prompt, str) else "a list of messages"
            raise UserError(
                f"{self.label}: failed on {prompt.source} ({describe_error(error)}{where}); fix it: row['prompt'] is "
                f"{form}, and the other keys are {', '.join(sorted(prompt.columns)) or 'none'}"
            ) from None
        is_messages = isinstance(made, list) and bool(made) and all(isinstance(turn, Mapping) for turn in made)
        if not is_messages and not (isinstance(made, str) and made.strip()):
            shown = type(made).__name__ if made else f"empty {type(made).__name__}"
            raise UserError(
                f"{self.label}: returned {shown} for {prompt.source}; it must return a prompt, as text or as a list of "
                "messages"
            )
        try:
            made = clean_messages(made) if is_messages else made
            settings = prompt.settings or self.cfg.model.chat_template_kwargs
            ids = render_prompt(self.tokenizer, made, self.cfg.model.system_prompt, settings)
        except ValueError as error:
            raise UserError(f"{self.label}: what it returned for {prompt.source} is no prompt: {error}") from None
        return ids


class Teacher(TeacherPrompts):
    """A teacher in this process: the reference of `policy`, which is the student's for teacher=self."""

    def __init__(self, cfg: Any, student: Policy, policy: Policy) -> None:
        super().__init__(cfg, student, policy.context_length)
        self.policy = policy

    def logps(self, groups: Sequence[Group]) -> list[list[float]]:
        """For each completion a log-prob for each id, 0 where the id is not the student's own."""

        def of_batch(batch: Batch) -> Tensor:
            return reference_logps(self.policy, batch, temperature=self.cfg.temperature).cpu()

        items = self.items(groups)
        found = []
        for item, own in zip(items, self._passes(items, of_batch), strict=True):
            numbers = iter(own.tolist())
            found.append([next(numbers) if trained else 0.0 for trained in item.mask[item.prompt_length :]])
        return found

    @torch.no_grad()
    def hidden(self, items: Sequence[Item]) -> Tensor:  # (N, Dt)
        """States that predict the trained tokens of the items, one item after the other."""

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
        """What of_batch says of the trained tokens of each item. All ranks call this together."""
        run = self.cfg.run
        batches = make_batches(
            items, max_tokens=run.max_tokens_per_micro_batch, packing=run.packing,
            share_prompt=self.cfg.share_prompt, multiple=self.policy.row_multiple, one_row=self.policy.packs_one_row,
        )  # fmt: skip
        found: dict[int, Tensor] = {}
        for batch in to_device_and_pad(self.policy, batches):
            own = of_batch(batch).split([sum(items[row].mask) for row in batch.rows])
            found |= zip(batch.rows, own, strict=True)
        return [found[row] for row in range(len(items))]


class TeacherServer(TeacherPrompts):
    """A vLLM server that scores given tokens at temperature 1."""

    def __init__(self, cfg: Any, policy: Policy) -> None:
        self.url = cfg.distill.teacher_url.rstrip("/")
        self._http = HttpClient(self.url, find_token(self.url))
        self._loop = Loop("teacher")
        self._gate = asyncio.Semaphore(AT_ONCE)
        try:
            self.model, length = self._loop.run(self._served())
            super().__init__(cfg, policy, length and length - 1)  # it must sample one token, too
            self._loop.run(self._check_tokens(cfg.model.model))
        except BaseException:
            self.close()
            raise

    def logps(self, groups: Sequence[Group]) -> list[list[float]]:
        """For each completion a log-prob for each id."""
        sequences = [self.of(group.row, c) + c.ids for group in groups for c in group.completions]
        scores = self._loop.run(together([self._score(ids) for ids in sequences]))
        completions = [c for group in groups for c in group.completions]
        return [own[len(own) - len(c.ids) :] for own, c in zip(scores, completions, strict=True)]

    async def _score(self, ids: list[int]) -> list[float]:  # of ids[1:]
        request = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        async with self._gate:
            reply = await self._ask("POST", "/v1/completions", request)
        try:
            return read_scores(reply["choices"][0], ids)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"teacher_url={self.url}: its reply has no log-probs of the tokens sent ({error})"
            ) from None

    async def _served(self) -> tuple[str, int | None]:
        """Name and context of the model it serves."""
        reply = await self._ask("GET", "/v1/models")
        try:
            first = reply["data"][0]
            return str(first["id"]), first.get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f"teacher_url={self.url}: /v1/models names no model; it must be a vLLM server") from None

    async def _check_tokens(self, student: str) -> None:
        """The server must know the student's last token, and give texts the same ids."""
        last = max(self.tokenizer.get_vocab().values())
        await self._score([last, last])
        for text in PROBES:
            ours = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            request = {"model": self.model, "prompt": text, "add_special_tokens": False}
            reply = await self._ask("POST", "/tokenize", request, may_lack=True)
            theirs = ours if reply is None else reply.get("tokens")
            if theirs != ours:
                raise UserError(
                    f"teacher_url={self.url}: its tokenizer gives {text!r} other ids than that of model={student} "
                    f"({theirs} there, {ours} here); serve a teacher with the same tokenizer"
                )

    async def _ask(self, method: str, path: str, request: Any = None, *, may_lack: bool = False) -> Any:
        """The reply, after some attempts where the server fails; what it refuses is refused at once."""
        body = b"" if request is None else json.dumps(request).encode()
        reason = ""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(PAUSE_S * attempt)
            try:
                status, reply = await self._http.send(method, path, body, timeout=TIMEOUT_S, reuse=True)
            except ConnectError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no answer within {TIMEOUT_S:g} s"
            except (OSError, EOFError, ValueError) as error:
                reason = describe_error(error)
            else:
                if status == 404 and may_lack:
                    return None
                if status == 401:
                    raise UserError(f"teacher_url={self.url}: needs another token; set STROP_VLLM_TOKEN to its API key")
                if 400 <= status < 500:
                    raise UserError(f"teacher_url={self.url}: refuses {path} ({status}: {error_text(reply)})")
                if status == 200:
                    return self._decoded(reply, path)
                reason = f"status {status}: {error_text(reply)}"
        raise UserError(
            f"teacher_url={self.url}: {path} failed {ATTEMPTS} times, the last with: {reason}; check that the server "
            "runs at this address; a run that has begun continues with --resume"
        )

    def _decoded(self, reply: bytes, path: str) -> Any:
        try:
            return json.loads(reply)
        except ValueError:
            raise UserError(f"teacher_url={self.url}: {path} answers with something that is not JSON") from None

    def close(self) -> None:
        self._http.close()
        self._loop.close()
