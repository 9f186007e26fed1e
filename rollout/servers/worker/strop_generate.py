"""A lean route in vLLM's server: token ids in, token ids and log-probs out.

    python -m vllm.entrypoints.openai.api_server --middleware strop_generate.Generate ...

    POST /strop/generate  {"model", "token_ids", "sampling_params", "cache_salt"}    like vLLM's /inference/v1/generate
    -> {"choices": [{"token_ids": [9, 8], "logps": [-0.1, -1.2], "finish_reason": "stop", "weight_versions": null}]}
    GET /strop/generate -> 200 {"keep_alive": 120.0}, so that a client can see that the route exists, and for how many
                           seconds the server keeps idle connections

vLLM's own route builds two validated objects per token for its log-prob, in the one process that all replies go
through: a batch of completions that end together waits longer for that than for the engine's last steps. Here log-probs
stay the flat list in which the engine's client has them. The server finds this file through PYTHONPATH; it uses only
what vLLM 0.24 and 0.32 both have.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from strop_gc import calm
from strop_token import Receive, Send, read, reply

PATH = "/strop/generate"
PAUSES = ("/pause", "/sleep")
KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"  # vLLM's, with its default below


class Generate:
    """ASGI middleware that serves PATH and passes everything else on; collects garbage after a pause."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.numbers = itertools.count()
        # /server_info, which a trainer reads first, would run pip and a dozen other programs to describe the machine.
        with contextlib.suppress(ImportError):  # 0.24
            from vllm.entrypoints.serve.dev.server_info import api_router

            api_router._get_system_env_info_cached = dict

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            if scope["type"] == "http" and scope["path"] in PAUSES:
                calm()
            return
        if scope["method"] == "GET":
            await reply(send, 200, {"route": PATH, "keep_alive": float(os.environ.get(KEEP_ALIVE, "5"))})
            return
        body = await read(receive)
        if body is None:
            return  # the client has left
        work = asyncio.ensure_future(self.answer(scope["app"].state, body))
        left = asyncio.ensure_future(leaves(receive))
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await reply(send, *work.result())
        finally:
            for task in (work, left):  # the engine ends a completion whose task is cancelled
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def answer(self, state: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and content: 4xx for requests that should not be repeated, 500 for everything else."""
        from vllm import exceptions

        wrong = (ValueError, TypeError, getattr(exceptions, "VLLMClientError", ValueError))  # 0.24 has none
        try:
            return 200, await self.complete(state, json.loads(body))
        except KeyError as error:
            return 404, {"error": {"message": f"{error.args[0]}: not found"}}
        except wrong as error:
            return 400, {"error": {"message": str(error)}}
        except Exception as error:  # for example, the engine has died
            return 500, {"error": {"message": f"{type(error).__name__}: {error}"}}

    async def complete(self, state: Any, request: dict[str, Any]) -> dict[str, Any]:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        models, name = state.openai_serving_models, request["model"]
        lora = None if models.is_base_model(name) else models.lora_requests[name]
        settings = request["sampling_params"] | {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True}
        prompt = tokens_input(request["token_ids"], cache_salt=request.get("cache_salt"))
        made = state.engine_client.generate(
            prompt, SamplingParams(**settings), f"strop-{next(self.numbers)}", lora_request=lora
        )
        (output,) = [output async for result in made for output in result.outputs]
        spans = getattr(output, "weight_versions", None)  # 0.32
        choice = {
            "token_ids": list(output.token_ids),
            "logps": logps_of(output),
            "finish_reason": output.finish_reason,
            "weight_versions": [{"version": span.version} for span in spans] if spans else None,
        }
        return {"choices": [choice]}


def logps_of(output: Any) -> list[float]:
    """Log-probs of the sampled tokens, which come first at each position; no others are asked for."""
    found = output.logprobs
    if found is None or not len(found):
        return []
    return [max(found.logprobs[first], -9999.0) for first in found.start_indices]  # JSON has no infinity


async def leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
