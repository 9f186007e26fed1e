"""HTTP client of one vLLM server: token ids in, token ids and log-probs out, plus control calls.

    server = VllmServer("http://127.0.0.1:8000", token="secret")
    await server.connect()
    segment = await server.generate([5, 6, 7], Sampling(max_tokens=8, stop_ids=(2,)), seed=11, max_tokens=8)
    -> Segment(ids=[9, 8, 2], logps=[-0.1, -1.2, -0.3], finish="stop")

Works with vLLM 0.24 and 0.32, and with other versions that have the same routes. Every reply is checked; an invalid
reply counts as a server failure. The client never retries: the pool decides which completions to retry, and
engines/weights.py repeats a whole weight sync. With an `owner`, connect() takes the server's lease.

HttpClient is HTTP/1.1 over asyncio streams with only what VllmServer needs. Why not httpx: for 512 concurrent requests
with replies of 256 tokens it takes 9 s of CPU (each request searches the whole connection pool), HttpClient 0.1 s;
parsing the JSON takes 0.4 s either way.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import math
import resource
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import quote, urlencode, urlsplit

import numpy as np

from data.errors import UserError
from rollout import engine
from rollout.engine import Sampling
from rollout.servers.command import BASE, OLDEST, TOKEN
from rollout.servers.lease import LEASE, RENEW_LIMIT_S, SESSION, Owner, refusal
from rollout.servers.options import LOOPBACK
from rollout.sets import LIMIT

CONTROL_S = 60.0  # timeout of pause, resume etc., which wait for at most one engine step
ADAPTER_S = 120.0
SLEEP_S = 300.0  # level 1 copies the weights to main memory
SLOW = 10.0  # tokens per second; a slower completion times out, after --vllm.timeout in addition
GENERATE = "/inference/v1/generate"
GENERATE_ROUTE = "/strop/generate"  # rollout/servers/worker/strop_generate.py
VERSION_ROUTE = "/update_weight_version"  # not in 0.24
ROUTES = ("/pause", "/resume", "/is_paused", "/collective_rpc", "/get_world_size")  # required for weight sync
EXTENSION = "strop_worker.Worker"
SERVE = "start it with python -m rollout.serve"

SEED_MASK = 2**63 - 1
FINAL_ONLY = 2  # one reply at the end; otherwise 0.24 builds every prefix of the completion
LOGP_SLACK = 1e-3  # logit minus logsumexp may round to just above 0
NO_LOGP = -9999.0  # vLLM's value for a missing or NaN log-prob
LOWEST_TEMPERATURE = 0.01  # vLLM raises temperatures in (0, 0.01) to this
FINISHES = ("stop", "length", "abort")

KEEP_S = 2.0  # reuse idle connections this long; uvicorn closes them after 5 s, servers started by strop later
CONNECT_S = 10.0
STREAM_LIMIT = 2**20
BODY_LIMIT = 2**30  # bytes, more than any valid reply


class ServerError(Exception):
    """This server failed (no connection, 5xx, invalid reply, timeout); another server may succeed."""


class LateError(ServerError):
    """The request timed out."""


class RefusedError(UserError):
    """The server rejected the request (4xx); retrying it on any server would not help."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ServerInfo:
    version: str  # vLLM's version
    model_len: int  # maximum tokens of prompt plus completion
    workers: int
    extension: bool  # runs strop's worker extension, which receives weights
    lora: bool
    dtype: str  # "float32"
    instance: str  # changes when the server is restarted
    device_uuids: tuple[str, ...]  # the workers' GPUs, if the extension reports them
    model: str  # folder or hub id from its command line
    host_id: str | None = None  # its NCCL_HOSTID
    sleep_mode: bool = False  # can release its memory to the trainer
    marks_tokens: bool = False  # as in 0.32: marks tokens with the weight version; metrics distinguish sleep from pause


@dataclass(frozen=True)
class ServerStatus:
    """State of a responding server."""

    instance: str
    paused: bool
    dirty: bool  # a weight transfer was interrupted
    foreign: str | None = None  # tag of another trainer's weights, if they have replaced this trainer's


