"""NeMo Gym: completions verified by its resource servers (VerifyReward), and episodes run by its agents (RunSource).

    gym = GymClient(cfg.nemo_gym)
    gym.connect(prompts, multi_turn=cfg.nemo_gym.multi_turn)
    set_up_rewards(rewards, gym, on_error)                      # `nemo_gym:verify`, one POST /verify per completion
    source = RunSource(gym, sampling, version=lambda: engine.version)      # multi_turn: one POST /run per completion

With multi_turn our own vLLM server samples the tokens: the gym's model server (its vllm_model) asks it on behalf of the
agents. With auto_start the run starts the gym's servers itself (auto_start.py) and tells them where ours is. Else ours
needs an address that is known beforehand:

    STROP_VLLM_TOKEN=... python -m rollout.serve --model M --vllm.port 8000 \\
        --vllm.extra-args="--enable-auto-tool-choice --tool-call-parser hermes"
    policy_model.responses_api_models.vllm_model: base_url http://127.0.0.1:8000/v1, api_key the token, model base,
        return_token_id_information true

Temperature, length, seed and stop ids of a request are the trainer's, whatever the row contains.

The reply of an agent to /run becomes one Completion (gym_source.py).
"""

from __future__ import annotations

import asyncio
import http.cookiejar
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.errors import UserError
from data.hints import suggest
from data.rows.nemo_gym import item_messages
from data.types import Messages, Prompt
from rollout.engine import Completion, Request, Sampling
from rollout.gyms.auto_start import GymServers, check_files
from rollout.gyms.gym_source import EpisodeError, GymSource, Turns, UnusableError, last_chain
from rollout.gyms.options import NemoGymConfig
from rollout.servers.loop import Loop, together

# Columns of a RunSource's completions, for rewards and metrics; reward_components only if the server sends them.
COLUMNS = ("env_reward", "env_failed", "num_turns", "tool_calls", "left_out_turns", "reward_components")
SEED_MASK = 2**63 - 1
CONNECT_S = 10.0
POLL_S = 1.0
SERVERS = "resources_servers"
AGENTS = "responses_api_agents"
EVERYWHERE = ("0.0.0.0", "::", "localhost", "")  # hosts that say where a server listens, not where it is
LOGP_SLACK = 1e-3  # logit minus logsumexp may round to just above 0


class VerifyReward:
    """The reward `nemo_gym:verify`: each completion is scored by the row's resource server."""

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
        """One number per row; None for rows that are not the gym's.

        A row that fails stops the run, or with on_error "none" is NaN: it gets no reward at all, and is counted.
        """
        if self.gym is None:
            raise UserError("works only in a training run, which knows the servers; see --nemo-gym.datasets")
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
            return read_reward(reply)
        except (GymError, ValueError) as error:
            if self.on_error == "stop":
                raise UserError(f"NeMo Gym: {ref['source']}: {error}") from None
            kind = error.kind if isinstance(error, GymError) else "reward"
            self.gym.log_once(kind, f"NeMo Gym: {ref['source']}: {error}; such completions get no reward")
            return math.nan


