"""A fast completion route for vLLM's server: token ids in, token ids and log-probs out.

    python -m vllm.entrypoints.openai.api_server --middleware strop_generate.Generate ...

    POST /strop/generate  {"model", "token_ids", "sampling_params", "cache_salt"}    like vLLM's /inference/v1/generate
    -> {"choices": [{"token_ids": [9, 8], "logps": [-0.1, -1.2], "finish_reason": "stop", "weight_versions": null}]}
       with "logprobs" above 0 also "sets": the ids that top-k, top-p or min-p kept (rollout/sets.py)
    GET /strop/generate -> 200 {"keep_alive": 120.0}: the route exists, and the server keeps idle connections this many
                           seconds

vLLM's own route builds two validated objects per token for its log-prob, in the single process that serves all replies.
When a batch of completions ends together, this takes longer than the engine's last steps. Here log-probs stay in the
flat list of the engine's client. Uses only functions that vLLM 0.24 and 0.32 both have.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

from strop_gc import collect
from strop_token import Receive, Send, read, reply

PATH = "/strop/generate"
PAUSES = ("/pause", "/sleep")
KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"  # vLLM's variable; its default is 5


class Generate:
    """ASGI middleware that serves PATH and forwards all other requests; collects garbage after a pause."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.numbers = itertools.count()
        # A trainer reads /server_info first, which would run pip and a dozen other programs to describe the machine.
        with contextlib.suppress(ImportError):  # 0.24
            from vllm.entrypoints.serve.dev.server_info import api_router

            api_router._get_system_env_info_cached = dict

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            if scope["type"] == "http" and scope["path"] in PAUSES:
                collect()
            return
        if scope["method"] == "GET":
            await reply(send, 200, {"route": PATH, "keep_alive": float(os.environ.get(KEEP_ALIVE, "5"))})
            return
        body = await read(receive)
        if body is None:
            return  # the client has disconnected
        work = asyncio.ensure_future(self.answer(scope["app"].state, body))
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await reply(send, *work.result())
        finally:
            for task in (work, disconnect):  # the engine ends a completion whose task is cancelled
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def answer(self, state: Any, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return status and content: 4xx for requests that must not be retried, 500 for all other errors."""
        from vllm import exceptions

        client_errors = (ValueError, TypeError, getattr(exceptions, "VLLMClientError", ValueError))  # not in 0.24
        try:
            return 200, await self.complete(state, json.loads(body))
        except KeyError as error:
            return 404, {"error": {"message": f"{error.args[0]}: not found"}}
        except client_errors as error:
            return 400, {"error": {"message": str(error)}}
        except Exception as error:  # for example, a dead engine
            return 500, {"error": {"message": f"{type(error).__name__}: {error}"}}

    async def complete(self, state: Any, request: dict[str, Any]) -> dict[str, Any]:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        models, name = state.openai_serving_models, request["model"]
        lora = None if models.is_base_model(name) else models.lora_requests[name]
        settings = request["sampling_params"] | {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True}
        prompt = tokens_input(request["token_ids"], cache_salt=request.get("cache_salt"))
        results = state.engine_client.generate(
            prompt, SamplingParams(**settings), f"strop-{next(self.numbers)}", lora_request=lora
        )
        (output,) = [output async for result in results for output in result.outputs]
        spans = getattr(output, "weight_versions", None)  # 0.32
        choice = {
            "token_ids": list(output.token_ids),
            "logps": logps_of(output),
            "finish_reason": output.finish_reason,
            "weight_versions": [{"version": span.version} for span in spans] if spans else None,
            "routed_experts": encoded(getattr(output, "routed_experts", None)),
            "sets": encoded(sets_of(output)) if settings.get("logprobs") else None,
        }
        return {"choices": [choice]}


def logps_of(output: Any) -> list[float]:
    """Return the sampled tokens' log-probs, which come first at each position (no others are requested)."""
    flat = output.logprobs
    if flat is None or not len(flat):
        return []
    return [max(flat.logprobs[first], -9999.0) for first in flat.start_indices]  # JSON has no infinity


def sets_of(output: Any) -> Any:
    """Return the ids with a probability above 0 at each position: the sampled id as ~id, then the others."""
    import numpy as np

    flat = output.logprobs
    if flat is None or not len(flat):
        return None
    ids, starts = np.array(flat.token_ids, np.int32), np.array(flat.start_indices, np.int64)
    sampled = np.repeat(ids[starts], np.diff(np.append(starts, len(ids))))
    keep = (np.array(flat.logprobs) > -np.inf) & (ids != sampled)  # the sampled id comes first, and again by its rank
    keep[starts] = True
    ids[starts] = ~ids[starts]
    return ids[keep]


def encoded(array: Any) -> str | None:
    """Return an array as text, as vLLM's own route returns experts; None without --enable-return-routed-experts."""
    if array is None:
        return None
    import numpy as np

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getbuffer()).decode()


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