class VllmServer:
    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 240.0,
        vocab_size: int | None = None,
        owner: Owner | None = None,  # the trainer that will change the weights; None: completions only
    ) -> None:
        self.url = url.rstrip("/")
        self.owner = owner
        self.timeout = timeout
        self.vocab_size = vocab_size
        self.info: ServerInfo | None = None
        self.has_generate_route = False  # serves /strop/generate, which is faster than vLLM's route
        self.tag: str | None = None  # version that 0.32 marks tokens with, from set_version
        self.mark: str | None = None  # last known tag of the workers' weights
        self.leased = False  # the server supports leases, and this trainer holds its lease
        self._http = HttpClient(self.url, token, {SESSION: owner.session} if owner else None)

    async def connect(self) -> None:
        """Read the server's settings and take its lease; raise if the server cannot sample or sync correctly."""
        self.tag = None
        version = str((await self._json("GET", "/version", timeout=CONTROL_S)).get("version"))
        config = await self._config()
        model, parallel = config["model_config"], config["parallel_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            raise RefusedError(
                f"vllm.url={self.url}: logprobs_mode={model['logprobs_mode']} ignores the temperature; "
                "start the server with --logprobs-mode processed_logprobs"
            )
        routes = await self._routes(version)
        for route in ROUTES:
            if route not in routes:
                raise RefusedError(
                    f"vllm.url={self.url}: vLLM {version} lacks the route {route}, which weight sync needs; "
                    f"install vllm {OLDEST} or newer there"
                )
        if GENERATE not in routes:
            raise RefusedError(
                f"vllm.url={self.url}: does not accept token ids; start the server with --enable-scale-out"
            )
        status, reply = await self._send("GET", GENERATE_ROUTE, b"", timeout=CONTROL_S)
        self.has_generate_route = status == 200
        if self.has_generate_route and self._http.host in LOOPBACK:
            self._http.keep_s = max(KEEP_S, read_keep_alive(reply) / 2)
        extension = str(parallel.get("worker_extension_cls") or "") == EXTENSION
        workers = (await self._json("GET", "/get_world_size", timeout=CONTROL_S)).get("world_size", 1)
        workers_info = await self.rpc("strop_info", timeout=CONTROL_S) if extension else []
        self.mark = next((str(worker["tag"]) for worker in workers_info if worker.get("tag")), None)
        self.info = ServerInfo(
            version=version,
            model_len=int(model["max_model_len"]),
            workers=int(workers),
            extension=extension,
            lora=config.get("lora_config") is not None,
            dtype=str(model["dtype"]).removeprefix("torch."),
            instance=str(config.get("instance_id")),
            device_uuids=tuple(str(worker["device_uuid"]) for worker in workers_info if worker.get("device_uuid")),
            model=str(model["model"]),
            host_id=next((worker.get("host_id") for worker in workers_info), None),
            sleep_mode=model.get("enable_sleep_mode") is True,
            marks_tokens=VERSION_ROUTE in routes,
        )
        if self.owner is not None:
            self.leased = await self._lease("take", CONTROL_S)

    async def renew(self) -> None:
        """Extend the lease by a minute; raise LeaseError if another trainer has taken it."""
        if self.leased:
            await self._lease("renew", RENEW_LIMIT_S)

    async def release(self) -> None:
        if self.leased:
            self.leased = False
            await self._lease("release", RENEW_LIMIT_S)

    async def refuse_other(self, run: str) -> None:
        """Raise LeaseError if another run holds the lease; does not take the lease."""
        status, reply = await self._send("GET", LEASE, b"", timeout=CONTROL_S)
        error = refusal(self.url, reply, run) if status == 200 else None
        if error is not None and json.loads(reply)["holder"]["run"] != run:
            raise error

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        seed: int | None,  # None: unseeded
        max_tokens: int,
        model: str = BASE,
        version: int | None = None,  # weight version; separates the prefix caches of different versions
        timeout: float | None = None,
    ) -> Segment:
        """Sample one completion, or its first part if the server is paused in the meantime (finish "abort").

        The time limit is `timeout` plus 1 / SLOW seconds per token.
        """
        self._check_prompt(prompt_ids, max_tokens)
        if sampling.set_size and not self.has_generate_route:
            raise RefusedError(
                f"vllm.url={self.url}: does not return the ids that top_k={sampling.top_k}, top_p={sampling.top_p} and "
                f"min_p={sampling.min_p} keep, which training needs; {SERVE}"
            )
        params = sampling_params(sampling, seed, max_tokens)
        if self.vocab_size is not None:
            params["logprobs"] = min(params["logprobs"], self.vocab_size)  # more would end vLLM's engine
        request: dict[str, Any] = {"model": model, "token_ids": prompt_ids, "sampling_params": params}
        if version is not None:
            request["cache_salt"] = f"v{version}"
        tag = self.tag
        route = GENERATE_ROUTE if self.has_generate_route else GENERATE
        reply = await self._complete(route, request, (timeout or self.timeout) + max_tokens / SLOW, max_tokens)
        try:
            return read_segment(reply, sampling, max_tokens=max_tokens, vocab_size=self.vocab_size, tag=tag)
        except ValueError as error:
            raise ServerError(f"{self.url}: {error}") from error

    async def logps(
        self, ids: list[int], *, model: str = BASE, version: int | None = None, timeout: float | None = None
    ) -> list[float]:
        """Return log-probs of ids[1:] at temperature 1."""
        self._check_prompt(ids, 1)
        request: dict[str, Any] = {
            "model": model,
            "token_ids": ids,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }
        if version is not None:
            request["cache_salt"] = f"v{version}"
        reply = await self._complete(GENERATE, request, timeout or self.timeout, 1)
        try:
            return read_scores(reply, ids)
        except ValueError as error:
            raise ServerError(f"{self.url}: {error}") from error

    async def pause(self) -> None:
        """Stop sampling and clear the prefix cache; running requests return their tokens so far."""
        await self._json("POST", "/pause?mode=abort&clear_cache=true", {}, timeout=CONTROL_S)

    async def resume(self) -> None:
        await self._json("POST", "/resume", {}, timeout=CONTROL_S)

    async def rpc(self, method: str, *, timeout: float, **kwargs: Any) -> list[Any]:
        """Call a method on every worker and return one result each.

        Only the client times out: a server with several workers would mistake a late answer for the next call's.
        """
        reply = await self._json("POST", "/collective_rpc", {"method": method, "kwargs": kwargs}, timeout=timeout)
        results = reply.get("results")
        if not isinstance(results, list):
            raise ServerError(f"{self.url}: {method} returned no results")
        return results

    async def load_adapter(self, name: str, path: str) -> None:
        # load_inplace would read the folder again at every engine step.
        body = {"lora_name": name, "lora_path": path, "load_inplace": False}
        await self._call("POST", "/v1/load_lora_adapter", body, timeout=ADAPTER_S)

    async def unload_adapter(self, name: str) -> None:
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout=CONTROL_S)

    async def sleep(self, level: int = 1) -> None:
        """Release GPU memory. Level 1 keeps the weights in main memory, level 2 drops them."""
        await self._call("POST", f"/sleep?level={level}&mode=abort", {}, timeout=SLEEP_S)

    async def wake(self, *tags: str) -> None:
        """Reallocate memory: all of it, or "weights" first and "kv_cache" after the weights have been sent."""
        query = urlencode([("tags", tag) for tag in tags])
        await self._call("POST", f"/wake_up{'?' if query else ''}{query}", {}, timeout=SLEEP_S)

    async def is_sleeping(self) -> bool:
        """Return whether the server has released memory and not reallocated it.

        vLLM also reports a paused server as asleep. In 0.32, metrics distinguish the two, if enabled (strop enables
        them on servers that can sleep). In 0.24 they do not: a server with only its weights awake counts as awake.
        Without metrics, a paused server counts as asleep; calling wake() on it is harmless, but resumes it.
        """
        assert self.info is not None, "connect() first"
        if (await self._json("GET", "/is_sleeping", timeout=CONTROL_S)).get("is_sleeping") is not True:
            return False
        if not self.info.marks_tokens:
            return True
        return not is_awake((await self._call("GET", "/metrics", None, timeout=CONTROL_S)).decode("utf-8", "replace"))

    async def set_version(self, version: int) -> None:
        """Set the tag of the workers' weights. vLLM 0.32 also marks tokens with the tag, which every reply must match.

        The tag contains the random run id, because two trainers can both have a version 12.
        """
        assert self.info is not None, "connect() first"
        tag = self.owner.tag(version) if self.owner is not None else str(version)
        if self.info.extension:
            await self.rpc("strop_mark", timeout=CONTROL_S, tag=tag)
            self.mark = tag
        if not self.info.marks_tokens:
            return
        await self._json("POST", VERSION_ROUTE, {"new_version": tag}, timeout=CONTROL_S)
        self.tag = tag

    async def check(self, timeout: float) -> ServerStatus:
        """Return the server's status; raise ServerError unless the API, the engine and all workers respond in time."""
        info = self.info
        try:
            async with asyncio.timeout(timeout):
                await self._call("GET", "/health", None, timeout=timeout)
                method = "strop_info" if info is not None and info.extension else "check_health"
                replies = await self.rpc(method, timeout=timeout)
                paused = (await self._json("GET", "/is_paused", timeout=timeout)).get("is_paused") is True
                instance = str((await self._config()).get("instance_id"))
        except TimeoutError as error:
            raise ServerError(f"{self.url}: no response from the engine for {timeout:g} s") from error
        except RefusedError as error:
            raise ServerError(str(error)) from error
        for worker in replies:
            if isinstance(worker, dict) and worker.get("error"):
                raise ServerError(f"{self.url}: a worker failed ({worker['error']})")
        workers = [worker for worker in replies if isinstance(worker, dict)]
        dirty = any(worker.get("dirty") for worker in workers)
        foreign = next((str(worker["tag"]) for worker in workers if self._is_foreign(worker.get("tag"))), None)
        return ServerStatus(instance=instance, paused=paused, dirty=dirty, foreign=foreign)

    def _is_foreign(self, tag: str | None) -> bool:
        """Return whether another trainer has replaced the weights, which a server without leases does not prevent."""
        if self.owner is None or tag is None or tag == self.mark:
            return False
        return not tag.startswith(f"{self.owner.run}:")

    async def close(self) -> None:
        self._http.close()

    def _check_prompt(self, ids: list[int], max_tokens: int) -> None:
        """Raise for prompts that vLLM would reject or, worse, truncate silently."""
        if not ids:
            raise RefusedError("prompt_ids=[]: empty prompt; pass at least one token")
        if self.info is not None and len(ids) + max_tokens > self.info.model_len:
            raise RefusedError(
                f"max_tokens={max_tokens}: {len(ids)} prompt tokens + {max_tokens} exceed the server's context of "
                f"{self.info.model_len}; raise --vllm.max-model-len or lower --max-completion-length"
            )
        if min(ids) < 0 or (self.vocab_size is not None and max(ids) >= self.vocab_size):
            raise RefusedError(
                f"prompt_ids: an id is outside the model's vocabulary of {self.vocab_size}; "
                "use the model's own tokenizer"
            )

    async def _routes(self, version: str) -> frozenset[str]:
        """Return the server's routes from /openapi.json, since failing test requests would fill its log. A server
        without that file (--disable-fastapi-docs) is assumed to have all routes of its version.
        """
        status, listed = await self._send("GET", "/openapi.json", b"", timeout=CONTROL_S)
        try:
            return frozenset(json.loads(listed)["paths"]) if status == 200 else frozenset(known_routes(version))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ServerError(f"{self.url}: /openapi.json contains no list of routes") from error

    async def _complete(self, route: str, request: dict[str, Any], limit: float, max_tokens: int) -> dict[str, Any]:
        try:
            return await self._json("POST", route, request, timeout=limit, reuse=True)
        except LateError as error:
            raise LateError(
                f"{error}, the limit for {max_tokens} token{'s' * (max_tokens != 1)}; if the server is only slow, "
                "raise --vllm.timeout or lower --vllm.max-in-flight"
            ) from error

    async def _config(self) -> dict[str, Any]:
        try:
            reply = await self._json("GET", "/server_info?config_format=json", timeout=CONTROL_S)
        except RefusedError as error:
            if error.status != 404:
                raise
            raise RefusedError(
                f"vllm.url={self.url}: control routes are disabled (VLLM_SERVER_DEV_MODE); {SERVE}", 404
            ) from error
        config = reply.get("vllm_config")
        if not isinstance(config, dict) or not {"model_config", "parallel_config"} <= set(config):
            raise ServerError(f"{self.url}: /server_info contains no configuration")
        return config

    async def _lease(self, action: str, timeout: float) -> bool:
        """Return whether the server supports leases; raise LeaseError if another trainer holds the lease. Idempotent
        per session, so a request whose reply was lost may be repeated.
        """
        assert self.owner is not None, "only a trainer has a lease"
        status, reply = await self._send("POST", LEASE, self.owner.ask(action), timeout=timeout)
        if status == 404:  # vLLM without strop's middleware
            return False
        self._raise_if_lost(status, reply)
        if status != 200:
            raise ServerError(f"{self.url}: {LEASE} failed ({status} {error_text(reply)})")
        return True

    def _raise_if_lost(self, status: int, reply: bytes) -> None:
        error = refusal(self.url, reply, self.owner.run if self.owner else "") if status == 409 else None
        if error is not None:
            raise error

    async def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float, reuse: bool = False
    ) -> dict[str, Any]:
        reply = await self._call(method, path, body, timeout=timeout, reuse=reuse)
        try:
            value = json.loads(reply)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url}: {path} returned {reply[:60]!r}, not JSON") from error
        if not isinstance(value, dict):
            raise ServerError(f"{self.url}: {path} returned {reply[:60]!r}, not a JSON object")
        return value

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, *, timeout: float, reuse: bool = False
    ) -> bytes:
        """Return the body of a 200; raise RefusedError for a bad request, ServerError for a server failure."""
        data = b"" if body is None else json.dumps(body).encode()
        status, reply = await self._send(method, path, data, timeout=timeout, reuse=reuse)
        if status == 200:
            return reply
        self._raise_if_lost(status, reply)
        route = quote(path.split("?")[0])
        # 408 and 429 mean that the server is busy, not that the request is wrong.
        if 400 <= status < 500 and status not in (408, 429):
            raise RefusedError(f"vllm.url={self.url}: rejected {route} ({status} {error_text(reply)})", status)
        raise ServerError(f"{self.url}: {route} failed ({status} {error_text(reply)})")

    async def _send(
        self, method: str, path: str, data: bytes, *, timeout: float, reuse: bool = False
    ) -> tuple[int, bytes]:
        route = path.split("?")[0]
        try:
            status, reply = await self._http.send(method, path, data, timeout=timeout, reuse=reuse)
        except ConnectError as error:
            raise ServerError(f"vllm.url={self.url}: cannot be reached ({error}); is the server up?") from error
        except TimeoutError as error:
            raise LateError(f"{self.url}: no response from {route} for {timeout:g} s") from error
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise ServerError(f"{self.url}: {route} failed ({type(error).__name__}: {error})") from error
        if status == 401:
            raise RefusedError(
                f"vllm.url={self.url}: wrong token; set {TOKEN} to the server's token, or unset {TOKEN} if this user "
                "started the server on this machine",
                status,
            )
        return status, reply