class RunSource:
    """Source of episodes run by the gym's agents: one POST /run per request.

    version(): of the weights that the server holds now.
    """

    def __init__(
        self, gym: GymClient, sampling: Sampling, *, version: Callable[[], int], vocab_size: int | None = None,
        seeded: bool = True,
    ) -> None:  # fmt: skip
        self.gym, self.sampling, self.version = gym, sampling, version
        self.vocab_size, self.seeded = vocab_size, seeded
        self._episodes = GymSource(
            self._play, gym.loop, flag="nemo_gym", title="NeMo Gym", prefix_mismatch=gym.cfg.prefix_mismatch,
            log_once=gym.log_once, hint="the logs of the gym's agent and model server may say more",
        )  # fmt: skip

    def start(self, groups: Sequence[Sequence[Request]]) -> list[Future[list[Completion]]]:
        return self._episodes.start(groups)

    def close(self) -> None:
        self._episodes.close()

    async def _play(self, request: Request, number: int) -> Completion:
        prompt, version = request.prompt, self.version()
        name, url = self.gym.agent_of(prompt.columns["nemo_gym_ref"])
        reply = await self.gym.run(self.body(prompt, name, request.seed, number), name, url)
        limits = {"max_tokens": self.sampling.max_tokens, "vocab_size": self.vocab_size}
        return read_episode(reply, prompt_ids=prompt.ids, version=version, **limits)

    def body(self, prompt: Prompt, agent: str, seed: int, number: int) -> dict[str, Any]:
        """The row with our sampling settings; the gym's model server adds `metadata` to its request."""
        row = row_body(prompt.columns["verify_extra"], prompt.prompt)
        params = {key: value for key, value in row["responses_create_params"].items() if value is not None}
        metadata = dict(params.get("metadata") or {})
        if prompt.settings:
            metadata["chat_template_kwargs"] = json.dumps(prompt.settings)
        extra = json.loads(metadata.get("extra_body") or "{}")
        # As in our own requests: stop at these ids, not at those of the model's generation_config.
        extra |= {"stop_token_ids": list(self.sampling.stop_ids), "ignore_eos": True}
        if self.seeded:
            extra["seed"] = seed & SEED_MASK
        if self.sampling.top_k:
            extra["top_k"] = self.sampling.top_k
        limit = self.sampling.max_tokens
        params |= {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p}
        params["max_output_tokens"] = min(params.get("max_output_tokens") or limit, limit)  # of one turn
        params["metadata"] = metadata | {"extra_body": json.dumps(extra)}
        return row | {
            "responses_create_params": params,
            "agent_ref": {"type": "responses_api_agents", "name": agent},
            "_ng_task_index": prompt.columns["nemo_gym_index"],
            "_ng_rollout_index": number,
        }


def set_up_rewards(rewards: Any, gym: GymClient, on_error: Literal["stop", "none"]) -> None:
    """Set the client of every `nemo_gym:verify` among the rewards."""
    for function in rewards.functions:
        if isinstance(function.call, VerifyReward):
            function.call.gym, function.call.on_error = gym, on_error


# the gym's servers -----------------------------------------------------------------------------------------------


class GymError(EpisodeError):
    """A request failed. `again`: whether a retry may work; `kind` groups similar failures."""

    def __init__(self, text: str, *, kind: str, again: bool = False) -> None:
        super().__init__(text, kind=kind)
        self.again = again


@dataclass(frozen=True)
class Places:
    """Servers that the head server lists, by name."""

    servers: dict[str, str]  # resource servers: address
    agents: dict[str, tuple[str, str | None]]  # (address, its resource server)


