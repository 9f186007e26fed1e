"""A user function that produces the completions, `--rollout-func my_module.fn`. Its signature decides the kind:

    def fn(prompts, trainer):                       # TRL: one call for all prompts, one entry per completion
        return {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...], "env_mask": [...], "score": [...]}

    def fn(model, processing_class, prompts, generation_config):        # the older kind, as in axolotl's documentation
        return ["a completion", ...]                # a prompt is a dict: `messages`, `prompt`, and the row's columns

    async def fn(client, prompt, seed):             # strop: one call per completion, all concurrent
        return await client.generate(prompt.ids, seed)      # a Completion, or a dict with one entry of the first kind

env_mask is 1 for tokens that the model sampled and 0 for other tokens. Default: all 1. Other keys become columns for
the rewards. The trainer computes missing logprobs. Texts are encoded once. The first two kinds run in the training
thread and block it; the third overlaps with training.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import torch

from data.chat import common_prefix, end_of_turn_id, render_completion, render_responses
from data.errors import UserError
from data.formats.fields import user_turn
from data.hints import some_rows
from data.types import Prompt
from data.user_code import describe_error, find_callable, where_raised
from rollout.engine import Completion, Request, Sampling, Source, finished
from rollout.engines.local import evaluating
from rollout.episodes.episode import Client, Episode, EpisodeSource
from rollout.episodes.turns import turn_seed

Kind = Literal["episode", "batch", "texts"]
SIGNATURES = (
    "def fn(prompts, trainer), def fn(model, processing_class, prompts, generation_config) or "
    "async def fn(client, prompt, seed)"
)
TOKENS = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "finish_reason")
RESERVED = ("prompt", "prompts", "completion", "completions")


class RolloutFunction:
    """The function that --rollout-func names, and its kind."""

    def __init__(self, spec: str) -> None:
        self.spec, self.label = spec, f"rollout_func={spec}"
        _, self.call = find_callable(spec, self.label)
        self.kind = kind_of(self.call, self.label)

    def source(self, engine: Any, sampling: Sampling, **settings: Any) -> Source:
        """Return a source that calls this function; `settings` are added to trainer.args."""
        if self.kind == "episode":
            return EpisodeSource(engine, sampling, self.episode())
        return FunctionSource(self, engine, sampling, settings)

    def episode(self) -> Episode:
        """Wrap the asynchronous kind to check its return value."""

        async def run(client: Client, prompt: Prompt, seed: int) -> Completion:
            try:
                returned = await self.call(client, prompt, seed)
            except (Exception, SystemExit) as error:  # user code may raise anything
                where = where_raised(error, self.call)
                raise UserError(f"{self.label}: {describe_error(error)} on {prompt.source}{where}") from None
            reader = RowReader(f"{self.label}, {prompt.source}", client.sampling, client.tokenizer)
            if isinstance(returned, Completion):
                return reader.completion(returned)
            if not isinstance(returned, dict):
                raise UserError(
                    f"{reader.label}: returned {type(returned).__name__}; return a Completion, or a dict with "
                    "completion_ids and logprobs"
                )
            if returned.get("logprobs") is None:
                raise UserError(
                    f"{reader.label}: no logprobs, which cannot be computed later because the weights may change; "
                    "return the logps from client.generate"
                )
            return reader.row({"prompt_ids": prompt.ids, **returned}, client.version)

        return run


def kind_of(call: Callable[..., Any], label: str) -> Kind:
    """Return the kind of the function's signature."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    names = [p.name for p in parameters]
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__):
        if len(required) == 3:
            return "episode"
    elif names[:3] == ["model", "processing_class", "prompts"] and set(required[3:]) <= {"generation_config"}:
        return "texts"
    elif names[:1] == ["prompts"] and len(names) >= 2 >= len(required):
        return "batch"
    raise UserError(f"{label}: unknown signature ({', '.join(names)}); use {SIGNATURES}")


