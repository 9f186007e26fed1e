"""NeMo Gym: its resource servers verify completions (VerifyReward), and its agents run episodes (RunSource).

    gym = GymClient(cfg.nemo_gym)
    gym.connect(prompts, multi_turn=cfg.nemo_gym.multi_turn)
    set_up_rewards(rewards, gym, on_error)                      # `nemo_gym:verify`, one POST /verify per completion
    source = RunSource(gym, sampling, endpoint)                 # multi_turn: one POST /run per completion

With multi_turn the run's endpoint (episodes/endpoint.py) samples the tokens: the gym's model server (its vllm_model)
forwards the agents' requests to it. With auto_start the run starts the gym's servers (auto_start.py) and configures the
address. Otherwise the endpoint has a fixed port, --nemo-gym.endpoint-port, and the token in STROP_VLLM_TOKEN:

    policy_model.responses_api_models.vllm_model: base_url http://127.0.0.1:11001/v1, api_key the token, model policy,
        return_token_id_information false

Sampling settings are the trainer's.
"""

from __future__ import annotations

import asyncio
import http.cookiejar
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import yaml

from data.errors import UserError
from data.hints import suggest
from data.types import Messages, Prompt
from data.user_code import printable
from rollout.engine import Completion, Request, Sampling
from rollout.episodes.endpoint import SESSION_FIELD, Endpoint
from rollout.gyms.auto_start import AGENTS, MODELS, GymServers, check_files, servers_of
from rollout.gyms.gym_source import (
    COLUMNS,
    EpisodeError,
    GymSource,
    UnusableError,
    log_too_long,
    once_per_kind,
    read_reward,
    shorten,
)
from rollout.gyms.options import NemoGymConfig
from rollout.servers.loop import Loop, together

CONNECT_S = 10.0
POLL_S = 1.0
ALL_INTERFACES = ("0.0.0.0", "::", "localhost", "")  # a server with one of these hosts runs on the head server's host
MAX_REPLY = 2**28  # bytes, more than any valid reply
MAX_DEPTH = 100  # nested lists and objects of a reply; writing them to samples.jsonl is recursive


class VerifyReward:
    """The reward `nemo_gym:verify`: the row's resource server scores each completion."""

    def __init__(self) -> None:
        self.gym: GymClient | None = None
        self.on_error: Literal["stop", "none"] = "stop"

    async def __call__(
        self,
        prompts: list[Messages],
        completions: list[Any],
        verify_extra: list[str | None],
        nemo_gym_ref: list[dict[str, Any] | None],
    ) -> list[float | None]:
        """Return one number per row; None for rows from other data.

        A row that fails stops the run, or with on_error "none" is NaN: it gets no reward and is counted.
        """
        if self.gym is None:
            raise UserError("only works in a training run with --nemo-gym.datasets")
        rows = zip(prompts, completions, verify_extra, nemo_gym_ref, strict=True)
        return await asyncio.wrap_future(self.gym.loop.start(together([self._one(*row) for row in rows])))

    async def _one(self, prompt: Messages, completion: Any, row_json: str | None, ref: Any) -> float | None:
        assert self.gym is not None
        if row_json is None:
            return None
        messages = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        row = row_body(row_json, prompt) | {"response": response_of(messages, self.gym.cfg.model_name)}
        try:
            reply = await self.gym.verify(row, ref)
            return read_reward(reply.get("reward"))
        except (GymError, ValueError) as error:
            if self.on_error == "stop":
                raise UserError(f"NeMo Gym: {ref['source']}: {error}") from None
            kind = error.kind if isinstance(error, GymError) else "reward"
            self.gym.log_once(kind, f"NeMo Gym: {ref['source']}: {error}; the completion gets no reward")
            return math.nan


