"""NeMo Gym's servers over HTTP: where they are, and one request to one of them.

    gym = GymClient(NemoGymConfig(datasets=("rows.jsonl@math",), head_port=11000))
    gym.connect(prompts, multi_turn=False)      # asks the head server, then each server that the rows need
    future = gym.loop.start(gym.verify(row, ref))
    gym.close()

The cookie that /seed_session gives is the session: without it a server with state verifies 0.0 and says nothing. So
each verification has cookies of its own, and none are kept by the client.
"""

from __future__ import annotations

import asyncio
import http.cookiejar
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data.hints import suggest
from data.types import Messages, Prompt
from rollout.nemo_gym_options import NemoGymConfig
from rollout.servers.loop import Loop

CONNECT_S = 10.0
POLL_S = 1.0
SERVERS = "resources_servers"
AGENTS = "responses_api_agents"
EVERYWHERE = ("0.0.0.0", "::", "localhost", "")  # what a server listens on, not where it is


class GymError(Exception):
    """One request failed; `again` says whether another try may do better. `kind` is the same for like failures."""

    def __init__(self, text: str, *, kind: str, again: bool = False) -> None:
        super().__init__(text)
        self.kind, self.again = kind, again


@dataclass(frozen=True)
class Places:
    """What the head server knows, by name."""

    servers: dict[str, str]  # resource servers: address
    agents: dict[str, tuple[str, str | None]]  # address, and the resource server it works with