class Trainer:
    """The `trainer` argument of TRL's kind, as far as strop supports it."""

    def __init__(self, engine: Any, sampling: Sampling, settings: dict[str, Any], seed: int) -> None:
        local = getattr(engine, "local", engine)  # every engine has an in-process engine
        self.engine, self.sampling = engine, sampling
        self.processing_class, self.model = local.tokenizer, local.model
        limits = {"max_completion_length": sampling.max_tokens, "temperature": sampling.temperature}
        self.args = SimpleNamespace(**limits, top_p=sampling.top_p, top_k=sampling.top_k, **settings)
        self.state = SimpleNamespace(global_step=engine.version)
        self.seeds = (turn_seed(seed, turn) for turn in range(1, 2**62))

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int | None = None) -> list[Completion]:
        """Sample completions with the run's engine; a resumed run uses the same seeds."""
        sampling = self.sampling if max_tokens is None else replace(self.sampling, max_tokens=max_tokens)
        return self.engine.generate([Request(prompt_ids=list(ids), seed=next(self.seeds)) for ids in prompts], sampling)


class FunctionSource:
    """Source that calls a synchronous function once for all requests."""

    def __init__(self, function: RolloutFunction, engine: Any, sampling: Sampling, settings: dict[str, Any]) -> None:
        self.function, self.engine, self.sampling, self.settings = function, engine, sampling, settings
        self.label, self.local = function.label, getattr(engine, "local", engine)

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        requests = [request for group in groups for request in group]
        if not requests:
            return [finished([]) for _ in groups]
        completions = iter(self._texts(requests) if self.function.kind == "texts" else self._rows(requests))
        return [finished([next(completions) for _ in group]) for group in groups]

    def close(self) -> None:
        """Nothing was started."""

    def _rows(self, requests: Sequence[Request]) -> list[Completion]:
        """TRL's kind: a dict of lists, one entry per prompt."""
        trainer = Trainer(self.engine, self.sampling, self.settings, requests[0].seed)
        returned = self._call(requests, [request.prompt.prompt for request in requests], trainer)
        if not isinstance(returned, dict):
            raise UserError(
                f"{self.label}: returned {type(returned).__name__}; return a dict of lists with prompt_ids, "
                "completion_ids and logprobs"
            )
        for name in ("prompt_ids", "completion_ids"):
            if name not in returned:
                raise UserError(f"{self.label}: returned {', '.join(map(str, returned))}, but no {name!r}")
        columns = {name: _as_list(self.label, name, value, len(requests)) for name, value in returned.items()}
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(requests))]
        version = self.engine.version
        completions = [self._reader(request).row(row, version) for request, row in zip(requests, rows, strict=True)]
        return self._fill_logps(completions, [row.get("logprobs") is None for row in rows])

    def _texts(self, requests: Sequence[Request]) -> list[Completion]:
        """The older kind: a list of strings, encoded here."""
        arguments = {
            "model": self.local.model,
            "processing_class": _with_axolotl_argument(self.local.tokenizer),
            "prompts": [_as_dict(request.prompt) for request in requests],
            "generation_config": self._generation_config(),
        }
        names = inspect.signature(self.function.call).parameters
        returned = self._call(requests, **{name: value for name, value in arguments.items() if name in names})
        texts = _as_list(self.label, "list of completions", returned, len(requests))
        completions = []
        for request, text in zip(requests, texts, strict=True):
            if not isinstance(text, str):
                raise UserError(f"{self.label}: returned {text!r:.60} for {request.prompt.source}; return a string")
            completions.append(self._reader(request).text(request.prompt, text, self.engine.version))
        return self._fill_logps(completions, [True] * len(completions))

    def _fill_logps(self, completions: list[Completion], is_missing: Sequence[bool]) -> list[Completion]:
        """Compute missing log-probs with the trainer's model at the run's temperature."""
        sequences = [(c.prompt_ids, c.ids) for c, missing in zip(completions, is_missing, strict=True) if missing]
        logps = iter(self.local.logps(sequences, self.sampling.temperature) if sequences else ())
        return [_masked(c, next(logps)) if missing else c for c, missing in zip(completions, is_missing, strict=True)]

    def _call(self, requests: Sequence[Request], *args: Any, **kwargs: Any) -> Any:
        call = self.function.call
        try:
            with _evaluation_mode(self.local.model, requests[0].seed):
                return call(*args, **kwargs)
        except (Exception, SystemExit) as error:  # user code may raise anything
            rows = some_rows(request.prompt.source for request in requests)
            raise UserError(f"{self.label}: {describe_error(error)} on {rows}{where_raised(error, call)}") from None

    def _reader(self, request: Request) -> RowReader:
        return RowReader(f"{self.label}, {request.prompt.source}", self.sampling, self.local.tokenizer)

    def _generation_config(self) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig(
            max_new_tokens=self.sampling.max_tokens,
            do_sample=self.sampling.temperature > 0,
            temperature=self.sampling.temperature or 1.0,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            eos_token_id=list(self.sampling.stop_ids) or None,
            pad_token_id=self.local.tokenizer.pad_token_id,
        )