class RunSource(GymSource):
    """Source of episodes run by the gym's agents: one POST /run per request. The endpoint samples their turns."""

    def __init__(self, gym: GymClient, sampling: Sampling, endpoint: Endpoint | None) -> None:
        """endpoint: None on ranks that never start an episode."""
        super().__init__(
            self._run, endpoint, loop=gym.loop, flag="nemo_gym",
            title="NeMo Gym", prefix_mismatch=gym.cfg.prefix_mismatch, log_once=gym.log_once,
            hint="see the logs of the gym's agent and model server",
        )  # fmt: skip
        self.gym, self.sampling = gym, sampling

    async def _run(self, endpoint: Endpoint, request: Request, index: int) -> Completion:
        assert request.prompt is not None
        prompt = request.prompt
        name, url = self.gym.agent_of(prompt.columns["nemo_gym_ref"])
        with endpoint.session(self.sampling, seed=request.seed, settings=prompt.settings) as (session, key):
            reply = await self.gym.run(self.body(prompt, name, key.rpartition(".")[2], index), name, url)
        log_too_long(self.log_once, self.title, prompt, session)
        return session.completion(prompt.ids, read_reply(reply, has_turns=bool(session.turns), url=endpoint.url))

    def body(self, prompt: Prompt, agent: str, session: str, index: int) -> dict[str, Any]:
        """Return the row; the gym's model server adds the fields of metadata.extra_body to its requests."""
        row = row_body(prompt.columns["verify_extra"], prompt.prompt)
        params = {key: value for key, value in row["responses_create_params"].items() if value is not None}
        metadata = dict(params.get("metadata") or {})
        extra = json.loads(metadata.get("extra_body") or "{}") | {SESSION_FIELD: session}
        params["metadata"] = metadata | {"extra_body": json.dumps(extra)}
        return row | {
            "responses_create_params": params,
            "agent_ref": {"type": AGENTS, "name": agent},
            "_ng_task_index": prompt.columns["nemo_gym_index"],
            "_ng_rollout_index": index,
        }


def set_up_rewards(rewards: Any, gym: GymClient, on_error: Literal["stop", "none"]) -> None:
    """Set the client of every `nemo_gym:verify` reward."""
    for function in rewards.functions:
        if isinstance(function.call, VerifyReward):
            function.call.gym, function.call.on_error = gym, on_error


# the gym's servers -----------------------------------------------------------------------------------------------


class GymError(EpisodeError):
    """A request failed. `again`: a retry may succeed; `kind` groups similar failures."""

    def __init__(self, text: str, *, kind: str, again: bool = False) -> None:
        super().__init__(text, kind=kind)
        self.again = again


@dataclass(frozen=True)
class Addresses:
    """Addresses of the gym's servers, by name."""

    servers: dict[str, str]  # resource servers
    agents: dict[str, tuple[str, str | None]]  # (address, name of its resource server)