# requests and replies --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens from one request to one server, hence from one weight version."""

    ids: list[int]
    logps: list[float]
    finish: Literal["stop", "length", "abort"]
    routes: np.ndarray | None = None  # (tokens run, layers, k) experts, from a server that returns them
    sets: np.ndarray | None = None  # rollout/sets.py


def check_sampling(sampling: Sampling, *, training: bool) -> None:
    """Raise for settings that vLLM does not follow exactly, or that cannot be trained on."""
    if not (sampling.temperature == 0 or LOWEST_TEMPERATURE <= sampling.temperature < math.inf):
        raise UserError(
            f"temperature={sampling.temperature}: vLLM's minimum is {LOWEST_TEMPERATURE}; set 0 for greedy decoding"
        )
    engine.check_sampling(replace(sampling, for_training=training))


def sampling_params(sampling: Sampling, seed: int | None, max_tokens: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": max_tokens,
        "logprobs": num_logprobs(sampling),
        # Stop only at these ids, not at the generation_config's.
        "stop_token_ids": list(sampling.stop_ids),
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),  # stop strings are matched in text
        "output_kind": FINAL_ONLY,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.top_p < 1:
        params["top_p"] = sampling.top_p
    if sampling.top_k:
        params["top_k"] = sampling.top_k
    if sampling.min_p:
        params["min_p"] = sampling.min_p
    if seed is not None:
        params["seed"] = seed & SEED_MASK
    return params


