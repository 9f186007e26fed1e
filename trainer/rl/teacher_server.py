"""A vLLM server as the teacher of distillation (--teacher-url), asked for prompt_logprobs by /v1/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from data.errors import UserError
from data.user_code import describe_error
from rollout.engine import Group
from rollout.servers.client import ConnectError, HttpClient, error_text, read_scores
from rollout.servers.loop import Loop, together
from rollout.servers.token import find_token
from trainer.config.distill import OpdConfig
from trainer.policy.logps import Policy
from trainer.rl.teacher import TeacherPrompts

MAX_REQUESTS = 64  # concurrent
ATTEMPTS = 3
PAUSE_S = 1.0  # before the second attempt; twice that before the third
TIMEOUT_S = 240.0
PROBES = (
    "The quick brown fox, 3.14 x 10^-5; ok?",
    "def f(x):\n    return {'a': [x ** 2]}\n\n",
    "Caf\u00e9 na\u00efve \u4f60\u597d \u0437\u0434\u0440\u0430\u0432 \U0001f600 $\\frac{1}{2}$",
)


class TeacherServer(TeacherPrompts):
    """A vLLM server that returns log-probs of given tokens at temperature 1."""

    def __init__(self, cfg: OpdConfig, policy: Policy) -> None:
        assert cfg.distill.teacher_url is not None
        self.url = cfg.distill.teacher_url.rstrip("/")
        self._http = HttpClient(self.url, find_token(self.url))
        self._loop = Loop("teacher")
        self._gate = asyncio.Semaphore(MAX_REQUESTS)
        try:
            self.model, length = self._loop.run(self._served())
            super().__init__(cfg, policy, length and length - 1)  # it must also sample one token
            self._loop.run(self._check_tokens(cfg.model.model))
        except BaseException:
            self.close()
            raise

    def logps(self, groups: Sequence[Group]) -> list[list[float]]:
        """For each completion one log-prob per id."""
        sequences = [self.of(group.row, c) + c.ids for group in groups for c in group.completions]
        logps = self._loop.run(together([self._logps(ids) for ids in sequences]))
        completions = [c for group in groups for c in group.completions]
        return [values[len(values) - len(c.ids) :] for values, c in zip(logps, completions, strict=True)]

    async def _logps(self, ids: list[int]) -> list[float]:  # for ids[1:]
        request = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        async with self._gate:
            reply = await self._ask("POST", "/v1/completions", request)
        try:
            return read_scores(reply["choices"][0], ids)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(
                f"teacher_url={self.url}: the reply has no log-probs for the tokens sent ({error})"
            ) from None

    async def _served(self) -> tuple[str, int | None]:
        """Name and context length of the served model."""
        reply = await self._ask("GET", "/v1/models")
        try:
            first = reply["data"][0]
            return str(first["id"]), first.get("max_model_len")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f"teacher_url={self.url}: /v1/models lists no model; is it a vLLM server?") from None

    async def _check_tokens(self, student: str) -> None:
        """Raise unless the server knows the student's last token and tokenizes texts to the same ids."""
        last = max(self.tokenizer.get_vocab().values())
        await self._logps([last, last])
        for text in PROBES:
            ours = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            request = {"model": self.model, "prompt": text, "add_special_tokens": False}
            reply = await self._ask("POST", "/tokenize", request, may_lack=True)
            theirs = ours if reply is None else reply.get("tokens")
            if theirs != ours:
                raise UserError(
                    f"teacher_url={self.url}: {text!r} has other token ids than with model={student} "
                    f"({theirs} there, {ours} here); serve a teacher with the same tokenizer"
                )

    async def _ask(self, method: str, path: str, request: Any = None, *, may_lack: bool = False) -> Any:
        """Return the reply, retrying if the server fails; client errors are raised immediately."""
        body = b"" if request is None else json.dumps(request).encode()
        reason = ""
        for attempt in range(ATTEMPTS):
            await asyncio.sleep(PAUSE_S * attempt)
            try:
                status, reply = await self._http.send(method, path, body, timeout=TIMEOUT_S, reuse=True)
            except ConnectError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no reply within {TIMEOUT_S:g} s"
            except (OSError, EOFError, ValueError) as error:
                reason = describe_error(error)
            else:
                if status == 404 and may_lack:
                    return None
                if status == 401:
                    raise UserError(f"teacher_url={self.url}: wrong token; set STROP_VLLM_TOKEN to its API key")
                if 400 <= status < 500:
                    raise UserError(f"teacher_url={self.url}: rejects {path} ({status}: {error_text(reply)})")
                if status == 200:
                    return self._decoded(reply, path)
                reason = f"status {status}: {error_text(reply)}"
        raise UserError(
            f"teacher_url={self.url}: {path} failed {ATTEMPTS} times (last error: {reason}); check that the server "
            "runs at this address, then continue a started run with --resume"
        )

    def _decoded(self, reply: bytes, path: str) -> Any:
        try:
            return json.loads(reply)
        except ValueError:
            raise UserError(f"teacher_url={self.url}: the reply to {path} is not JSON") from None

    def close(self) -> None:
        self._http.close()
        self._loop.close()