class GymClient:
    """HTTP client for the gym's servers, in a background loop.

    The cookie from /seed_session identifies the session; without it, a stateful server verifies 0.0 without an error.
    Therefore each verification has its own cookies, and the client stores none.
    """

    columns = COLUMNS  # of the completions with multi_turn

    def __init__(self, cfg: NemoGymConfig, log: Callable[[str], None] | None = None) -> None:
        self.cfg = cfg
        self.log = log or (lambda text: print(text, file=sys.stderr))
        self.log_once = once_per_kind(self.log)
        self.loop = Loop("nemo-gym")
        self.addresses = Addresses({}, {})
        self.servers: GymServers | None = None  # with auto_start
        self._needed: set[str] = set()
        self._http: Any = None
        self._slots = asyncio.Semaphore(cfg.max_connections)
        if cfg.auto_start:
            check_files(cfg)

    @property
    def head(self) -> str:
        return f"http://{self.cfg.head_host}:{self.cfg.head_port}"

    def connect(self, prompts: Sequence[Prompt], *, multi_turn: bool) -> None:
        """Find the servers that the rows need and wait until they answer; raise for rows without a server.

        With auto_start, only look up the servers in the gym's files; start() follows.
        """
        deadline = time.monotonic() + self.cfg.startup_s
        if self.cfg.auto_start:
            self.servers = GymServers(self.cfg, self.log)
            self.addresses = addresses_of(self.servers.tree, self.cfg.head_host)
        else:
            text = self.loop.run(self._wait(f"{self.head}/global_config_dict_yaml", deadline, "the gym's head server"))
            self.addresses = read_addresses(text, self.head, self.cfg.head_host)
        needed: dict[str, str] = {}
        for prompt in prompts:
            if (ref := prompt.columns.get("nemo_gym_ref")) is None:
                continue
            try:
                name, url = self.agent_of(ref) if multi_turn else self.server_of(ref)
            except ValueError as error:
                raise UserError(f"{prompt.source}: {error}") from None
            needed[name] = url
        self._needed = set(needed)
        if self.cfg.auto_start:
            return
        for name, url in needed.items():
            self.loop.run(self._wait(f"{url}/", deadline, name))
        kind = "agents" if multi_turn else "resource servers"
        self.log(f"NeMo Gym: {kind} {', '.join(f'{name} at {url}' for name, url in sorted(needed.items()))}")

    def source(self, endpoint: Endpoint | None, sampling: Sampling) -> RunSource:
        """With multi_turn: return a source of episodes; `endpoint` is None on ranks that never start one."""
        return RunSource(self, sampling, endpoint)

    def start(self, model: tuple[str, str] | None, log_dir: Path) -> None:
        """With auto_start, after connect(): start the servers that the rows need. `model`: see GymServers.start."""
        assert self.servers is not None, "connect() comes before start()"
        self.servers.start(self._needed, model, log_dir)

    def server_of(self, ref: dict[str, Any]) -> tuple[str, str]:
        """Return (name, address) of the row's resource server: the dataset's, otherwise the row's."""
        servers, agents = self.addresses.servers, self.addresses.agents
        for name in (ref.get("server"), ref.get("name")):
            server = agents[name][1] if name in agents else name
            if server in servers:
                return server, servers[server]
            if name is not None:
                raise UserError(self._unknown("resource server", name, [*servers, *agents]))
        raise UserError("no server of the gym is named; write PATH@SERVER in --nemo-gym.datasets")

    def agent_of(self, ref: dict[str, Any]) -> tuple[str, str]:
        """Return (name, address) of the row's agent: the dataset's, the row's, or the resource server's."""
        agents = self.addresses.agents
        server, name = ref.get("server"), ref.get("name")
        if server in agents:
            return server, agents[server][0]
        if name in agents and (server is None or agents[name][1] == server):
            return name, agents[name][0]
        wanted = server if server is not None else name
        fits = [agent for agent, (_, resource) in agents.items() if resource == wanted and wanted is not None]
        if len(fits) == 1:
            return fits[0], agents[fits[0]][0]
        if fits:
            raise UserError(
                f"nemo_gym.datasets: agents {', '.join(fits)} all use the server {wanted}; write PATH@AGENT"
            )
        raise UserError(self._unknown("agent", str(wanted), list(agents)))

    async def verify(self, row: dict[str, Any], ref: dict[str, Any]) -> dict[str, Any]:
        """Return the resource server's reply for a row with a response: new session, /verify, retries."""
        name, url = self.server_of(ref)

        async def once() -> Any:
            seed = {key: value for key, value in row.items() if key != "response"}
            _, cookies = await self.post(f"{url}/seed_session", seed, name, optional=True)
            return await self.post(f"{url}/verify", row, name, cookies)

        reply, _ = await self.retried(once, self.cfg.verify_timeout, f"{name}/verify")
        return reply

    async def run(self, row: dict[str, Any], name: str, url: str) -> dict[str, Any]:
        """Run one episode with an agent."""
        reply, _ = await self.retried(lambda: self.post(f"{url}/run", row, name), self.cfg.run_timeout, f"{name}/run")
        return reply

    async def retried(self, once: Callable[[], Any], seconds: float, what: str) -> Any:
        """Await once() with a time limit and retries; time in the queue does not count."""
        for tries_left in range(self.cfg.retries, -1, -1):
            try:
                async with self._slots, asyncio.timeout(seconds):
                    return await once()
            except TimeoutError:
                raise GymError(f"{what} did not answer within {seconds:g} s", kind=f"{what} late") from None
            except GymError as error:
                if self.servers is not None and (ended := self.servers.ended()):
                    raise GymError(ended, kind=f"{what} ended") from None
                if not error.again or not tries_left:
                    raise
            await asyncio.sleep(0.2)
        raise AssertionError("the last try returns or raises")

    async def post(
        self, url: str, body: dict[str, Any], name: str, cookies: str = "", *, optional: bool = False
    ) -> tuple[dict[str, Any], str]:
        """Return (reply, cookies for the session's next request). optional: the server may lack this route."""
        what = f"{name}/{url.rpartition('/')[2]}"
        headers = {"cookie": cookies} if cookies else {}
        try:
            status, content, new_cookies = await self._fetch("POST", url, json=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            reason = str(error) or type(error).__name__
            raise GymError(f"{what} failed ({reason})", kind=f"{what} failed", again=True) from error
        if optional and status in (404, 405):
            return {}, ""
        if status != 200:
            text = f"{what} answered {status} ({error_text(content)})"
            raise GymError(text, kind=f"{what} {status}", again=status >= 500)
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or is_deep(value):
            reason = f"not an object of at most {MAX_DEPTH} levels"
            raise GymError(f"{what} answered {content[:60]!r}, {reason}", kind=f"{what} garbage")
        return value, join_cookies(cookies, new_cookies)

    def close(self) -> None:
        """May be called twice."""
        http, self._http = self._http, None
        if http is not None:
            self.loop.run(http.aclose(), 10.0)
        self.loop.close()
        if self.servers is not None:
            self.servers.stop()

    async def _wait(self, url: str, deadline: float, what: str) -> str:
        """Repeat a GET until it succeeds, and return its text."""
        while True:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 1.0)):
                    status, content, _ = await self._fetch("GET", url)
                if status == 200:
                    return content.decode(errors="replace")
                reason = f"answers {status}"
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() + POLL_S > deadline:
                raise UserError(
                    f"nemo_gym.head_port={self.cfg.head_port}: {what} at {url} is not ready ({reason}); start the "
                    "gym's servers first or raise --nemo-gym.server-timeout"
                )
            await asyncio.sleep(POLL_S)

    async def _fetch(self, method: str, url: str, **request: Any) -> tuple[int, bytes, list[str]]:
        """Return (status, body, cookies to set); a body that does not end must not fill the memory."""
        content = bytearray()
        async with self._client().stream(method, url, **request) as reply:
            async for chunk in reply.aiter_bytes():
                content += chunk
                if len(content) > MAX_REPLY:
                    raise OSError(f"the reply exceeds {MAX_REPLY:,} bytes")
        return reply.status_code, bytes(content), reply.headers.get_list("set-cookie")

    def _client(self) -> Any:
        """Create the client in the loop, without cookies (rows would share a session) and proxy variables."""
        if self._http is None:
            none = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
            # Servers close idle connections after 5 s, and a request on a closing one fails.
            limits = httpx.Limits(max_keepalive_connections=self.cfg.max_connections, keepalive_expiry=2.0)
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            self._http = httpx.AsyncClient(timeout=timeout, trust_env=False, limits=limits, cookies=none)
        return self._http

    def _unknown(self, what: str, name: str, known: Sequence[str]) -> str:
        if not known and self.cfg.auto_start:
            return f"nemo_gym.config_paths={' '.join(self.cfg.config_paths)}: no {what} in these files; add its file"
        if not known:
            return f"nemo_gym.head_port={self.cfg.head_port}: the head server lists no {what}; start one"
        where = "in nemo_gym.config_paths" if self.cfg.auto_start else "on the head server"
        return f"nemo_gym.datasets=...@{name}: no such {what} {where}; {suggest(name, known)}"