def num_logprobs(sampling: Sampling) -> int:
    """Log-probs to request in addition to the sampled token's: enough for the ids that are kept, if these are recorded.

    vLLM also keeps ids that are as likely as the last of top_k, and bfloat16 logits are often equal.
    """
    return min(2 * sampling.set_size + 16, LIMIT + 1) if sampling.set_size else 0


def read_segment(
    reply: dict[str, Any], sampling: Sampling, *, max_tokens: int, vocab_size: int | None = None, tag: str | None = None
) -> Segment:
    """Parse and check a reply; raise ValueError if it is invalid. `tag`: the version mark that 0.32 must report."""
    try:
        (choice,) = reply["choices"]
        ids, finish = choice["token_ids"] or [], choice["finish_reason"]
        logps = list(choice["logps"]) if "logps" in choice else _logps_of(choice["logprobs"])
        spans = choice.get("weight_versions") or []
        versions = {span["version"] for span in spans}
        routes, sets = (
            text and np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
            for text in (choice.get("routed_experts"), choice.get("sets"))
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"malformed reply ({type(error).__name__}: {error})") from error
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise UserError("token ids are not integers")
    if finish not in FINISHES:
        raise UserError(f"finish_reason={finish!r}: not one of {', '.join(FINISHES)}")
    if len(ids) > max_tokens or (finish == "length" and len(ids) != max_tokens):
        raise UserError(f"{len(ids)} tokens with finish_reason={finish} and max_tokens={max_tokens}")
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        raise UserError(f"a token id is outside the vocabulary of {vocab_size}")
    if finish == "stop" and not sampling.stop and (not ids or ids[-1] not in sampling.stop_ids):
        raise UserError(f"stopped at token {ids[-1:]}, which is not in stop_ids")
    _check_logps(logps, len(ids))
    if tag is not None and versions - {tag}:
        raise UserError(f"tokens are from weight version {', '.join(sorted(map(str, versions)))}, expected {tag}")
    if routes is not None and (routes.ndim != 3 or routes.dtype.kind not in "iu"):
        raise UserError(f"routed_experts have shape {routes.shape} and dtype {routes.dtype}")
    if sampling.set_size and ids and (sets is None or not np.array_equal(~sets[sets < 0], ids)):
        raise UserError(f"the {len(ids)} sampled ids come without the ids that top-k, top-p or min-p kept")
    return Segment(ids, logps, finish, routes, sets)