class GymClient:
    """Connections to the gym's servers, used from a loop of its own."""

    def __init__(self, cfg: NemoGymConfig, say: Callable[[str], None] | None = None) -> None:
        self.cfg = cfg
        self.say = say or (lambda text: print(text, file=sys.stderr))
        self.loop = Loop("nemo-gym")
        self.places = Places({}, {})
        self._http: Any = None
        self._slots: asyncio.Semaphore | None = None
        self._said: set[str] = set()

    @property
    def head(self) -> str:
        return f"http://{self.cfg.head_host}:{self.cfg.head_port}"

    def connect(self, prompts: Sequence[Prompt], *, multi_turn: bool) -> None:
        """Find the servers, and wait until those that the rows need answer; refuse rows that none is there for."""
        deadline = time.monotonic() + self.cfg.server_timeout
        text = self.loop.run(self._wait(f"{self.head}/global_config_dict_yaml", deadline, "the gym's head server"))
        self.places = read_places(text, self.head, self.cfg.head_host)
        needed: dict[str, str] = {}
        for prompt in prompts:
            ref = prompt.columns.get("nemo_gym_ref")
            if ref is None:
                continue
            try:
                name, url = self.agent_of(ref) if multi_turn else self.server_of(ref)
            except ValueError as error:
                raise ValueError(f"{prompt.source}: {error}") from None
            needed[name] = url
        for name, url in needed.items():
            self.loop.run(self._wait(f"{url}/", deadline, name))
        kind = "agents" if multi_turn else "resource servers"
        self.say(f"NeMo Gym: {kind} {', '.join(f'{name} at {url}' for name, url in sorted(needed.items()))}")

    def server_of(self, ref: dict[str, Any]) -> tuple[str, str]:
        """(name, address) of the resource server that verifies a row: the dataset's, else the row's."""
        servers, agents = self.places.servers, self.places.agents
        for name in (ref.get("server"), ref.get("name")):
            found = agents[name][1] if name in agents else name
            if found in servers:
                return found, servers[found]
            if name is not None:
                raise ValueError(self._unknown("resource server", name, [*servers, *agents]))
        raise ValueError("names no server of the gym; write PATH@SERVER in nemo_gym.datasets")

    def agent_of(self, ref: dict[str, Any]) -> tuple[str, str]:
        """(name, address) of the agent that runs a row: the dataset's, the row's, or the one with that server."""
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
            raise ValueError(
                f"nemo_gym.datasets: agents {', '.join(fits)} all have the server {wanted}; write PATH@AGENT"
            )
        raise ValueError(self._unknown("agent", str(wanted), list(agents)))

    async def verify(self, row: dict[str, Any], ref: dict[str, Any]) -> dict[str, Any]:
        """What the resource server says of a row with a response: a new session, verified, tried again if need be."""
        name, url = self.server_of(ref)

        async def once() -> dict[str, Any]:
            seed = {key: value for key, value in row.items() if key != "response"}
            cookies = await self.post(f"{url}/seed_session", seed, name, optional=True)
            return (await self.post(f"{url}/verify", row, name, cookies[1]))[0]

        return await self.retried(once, self.cfg.verify_timeout, f"{name}/verify")

    async def run(self, row: dict[str, Any], name: str, url: str) -> dict[str, Any]:
        """A whole episode by an agent."""

        async def once() -> dict[str, Any]:
            return (await self.post(f"{url}/run", row, name))[0]

        return await self.retried(once, self.cfg.run_timeout, f"{name}/run")

    async def retried(self, once: Callable[[], Any], seconds: float, what: str) -> dict[str, Any]:
        """Await it within the time, again where that may help; the time in the queue does not count."""
        if self._slots is None:  # here, as it belongs to the loop
            self._slots = asyncio.Semaphore(self.cfg.max_connections)
        for tries_left in range(self.cfg.retries, -1, -1):
            try:
                async with self._slots, asyncio.timeout(seconds):
                    return await once()
            except TimeoutError:
                raise GymError(f"{what} has not answered for {seconds:g} s", kind=f"{what} late") from None
            except GymError as error:
                if not error.again or not tries_left:
                    raise
            await asyncio.sleep(0.2)
        raise AssertionError("the last try returns or raises")

    async def post(
        self, url: str, body: dict[str, Any], name: str, cookies: str = "", *, optional: bool = False
    ) -> tuple[dict[str, Any], str]:
        """(reply, cookies for the next request of this session); optional: a server without this route has nothing."""
        import httpx

        route = url.rpartition("/")[2]
        try:
            reply = await self._client().post(url, json=body, headers={"cookie": cookies} if cookies else {})
        except (httpx.HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise GymError(f"{name}/{route} failed ({reason})", kind=f"{name}/{route} failed", again=True) from error
        if optional and reply.status_code in (404, 405):
            return {}, ""
        if reply.status_code != 200:
            text = f"{name}/{route} answered {reply.status_code} ({error_text(reply.content)})"
            raise GymError(text, kind=f"{name}/{route} {reply.status_code}", again=reply.status_code >= 500)
        try:
            value = json.loads(reply.content)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            shown = reply.content[:60]
            raise GymError(f"{name}/{route} answered {shown!r}, which is no object", kind=f"{name}/{route} garbage")
        return value, join_cookies(cookies, reply.headers.get_list("set-cookie"))

    def say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def close(self) -> None:
        """May be called twice."""
        http, self._http = self._http, None
        if http is not None:
            self.loop.run(http.aclose(), 10.0)
        self.loop.close()

    async def _wait(self, url: str, deadline: float, what: str) -> str:
        """Text of a GET, asked for until it comes."""
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
                raise ValueError(
                    f"nemo_gym.head_port={self.cfg.head_port}: {what} at {url} is not ready ({reason}); start the "
                    "gym's servers first, or raise --nemo-gym.server-timeout"
                )
            await asyncio.sleep(POLL_S)

    def _client(self) -> Any:
        """Made in the loop. Keeps no cookies: rows would share a session. Takes no proxy from the environment."""
        import httpx

        if self._http is None:
            none = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
            # Servers close idle connections after 5 s, and a request that meets the closing one fails.
            limits = httpx.Limits(
                max_connections=None, max_keepalive_connections=self.cfg.max_connections, keepalive_expiry=2.0
            )
            self._http = httpx.AsyncClient(
                timeout=httpx.Timeout(None, connect=CONNECT_S), trust_env=False, limits=limits, cookies=none
            )
        return self._http

    def _unknown(self, what: str, name: str, known: Sequence[str]) -> str:
        if not known:
            return f"nemo_gym.head_port={self.cfg.head_port}: the head server knows no {what}; start one"
        return f"nemo_gym.datasets=...@{name}: the head server knows no such {what}; {suggest(name, known)}"


def read_places(text: str, head: str, host: str) -> Places:
    """Names and addresses from the head server's reply: YAML, which versions of the gym wrap in a JSON string."""
    import yaml

    try:
        tree = yaml.safe_load(text)
        tree = yaml.safe_load(tree) if isinstance(tree, str) else tree
    except (yaml.YAMLError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise ValueError(f"{head}: is not the head server of NeMo Gym, its configuration is no mapping; check the port")
    servers: dict[str, str] = {}
    agents: dict[str, tuple[str, str | None]] = {}
    for name, entry in tree.items():
        for kind in (SERVERS, AGENTS):
            inner = entry.get(kind) if isinstance(entry, dict) else None
            # One entry, named after the code that runs; the server's own name is the outer one.
            fields = next(iter(inner.values()), None) if isinstance(inner, dict) else None
            if not isinstance(fields, dict) or not isinstance(fields.get("port"), int):
                continue
            at = str(fields.get("host") or "")
            url = f"http://{host if at in EVERYWHERE else at}:{fields['port']}"
            if kind == SERVERS:
                servers[name] = url
            else:
                ref = fields.get("resources_server")
                agents[name] = (url, ref.get("name") if isinstance(ref, dict) else None)
    return Places(servers, agents)


def row_body(row_json: str, prompt: Messages) -> dict[str, Any]:
    """The row as it was read; a system prompt that we put before the conversation goes before its input too."""
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
    """The few words of a refusal: FastAPI's list of fields, or the text as it is."""
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