class GymClient:
    """HTTP to the gym's servers, in a background loop.

    The cookie of /seed_session identifies the session: without it, a server with state verifies 0.0 without an error.
    So each verification has its own cookies, and the client keeps none.
    """

    def __init__(self, cfg: NemoGymConfig, log: Callable[[str], None] | None = None) -> None:
        self.cfg = cfg
        self.log = log or (lambda text: print(text, file=sys.stderr))
        self.loop = Loop("nemo-gym")
        self.places = Places({}, {})
        self.servers: GymServers | None = None  # with auto_start
        self._needed: set[str] = set()
        self._http: Any = None
        self._slots: asyncio.Semaphore | None = None
        self._reported: set[str] = set()
        if cfg.auto_start:
            check_files(cfg)

    @property
    def head(self) -> str:
        return f"http://{self.cfg.head_host}:{self.cfg.head_port}"

    def connect(self, prompts: Sequence[Prompt], *, multi_turn: bool) -> None:
        """Find the servers and wait until those that the rows need answer; refuse rows without a server.

        With auto_start the servers are only looked up in the gym's files; start() follows.
        """
        deadline = time.monotonic() + self.cfg.startup_s
        if self.cfg.auto_start:
            self.servers = GymServers(self.cfg, self.log)
            self.places = places_of(self.servers.tree, self.cfg.head_host)
        else:
            text = self.loop.run(self._wait(f"{self.head}/global_config_dict_yaml", deadline, "the gym's head server"))
            self.places = read_places(text, self.head, self.cfg.head_host)
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

    def start(self, model: Sequence[tuple[str, str | None]], log_dir: Path) -> None:
        """With auto_start, after connect(): start the servers that the rows need. `model`: see GymServers."""
        assert self.servers is not None, "connect() comes before start()"
        self.servers.start(self._needed, model, log_dir)

    def server_of(self, ref: dict[str, Any]) -> tuple[str, str]:
        """(name, address) of the resource server for a row: the dataset's, else the row's."""
        servers, agents = self.places.servers, self.places.agents
        for name in (ref.get("server"), ref.get("name")):
            found = agents[name][1] if name in agents else name
            if found in servers:
                return found, servers[found]
            if name is not None:
                raise UserError(self._unknown("resource server", name, [*servers, *agents]))
        raise UserError("names no server of the gym; write PATH@SERVER in nemo_gym.datasets")

    def agent_of(self, ref: dict[str, Any]) -> tuple[str, str]:
        """(name, address) of the agent for a row: the dataset's, the row's, or the one with that resource server."""
        agents = self.places.agents
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
                f"nemo_gym.datasets: agents {', '.join(fits)} all have the server {wanted}; write PATH@AGENT"
            )
        raise UserError(self._unknown("agent", str(wanted), list(agents)))

    async def verify(self, row: dict[str, Any], ref: dict[str, Any]) -> dict[str, Any]:
        """The resource server's reply for a row with a response: new session, /verify, retries."""
        name, url = self.server_of(ref)

        async def once() -> Any:
            seed = {key: value for key, value in row.items() if key != "response"}
            _, cookies = await self.post(f"{url}/seed_session", seed, name, optional=True)
            return await self.post(f"{url}/verify", row, name, cookies)

        reply, _ = await self.retried(once, self.cfg.verify_timeout, f"{name}/verify")
        return reply

    async def run(self, row: dict[str, Any], name: str, url: str) -> dict[str, Any]:
        """One episode, run by an agent."""

        reply, _ = await self.retried(lambda: self.post(f"{url}/run", row, name), self.cfg.run_timeout, f"{name}/run")
        return reply

    async def retried(self, once: Callable[[], Any], seconds: float, what: str) -> Any:
        """Await it with a time limit and retries; time in the queue does not count."""
        if self._slots is None:  # created here because it belongs to the loop
            self._slots = asyncio.Semaphore(self.cfg.max_connections)
        for tries_left in range(self.cfg.retries, -1, -1):
            try:
                async with self._slots, asyncio.timeout(seconds):
                    return await once()
            except TimeoutError:
                raise GymError(f"{what} has not answered for {seconds:g} s", kind=f"{what} late") from None
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
        """(reply, cookies for the next request of the session); optional: the server may lack this route."""
        import httpx

        what = f"{name}/{url.rpartition('/')[2]}"
        try:
            reply = await self._client().post(url, json=body, headers={"cookie": cookies} if cookies else {})
        except (httpx.HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise GymError(f"{what} failed ({reason})", kind=f"{what} failed", again=True) from error
        status = reply.status_code
        if optional and status in (404, 405):
            return {}, ""
        if status != 200:
            text = f"{what} answered {status} ({error_text(reply.content)})"
            raise GymError(text, kind=f"{what} {status}", again=status >= 500)
        try:
            value = json.loads(reply.content)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            shown = reply.content[:60]
            raise GymError(f"{what} answered {shown!r}, which is not an object", kind=f"{what} garbage")
        return value, join_cookies(cookies, reply.headers.get_list("set-cookie"))

    def log_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self.log(text)

    def close(self) -> None:
        """May be called twice."""
        http, self._http = self._http, None
        if http is not None:
            self.loop.run(http.aclose(), 10.0)
        self.loop.close()
        if self.servers is not None:
            self.servers.stop()

    async def _wait(self, url: str, deadline: float, what: str) -> str:
        """Text of a GET, repeated until it succeeds."""
        import httpx

        while True:
            try:
                reply = await self._client().get(url, timeout=max(deadline - time.monotonic(), 1.0))
                if reply.status_code == 200:
                    return reply.text
                reason = f"answers {reply.status_code}"
            except (httpx.HTTPError, OSError) as error:
                reason = str(error) or type(error).__name__
            if time.monotonic() + POLL_S > deadline:
                raise UserError(
                    f"nemo_gym.head_port={self.cfg.head_port}: {what} at {url} is not ready ({reason}); start the "
                    "gym's servers first, or raise --nemo-gym.server-timeout"
                )
            await asyncio.sleep(POLL_S)

    def _client(self) -> Any:
        """Created in the loop. Keeps no cookies, else rows would share a session; ignores proxy variables."""
        import httpx

        if self._http is None:
            none = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
            # Servers close idle connections after 5 s, and a request on a closing one fails.
            limits = httpx.Limits(max_keepalive_connections=self.cfg.max_connections, keepalive_expiry=2.0)
            timeout = httpx.Timeout(None, connect=CONNECT_S)
            self._http = httpx.AsyncClient(timeout=timeout, trust_env=False, limits=limits, cookies=none)
        return self._http

    def _unknown(self, what: str, name: str, known: Sequence[str]) -> str:
        if not known and self.cfg.auto_start:
            return f"nemo_gym.config_paths={' '.join(self.cfg.config_paths)}: describe no {what}; name a file that does"
        if not known:
            return f"nemo_gym.head_port={self.cfg.head_port}: the head server knows no {what}; start one"
        who = "the files of nemo_gym.config_paths describe" if self.cfg.auto_start else "the head server knows"
        return f"nemo_gym.datasets=...@{name}: {who} no such {what}; {suggest(name, known)}"


def read_places(text: str, head: str, host: str) -> Places:
    """Names and addresses from the head server's reply: YAML, which some versions of the gym wrap in a JSON string."""
    import yaml

    try:
        tree = yaml.safe_load(text)
        tree = yaml.safe_load(tree) if isinstance(tree, str) else tree
    except (yaml.YAMLError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise UserError(f"{head}: is not the head server of NeMo Gym (configuration is not a mapping); check the port")
    return places_of(tree, host)


def places_of(tree: dict[str, Any], host: str) -> Places:
    """Names and addresses in a configuration of the gym; `host` is where servers are that listen everywhere."""
    places = Places({}, {})
    for name, entry in tree.items():
        for kind in (SERVERS, AGENTS):
            inner = entry.get(kind) if isinstance(entry, dict) else None
            # One entry, named after its code; the server's name is the outer key.
            fields = next(iter(inner.values()), None) if isinstance(inner, dict) else None
            if not isinstance(fields, dict) or not isinstance(fields.get("port"), int):
                continue
            at = str(fields.get("host") or "")
            url = f"http://{host if at in EVERYWHERE else at}:{fields['port']}"
            if kind == SERVERS:
                places.servers[name] = url
            else:
                ref = fields.get("resources_server")
                places.agents[name] = (url, ref.get("name") if isinstance(ref, dict) else None)
    return places


def row_body(row_json: str, prompt: Messages) -> dict[str, Any]:
    """The row as it was read; a system prompt that we added to the prompt is added to its input too."""
    row = json.loads(row_json)
    params = row["responses_create_params"]
    given = params["input"]
    first = given[0].get("role") if isinstance(given, list) else "user"
    if prompt[0]["role"] == "system" and first != "system":
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        params["input"] = [dict(prompt[0]), *items]
    return row


def join_cookies(have: str, set_cookie: Sequence[str]) -> str:
    """The Cookie header of the next request: new values replace old ones of the same name."""
    pairs = [part.strip() for part in have.split(";") if part.strip()]
    pairs += [line.split(";", 1)[0].strip() for line in set_cookie]
    return "; ".join({pair.partition("=")[0]: pair for pair in pairs if "=" in pair}.values())


def error_text(body: bytes) -> str:
    """The reason in an error reply: FastAPI's list of fields, or the text."""
    try:
        value = json.loads(body)
    except ValueError:
        value = body.decode(errors="replace")
    detail = value.get("detail") if isinstance(value, dict) else value
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        first = detail[0]
        more = f" and {len(detail) - 1} more" if len(detail) > 1 else ""
        return f"{'.'.join(map(str, first.get('loc', ())))}: {first.get('msg')}{more}"
    return " ".join(str(detail).split())[:200] or "no reason given"


# requests and replies: plain functions, no connection ------------------------------------------------------------


def read_reward(reply: dict[str, Any]) -> float:
    reward = reply.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise UserError(f"reward={reward!r}: is not a finite number")
    return float(reward)


def read_turns(items: Sequence[Any], vocab_size: int | None, version: int) -> list[Turns]:
    """The model's turns among the items of a response. A turn's ids are in its last item."""
    turns, has_text = [], False
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise UserError(f"output[{number}]: is a {type(item).__name__}, not an object")
        if item.get("generation_token_ids") is None:
            has_text = has_text or item.get("type") == "function_call" or _has_text(item)
            continue
        turns.append(_turn(item, number, vocab_size, version))
    turns = [turn for turn in turns if turn.ids]
    if has_text and not turns:
        raise UnusableError(
            "nemo_gym.multi_turn=True: the episodes come without token ids; set return_token_id_information: true in "
            "the gym's model server"
        )
    return turns


def read_episode(
    reply: dict[str, Any], *, prompt_ids: list[int], max_tokens: int, version: int, vocab_size: int | None = None
) -> Completion:
    """An agent's reply as a Completion."""
    response = reply.get("response")
    if not isinstance(response, dict) or not isinstance(response.get("output"), list):
        raise UserError("response: has no output")
    items = response["output"]
    reward = read_reward(reply)
    turns = read_turns(items, vocab_size, version)
    columns: dict[str, Any] = {"env_reward": reward, "env_failed": 0.0}
    if isinstance(reply.get("reward_components"), dict):
        columns["reward_components"] = reply["reward_components"]
    short = bool(response.get("incomplete_details")) or response.get("status") == "incomplete"
    messages = item_messages(items, "output")
    limits = {"prompt_ids": prompt_ids, "max_tokens": max_tokens}
    return last_chain(turns, **limits, short=short, messages=messages, columns=columns)


def response_of(messages: Sequence[dict[str, Any]], model: str) -> dict[str, Any]:
    """The messages after a prompt as a response for /verify."""
    output: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message.get("tool_call_id") or ""
            output.append({"type": "function_call_output", "call_id": call_id, "output": str(message["content"])})
            continue
        calls = message.get("tool_calls") or []
        if message.get("content") or not calls:
            text = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
            head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed"}
            output.append({**head, "content": [text]})
        for call in calls:
            function = call.get("function", call)
            name, arguments, call_id = function["name"], function["arguments"], call.get("id") or f"call_{number}"
            output.append({"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments})
    head = {"id": "resp", "created_at": 0.0, "model": model, "object": "response"}
    return head | {"output": output, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def _turn(item: dict[str, Any], number: int, vocab_size: int | None, version: int) -> Turns:
    try:  # some versions of the gym send ids as text
        ids, prompt_ids = ([int(x) for x in item[key]] for key in ("generation_token_ids", "prompt_token_ids"))
    except (KeyError, TypeError, ValueError):
        ids, prompt_ids = [], []
    logps = item.get("generation_log_probs")
    if not prompt_ids or not isinstance(logps, list) or len(logps) != len(ids):
        raise UserError(f"output[{number}]: its token ids and log-probs do not match")
    if not all(isinstance(logp, (int, float)) and -math.inf < logp <= LOGP_SLACK for logp in logps):
        raise UserError(f"output[{number}]: has an invalid log-prob")
    if min(prompt_ids + ids) < 0 or (vocab_size is not None and max(prompt_ids + ids) >= vocab_size):
        raise UserError(f"output[{number}]: an id outside the vocabulary of {vocab_size}; is it another model's?")
    logps = [min(float(logp), 0.0) for logp in logps]
    return Turns(prompt_ids, ids, logps, [True] * len(ids), versions=((version, len(ids)),))


def _has_text(item: dict[str, Any]) -> bool:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [content] if isinstance(content, str) else [p.get("text") for p in parts if isinstance(p, dict)]
    return item.get("type") == "message" and any(isinstance(text, str) and text.strip() for text in texts)