def read_addresses(text: str, head: str, host: str) -> Addresses:
    """Parse the head server's reply: YAML, which some versions of the gym wrap in a JSON string."""
    try:
        tree = yaml.safe_load(text)
        tree = yaml.safe_load(tree) if isinstance(tree, str) else tree
    except (yaml.YAMLError, RecursionError, ValueError):  # ValueError: an integer with too many digits
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"{head}: not a NeMo Gym head server (configuration is not a mapping); check the port")
    return addresses_of(tree, host)


def addresses_of(tree: dict[str, Any], host: str) -> Addresses:
    """Return the addresses in a gym configuration; `host` is the address of servers that listen on all interfaces."""
    addresses = Addresses({}, {})
    for name, (kind, _, fields) in servers_of(tree, "port").items():
        if not isinstance(fields["port"], int) or kind == MODELS:
            continue
        if not 0 < fields["port"] < 2**16:
            raise UserError(f"nemo_gym: {name}: port={shorten(fields['port'])}: not between 1 and 65535")
        at = str(fields.get("host") or "")
        url = f"http://{host if at in ALL_INTERFACES else at}:{fields['port']}"
        if kind == AGENTS:
            ref = fields.get("resources_server")
            server = ref.get("name") if isinstance(ref, dict) else None
            addresses.agents[name] = (url, server if isinstance(server, str) else None)
        else:
            addresses.servers[name] = url
    return addresses