def _logps_of(logprobs: dict[str, Any] | None) -> list[float]:
    """Return the log-probs in a reply of vLLM's own route."""
    return [token["logprob"] for token in (logprobs or {}).get("content") or []]


def read_scores(reply: dict[str, Any], ids: list[int]) -> list[float]:
    """Return log-probs of ids[1:] from prompt_logprobs: [None, {"7": {"logprob": -0.3, ..}}, ..]."""
    try:
        entries = reply["prompt_logprobs"]
        logps = [entry[str(i)]["logprob"] for entry, i in zip(entries[1:], ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"malformed prompt_logprobs ({type(error).__name__}: {error})") from error
    _check_logps(logps, len(ids) - 1)
    return logps


def read_keep_alive(reply: bytes) -> float:
    """Return how long a server with strop's route keeps idle connections, in seconds; 0 if unknown."""
    try:
        return float(json.loads(reply)["keep_alive"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return 0.0


def known_routes(version: str) -> tuple[str, ...]:
    """Return the routes to expect from a server that does not list them."""
    return (GENERATE, *ROUTES) + (() if version.startswith("0.24.") else (VERSION_ROUTE,))


def is_awake(metrics: str) -> bool:
    """Return whether /metrics reports all engines as awake; False without sleep-state metrics."""
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:engine_sleep_state{")]
    values = [line.rpartition(" ")[2] for line in lines if 'sleep_state="awake"' in line]
    return bool(values) and all(float(value) == 1 for value in values)


def error_text(body: bytes) -> str:
    """Return the message of an error reply, on one line."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)
        while isinstance(error, dict):
            error = error.get("error") or error.get("message") or error.get("detail") or ""
        text = str(error)
    except (ValueError, RecursionError):
        text = text.strip()
    return " ".join(text.split())[:400]


def _check_logps(logps: list[Any], num_ids: int) -> None:
    if len(logps) != num_ids:
        raise UserError(f"{len(logps)} log-probs for {num_ids} tokens")
    if not logps:
        return
    if not all(type(logp) in (float, int) for logp in logps):
        raise UserError("log-probs are not numbers")
    try:
        total = float(sum(logps))  # propagates NaN, which min and max may miss
    except OverflowError:  # an integer of hundreds of digits
        total = math.inf
    if not math.isfinite(total) or min(logps) <= NO_LOGP:
        raise UserError("log-probs are not finite; if all servers report this, the weights have diverged")
    if max(logps) > LOGP_SLACK:
        raise UserError(f"log-prob {max(logps):g} is above 0")


# HTTP ------------------------------------------------------------------------------------------------------------


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ConnectError(OSError):
    """No connection, so nothing was sent; the message is a short reason."""


class HttpClient:
    """Connections to one server, one per concurrent request.

    client = HttpClient("http://127.0.0.1:8000", token="secret")
    status, body = await client.send("POST", "/pause", b"{}", timeout=60)
    """

    def __init__(self, url: str, token: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"vllm.url={url}: not a URL; pass a value such as http://127.0.0.1:8000")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise UserError("STROP_VLLM_TOKEN: contains characters not allowed in a header; use letters and digits")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.base = parts.path.rstrip("/")
        self.ssl = ssl.create_default_context() if parts.scheme == "https" else None
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.head = f"Host: {name}:{self.port}\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        if token:
            self.head += f"Authorization: Bearer {token}\r\n"
        self.head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self.keep_s = KEEP_S
        self.idle: deque[tuple[float, Connection]] = deque()  # oldest first

    async def send(
        self, method: str, path: str, body: bytes = b"", *, timeout: float, reuse: bool = False
    ) -> tuple[int, bytes]:
        """Send a request; return status and body. Raises ConnectError without a connection, TimeoutError after
        `timeout`, and OSError, EOFError or ValueError if the server fails.

        `reuse` takes an open connection if there is one, and keeps it for the next. The server may be closing it at
        that moment, so use `reuse` only for requests that can be repeated. Other requests close their connection:
        kept for a minute, those of every weight sync would exceed the limit on open files.
        """
        end = asyncio.get_running_loop().time() + timeout
        reader, writer = (self._take() if reuse else None) or await self._connect(min(CONNECT_S, timeout))
        try:
            async with asyncio.timeout_at(end):
                length = f"Content-Length: {len(body)}\r\n\r\n"
                writer.write(f"{method} {self.base}{path} HTTP/1.1\r\n{self.head}{length}".encode() + body)
                status, reply, stays_open = await _read(reader)
        except BaseException:
            # Even on cancellation: the server sees the connection close and drops the request.
            writer.transport.abort()
            raise
        if stays_open and reuse:
            self._keep(reader, writer)
        else:
            writer.close()
        return status, reply

    def close(self) -> None:
        while self.idle:
            self.idle.popleft()[1][1].close()

    async def _connect(self, seconds: float) -> Connection:
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.open_connection(self.host, self.port, ssl=self.ssl, limit=STREAM_LIMIT)
        except TimeoutError as error:
            raise ConnectError(f"no connection within {seconds:g} s") from error
        except OSError as error:
            # For a host name with several addresses, one message contains the errors of all addresses.
            refused = isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error)
            raise ConnectError("connection refused" if refused else (error.strerror or str(error)).lower()) from error

    def _take(self) -> Connection | None:
        """Return the most recently used connection that is fresh and still open, or None."""
        while self.idle:
            since, (reader, writer) = self.idle.pop()
            if time.monotonic() - since < self.keep_s and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return None

    def _keep(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = time.monotonic()
        while self.idle and now - self.idle[0][0] >= self.keep_s:
            self.idle.popleft()[1][1].close()
        self.idle.append((now, (reader, writer)))


async def _read(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Read one reply: (status, body, whether the connection stays open)."""
    status = 100
    while status < 200:  # 1xx replies only announce the real one
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = lines[0].split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise UserError(f"not an HTTP reply: {lines[0][:60]!r}")
        status = int(words[1])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    stays_open = words[0] == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return status, await _read_chunks(reader), stays_open
    if "content-length" in headers:
        return status, await reader.readexactly(_length(headers["content-length"], 10)), stays_open
    if status in (204, 304):
        return status, b"", stays_open
    try:
        await reader.readexactly(BODY_LIMIT + 1)
    except asyncio.IncompleteReadError as ended:
        return status, ended.partial, False
    raise UserError(f"a reply of more than {BODY_LIMIT} bytes")


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := _length((await reader.readuntil(b"\r\n")).split(b";")[0].decode("latin-1").strip(), 16):
        body += await reader.readexactly(size)
        if len(body) > BODY_LIMIT:
            raise UserError(f"a reply of more than {BODY_LIMIT} bytes")
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
        continue
    return bytes(body)


def _length(text: str, base: int) -> int:
    size = int(text, base)
    if not 0 <= size <= BODY_LIMIT:
        raise UserError(f"invalid reply length {text}")
    return size


def allow_connections(wanted: int) -> None:
    """Raise the limit on open files: each request needs one, and the default is often only 1024 per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