class RowReader:
    """Converts a user function's return value for one row to a Completion; errors name the row."""

    def __init__(self, label: str, sampling: Sampling, tokenizer: Any) -> None:
        self.label, self.sampling, self.tokenizer = label, sampling, tokenizer

    def row(self, row: dict[str, Any], version: int) -> Completion:
        prompt_ids, ids = self._ids(row, "prompt_ids"), self._ids(row, "completion_ids")
        logps = None if row.get("logprobs") is None else _plain(row["logprobs"])
        mask = None if row.get("env_mask") is None else _plain(row["env_mask"])
        if mask is not None and (not isinstance(mask, list) or any(flag not in (0, 1) for flag in mask)):
            raise UserError(f"{self.label}: env_mask is not a list of 0 and 1; set 1 for sampled tokens")
        mask = None if mask is None else [bool(flag) for flag in mask]
        sampled = ids if mask is None else [token for token, flag in zip(ids, mask, strict=False) if flag]
        columns = {name: value for name, value in row.items() if name not in TOKENS}
        return self.completion(
            Completion(
                prompt_ids=prompt_ids,
                ids=ids,
                logps=[0.0] * len(ids) if logps is None else logps,
                finish_reason=row.get("finish_reason") or self._finish_reason(ids, mask),
                text=self._decode(ids),
                versions=[(version, len(sampled))],
                mask=mask,
                columns=columns,
            )
        )

    def text(self, prompt: Prompt, text: str, version: int) -> Completion:
        """Encode a string together with its prompt, append the end token, and truncate to max_tokens."""
        try:
            if isinstance(prompt.prompt, str):
                ids, start = render_completion(self.tokenizer, prompt.prompt, text)
                ids = ids + [self.tokenizer.eos_token_id] * (self.tokenizer.eos_token_id is not None)
            else:
                turn = [{"role": "assistant", "content": text}]
                head, (ids,) = render_responses(self.tokenizer, prompt.prompt, [turn], settings=prompt.settings)
                start = common_prefix(head, ids)
        except ValueError as error:
            raise UserError(f"{self.label}: {error}") from None
        completion_ids = ids[start : start + self.sampling.max_tokens]
        fits = len(ids) - start <= self.sampling.max_tokens
        return self.completion(
            Completion(
                prompt_ids=ids[:start],
                ids=completion_ids,
                logps=[0.0] * len(completion_ids),
                finish_reason="stop" if fits else "length",
                text=text if fits else self._decode(completion_ids),
                versions=[(version, len(completion_ids))],
                columns={"retokenised": 1.0},
            )
        )

    def completion(self, completion: Completion) -> Completion:
        """Raise for values that would fail later, when the row is no longer known."""
        ids, logps, mask = completion.ids, completion.logps, completion.mask
        if not ids:
            raise UserError(f"{self.label}: the completion has no tokens; return at least the end token")
        if len(ids) > self.sampling.max_tokens:
            raise UserError(
                f"{self.label}: {len(ids)} completion_ids exceed max_completion_length={self.sampling.max_tokens}; "
                "truncate them or raise --max-completion-length"
            )
        if not isinstance(logps, list) or not all(isinstance(x, float | int) and math.isfinite(x) for x in logps):
            raise UserError(f"{self.label}: logprobs is not a list of finite numbers; return one per token")
        for name, values in (("logprobs", logps), ("env_mask", ids if mask is None else mask)):
            if len(values) != len(ids):
                raise UserError(f"{self.label}: {len(values)} {name} for {len(ids)} completion_ids; return one each")
        if completion.finish_reason not in ("stop", "length"):
            raise UserError(f"{self.label}: finish_reason={completion.finish_reason!r}: must be 'stop' or 'length'")
        bad = [name for name in completion.columns if not isinstance(name, str) or name in RESERVED]
        if bad:
            raise UserError(f"{self.label}: the column name {bad[0]!r} is reserved for rewards; rename the column")
        return _masked(completion, logps)

    def _ids(self, row: dict[str, Any], name: str) -> list[int]:
        ids = _plain(row[name]) if name in row else None
        if not isinstance(ids, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in ids):
            raise UserError(f"{self.label}: {name}={_shown(row.get(name))}: not a list of token ids")
        outside = [x for x in ids if not 0 <= x < len(self.tokenizer)]
        if outside:
            size = len(self.tokenizer)
            raise UserError(f"{self.label}: {name} contains {outside[0]}, but the tokenizer has {size} tokens")
        return ids

    def _finish_reason(self, ids: list[int], mask: list[bool] | None) -> Literal["stop", "length"]:
        """Return stop if the last token ends a turn or was not sampled; otherwise the completion is truncated."""
        stops = {*self.sampling.stop_ids, self.tokenizer.eos_token_id, end_of_turn_id(self.tokenizer)}
        ended = bool(ids) and (ids[-1] in stops or (mask is not None and len(mask) == len(ids) and not mask[-1]))
        return "stop" if ended or self._decode(ids).endswith(self.sampling.stop or ("\0",)) else "length"

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _masked(completion: Completion, logps: Sequence[float]) -> Completion:
    """Set these log-probs, with 0 for tokens that the model did not sample."""
    mask = completion.mask or [True] * len(completion.ids)
    return replace(completion, logps=[float(x) if flag else 0.0 for x, flag in zip(logps, mask, strict=True)])