def row_body(row_json: str, prompt: Messages) -> dict[str, Any]:
    """Return the original row; a system prompt that the trainer added is added to its input too."""
    row = json.loads(row_json)
    params = row["responses_create_params"]
    items = params["input"]
    first = items[0].get("role") if isinstance(items, list) else "user"
    if prompt[0]["role"] == "system" and first != "system":
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        params["input"] = [dict(prompt[0]), *items]
    return row


def is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested in more than MAX_DEPTH levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [x for v in level if isinstance(v, (dict, list)) for x in (v.values() if isinstance(v, dict) else v)]
    return any(isinstance(x, (dict, list)) for x in level)


def join_cookies(have: str, set_cookie: Sequence[str]) -> str:
    """Return the Cookie header of the next request; new values replace old values of the same name."""
    pairs = [part.strip() for part in have.split(";") if part.strip()]
    pairs += [line.split(";", 1)[0].strip() for line in set_cookie]
    return "; ".join({pair.partition("=")[0]: pair for pair in pairs if "=" in pair}.values())


def error_text(body: bytes) -> str:
    """Return the reason in an error reply: FastAPI's list of fields, or the text."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = body.decode(errors="replace")
    detail = value.get("detail") if isinstance(value, dict) else value
    if isinstance(detail, list) and detail and isinstance(detail[0], dict) and isinstance(detail[0].get("loc"), list):
        first = detail[0]
        more = f" and {len(detail) - 1} more" if len(detail) > 1 else ""
        detail = f"{'.'.join(map(str, first['loc']))}: {first.get('msg')}{more}"
    return printable(" ".join(str(detail).split())[:200]) or "no reason given"


# requests and replies: pure functions ----------------------------------------------------------------------------


def read_reply(reply: dict[str, Any], *, has_turns: bool, url: str) -> dict[str, Any]:
    """Return the columns of an episode from the agent's reply."""
    response = reply.get("response")
    if not isinstance(response, dict) or not isinstance(response.get("output"), list):
        raise UserError("response: no output")
    if not has_turns and any(_has_text(item) for item in response["output"]):
        raise UnusableError(
            f"nemo_gym.multi_turn=True: episodes have text, but none of their turns was requested from this run; set "
            f"base_url of the gym's model server to {url}"
        )
    columns: dict[str, Any] = {"env_reward": read_reward(reply.get("reward")), "env_failed": 0.0}
    if isinstance(reply.get("reward_components"), dict):
        columns["reward_components"] = reply["reward_components"]
    return columns


def response_of(messages: Sequence[dict[str, Any]], model: str) -> dict[str, Any]:
    """Convert the messages after a prompt to a response for /verify."""
    output: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message.get("tool_call_id") or ""
            output.append({"type": "function_call_output", "call_id": call_id, "output": str(message["content"])})
            continue
        calls = message.get("tool_calls") or []
        if message.get("content") or not calls:
            text = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
            head = {"id": f"msg_{index}", "type": "message", "role": "assistant", "status": "completed"}
            output.append({**head, "content": [text]})
        for call in calls:
            function = call.get("function", call)
            name, arguments, call_id = function["name"], function["arguments"], call.get("id") or f"call_{index}"
            output.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
    head = {"id": "resp", "created_at": 0.0, "model": model, "object": "response"}
    return head | {"output": output, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def _has_text(item: Any) -> bool:
    if not isinstance(item, dict):
        raise UserError(f"output: a {type(item).__name__}, not an object")
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [content] if isinstance(content, str) else [p.get("text") for p in parts if isinstance(p, dict)]
    has_text = item.get("type") == "message" and any(isinstance(text, str) and text.strip() for text in texts)
    return has_text or item.get("type") == "function_call"