def _as_dict(prompt: Prompt) -> dict[str, Any]:
    messages = user_turn(prompt.prompt) if isinstance(prompt.prompt, str) else prompt.prompt
    return {**prompt.columns, "prompt": prompt.prompt, "messages": [dict(message) for message in messages]}


def _with_axolotl_argument(tokenizer: Any) -> Any:
    """Return a copy whose apply_chat_template accepts `processing_class` for `tokenize`, as in axolotl's example."""

    def apply_chat_template(*args: Any, processing_class: bool | None = None, **kwargs: Any) -> Any:
        options = {} if processing_class is None else {"tokenize": processing_class}
        return tokenizer.apply_chat_template(*args, **options, **kwargs)

    wrapped = copy.copy(tokenizer)
    wrapped.apply_chat_template = apply_chat_template
    return wrapped


def _as_list(label: str, name: str, value: Any, count: int) -> list[Any]:
    value = _plain(value)
    if value is None and name in ("logprobs", "env_mask"):
        return [None] * count
    if not isinstance(value, list) or len(value) != count:
        raise UserError(f"{label}: {name}={_shown(value)}: must be a list with one entry per prompt ({count})")
    return value


def _plain(value: Any) -> Any:
    """Convert numpy arrays, tensors and tuples to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else f"{value!r:.60}"


@contextmanager
def _evaluation_mode(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Run the model in evaluation mode, uncompiled, with no gradients and with a seed that a resumed run repeats."""
    device = next(model.parameters()).device
    with evaluating(model, None), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        yield
