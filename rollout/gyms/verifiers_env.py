"""Environments of the package verifiers (0.4, its `verifiers.v1`): rows, episodes and rewards, sampled by the run's
vLLM servers.

    env = VerifiersEnv(cfg.verifiers, model=policy.source, log=run.note)
    prompts = env.prompts(tokenizer)                   # one per row (Task) of the environment
    env.open()                                         # start shared services: tool servers, the token server below
    source = env.source(engine, sampling)              # a Source: one episode per request
    -> Completion(ids=[turns and the tokens between them], columns={"env_reward": 1.0, "num_turns": 2, ...})

The package renders each turn's prompt to token ids (TrainClient, with the package renderers) and requests a completion
of these ids from TokenServer, which listens on the loopback interface and passes each request to the engine. Therefore
a turn has exactly the token ids and log-probs that vLLM returned, weight versions are known, several servers and
adapters work, and the trainer's sampling settings apply. gym_source.py joins the turns.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.formats.registry import apply
from data.rows.prompts import fits, log_left_out, tokenise_prompt
from data.sources import Row
from data.types import Messages, Prompt
from data.user_code import describe_error, load_file, load_module, where_raised
from rollout.engine import Completion, Request, Sampling
from rollout.episodes.turns import turn_seed
from rollout.gyms.gym_source import EpisodeError, GymSource, TurnChain, UnusableError, last_chain, read_reward
from rollout.gyms.verifiers_options import VerifiersConfig
from rollout.servers.loop import Loop

COLUMNS = ("env_reward", "env_failed", "num_turns", "tool_calls", "left_out_turns", "reward_components")
INDEX = "verifiers_index"  # column: index of the row in the environment
INSTALL = "pip install -e '.[verifiers]'"
# Names that this file uses; a version of the package without one of them is rejected.
NEEDED = (
    "Env.run_slot", "Env.serving", "Env.slots", "EnvConfig.agent_harnesses", "Episode", "ModelContext", "PrimeConfig",
    "SamplingConfig", "Taskset.take", "Trace.stop", "TrainClientConfig", "load_environment", "load_harness",
    "resolve_env_config",
)  # fmt: skip
MODEL = "policy"  # model name in requests; TokenServer has one model
SESSION = "X-Session-ID"  # request header with the trace id
OUT_OF_TOKENS = "max_completion_length"  # stop condition of an episode that has used up its tokens
CLOSE_S = 30.0


class VerifiersEnv:
    """A loaded environment; raises for unsupported settings before anything is sampled."""

    def __init__(
        self, cfg: VerifiersConfig, *, model: str, chat_template_kwargs: Mapping[str, Any] | None = None,
        log: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        assert cfg.env is not None, cfg
        self.cfg, self.log = cfg, log
        self.template_kwargs = dict(chat_template_kwargs or {})
        self.vf = import_verifiers(cfg.env)
        self.env, self.tasks = load_tasks(self.vf, cfg)
        try:
            # The URL contains the secret; with the default variable the client would send the API key of a service.
            self._client = self.vf.TrainClientConfig(
                api_key_var="STROP_NO_KEY", renderer=cfg.renderer or None, renderer_model_name=model
            )
        except ValueError as error:
            raise UserError(f"verifiers.renderer={cfg.renderer}: {describe_error(error)}") from None
        self.loop: Loop | None = None
        self._server: TokenServer | None = None
        self._slots: asyncio.Semaphore | None = None
        self._serving: asyncio.Task[None] | None = None
        self._reported: set[str] = set()

    def prompts(
        self, tokenizer: Any, *, system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None, max_prompt_length: int | None = None,
        context_length: int | None = None, max_completion_length: int = 0,
    ) -> list[Prompt]:  # fmt: skip
        """Return all rows in order; skip prompts longer than max_prompt_length and log how many."""
        self._check_renderer(tokenizer)
        base = set(self.vf.TaskData.model_fields)
        prompts: list[Prompt] = []
        for index, task in enumerate(self.tasks):
            row = Row(source=f"{self.cfg.env}:{index}", columns={})
            try:
                row.columns["prompt"] = opening(task.data)
            except ValueError as error:
                raise UserError(f"{row.source}: {error}") from None
            prompt = apply(tokenise_prompt, row, tokenizer, system_prompt, chat_template_kwargs)
            if not fits(row.source, prompt.ids, max_prompt_length, context_length, max_completion_length):
                continue
            columns = {key: value for key, value in task.data.model_dump(mode="json").items() if key not in base}
            prompts.append(
                Prompt(source=row.source, prompt=prompt.prompt, ids=prompt.ids, columns=columns | {INDEX: index},
                       settings=prompt.settings)
            )  # fmt: skip
        log_left_out(len(prompts), len(self.tasks), max_prompt_length)
        return prompts

    def open(self) -> None:
        """Start the services that all episodes share."""
        self.loop = shared_loop()
        try:
            self.loop.run(self._open())
        except Exception as error:  # the environment's code may raise anything
            self.close()
            raise UserError(f"verifiers.env={self.cfg.env}: failed to start ({describe_error(error)})") from None

    def source(self, engine: Any, sampling: Sampling) -> GymSource:
        """Return a source of episodes sampled by this engine, which has vLLM servers."""
        assert self.loop is not None, "open() comes before source()"
        context = min(member.server.info.model_len for member in engine.pool.members)

        async def ask(request: Request, sampling: Sampling) -> Completion:
            return await asyncio.wrap_future(engine.loop.start(engine.complete(request, sampling)))

        async def play(request: Request, index: int) -> Completion:
            return await self._play(request, lambda trace: AgentTurns(trace, request.seed, sampling, context, ask))

        return GymSource(
            play, self.loop, flag="verifiers", title="verifiers", prefix_mismatch=self.cfg.prefix_mismatch,
            log_once=self.log_once, hint="see the first failure of each kind in the run's log",
        )  # fmt: skip

    def log_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self.log(text)

    def close(self) -> None:
        """May be called twice."""
        loop, self.loop = self.loop, None
        if loop is None:
            return
        try:
            loop.run(self._close(), CLOSE_S)
        except Exception as error:
            self.log(f"verifiers: the environment failed to shut down ({describe_error(error)})")

    def _check_renderer(self, tokenizer: Any) -> None:
        """Create the renderer that the package creates in every episode, to raise its errors early."""
        from renderers import create_renderer  # a dependency of verifiers

        kwargs = self.template_kwargs or None
        try:
            renderer = create_renderer(tokenizer, self._client.renderer, chat_template_kwargs=kwargs)
        except Exception as error:
            raise UserError(f"verifiers.renderer={self.cfg.renderer}: {describe_error(error)}") from None
        if not getattr(renderer, "supports_tools", True):
            self.log_once(
                "renderer",
                "verifiers: rendering prompts with the model's chat template, without tool calls; an environment with "
                "tools requires --verifiers.renderer",
            )

    async def _open(self) -> None:
        self._server = TokenServer()
        self._slots = asyncio.Semaphore(self.cfg.max_concurrent)
        settings = {"chat_template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        client = self._client.model_copy(update={"base_url": await self._server.open()})
        sampling = self.vf.SamplingConfig(**settings)  # AgentTurns sets everything else
        self._context = self.vf.ModelContext(model=MODEL, client=client, sampling=sampling)
        # In a separate task, because the task that enters serving() must also exit it.
        ready, self._end = asyncio.get_running_loop().create_future(), asyncio.Event()
        self._serving = asyncio.ensure_future(self._serve(ready))
        await asyncio.wait([ready, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            failed, self._serving = self._serving, None
            failed.result()

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        async with self.env.serving():
            ready.set_result(None)
            await self._end.wait()

    async def _close(self) -> None:
        if self._serving is not None:
            self._end.set()
            await asyncio.wait([self._serving])
        if self._server is not None:
            await self._server.close()
        if self._serving is not None:
            self._serving.result()

    async def _play(self, request: Request, begin: Callable[[Any], AgentTurns]) -> Completion:
        assert self._server is not None and self._slots is not None
        prompt, agents = request.prompt, {}

        def on_trace(trace: Any) -> None:
            agents[trace.id] = self._server.agents[trace.id] = begin(trace)

        try:
            (slot,) = self.env.slots(self.tasks[prompt.columns[INDEX]])
            async with self._slots, asyncio.timeout(self.cfg.timeout):
                episode = await self.env.run_slot(slot, self._context, on_trace=on_trace)
        except TimeoutError:
            raise EpisodeError(f"the episode exceeded timeout={self.cfg.timeout:g} s", kind="late") from None
        except Exception as error:  # the environment's code may raise anything
            raise EpisodeError(f"{describe_error(error)}{where_raised(error)}", kind=type(error).__name__) from None
        finally:
            for trace_id in agents:
                self._server.agents.pop(trace_id, None)
        for agent_turns in agents.values():
            if agent_turns.error is not None:  # of the vLLM servers, not of the environment
                raise UnusableError(str(agent_turns.error)) from agent_turns.error
        return read_episode(episode, agents, self.cfg, prompt_ids=prompt.ids)


@functools.cache
def shared_loop() -> Loop:
    """Return the loop of all environments in this process: a lock in the package renderers belongs to one loop."""
    return Loop("verifiers")


# the package and the environment ---------------------------------------------------------------------------------


def import_verifiers(env: str) -> Any:
    """Return the package's API; raise if it is missing or has the wrong version."""
    label = f"verifiers.env={env}"
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{label}: the package verifiers is not installed; {INSTALL}") from None
    try:
        import verifiers.v1 as vf
    except ModuleNotFoundError as error:
        if error.name != "verifiers.v1":
            raise UserError(f"{label}: verifiers cannot be imported ({describe_error(error)}); {INSTALL}") from None
        raise UserError(f"{label}: verifiers {version} has no verifiers.v1; {INSTALL}") from None
    missing = [name for name in NEEDED if not _has(vf, name)]
    if missing:
        raise UserError(f"{label}: verifiers {version} has no {', '.join(missing)}; install verifiers 0.4")
    return vf


def load_tasks(vf: Any, cfg: VerifiersConfig) -> tuple[Any, list[Any]]:
    """Load the environment and its rows."""
    label = f"verifiers.env={cfg.env}"
    try:
        name = plugin_name(cfg.env, label)
        settings = {**cfg.args, "taskset": {**(cfg.args.get("taskset") or {}), "id": name}}
        env = vf.load_environment(vf.resolve_env_config(set_runtimes(vf, settings, label)))
        rows = env.taskset if cfg.rows is None else env.taskset.take(cfg.rows)
        if not rows.bounded:
            raise UserError(f"{label}: the number of rows is infinite; set --verifiers.rows")
        tasks = list(rows)
    except ValueError as error:
        if str(error).startswith("verifiers."):
            raise
        raise UserError(describe_load_error(error, label)) from None
    except ModuleNotFoundError as error:
        if error.name is not None and error.name != name.replace("-", "_").lower():  # imported by the environment
            raise UserError(describe_load_error(error, label)) from None
        raise UserError(
            f"{label}: no such environment, neither installed nor as a module in {Path.cwd()}; check the name"
        ) from None
    except Exception as error:  # importing and loading run the environment's code
        raise UserError(describe_load_error(error, label)) from None
    if not tasks:
        raise UserError(f"{label}: no rows; check --verifiers.args")
    return env, tasks


def plugin_name(spec: str, label: str) -> str:
    """Return the name under which verifiers finds the environment; load and register a file or dotted module."""
    if spec.endswith(".py"):
        path = Path(spec).expanduser().resolve()
        module, name = load_file(path, label), path.stem
    elif "." in spec and not set("/@") & set(spec):
        module, name = load_module(spec, label), spec.replace(".", "_")
    else:
        return spec
    name = name.replace("-", "_").lower()
    if sys.modules.setdefault(name, module) is not module:
        raise UserError(f"{label}: another module has the name {name!r}; rename the file")
    return name


def set_runtimes(vf: Any, settings: dict[str, Any], label: str) -> dict[str, Any]:
    """Set the runtime of agents without one: this machine for agents that run no code.

    The package's default is a remote sandbox. For an agent that runs code the user must choose.
    """
    config = vf.resolve_env_config(settings)
    for role, harness in config.agent_harnesses().items():
        agent = settings.get(role) or {}
        if "runtime" in agent or getattr(config, role).runtime != vf.PrimeConfig():
            continue
        if vf.load_harness(harness).EXECUTES_CODE:
            raise UserError(
                f"{label}: {role} runs code (harness {harness.id}); choose where with --verifiers.args "
                f'\'{{"{role}": {{"runtime": {{"type": "docker"}}}}}}\', or disable it with '
                f'\'{{"{role}": {{"harness": {{"id": "null"}}}}}}\''
            )
        settings = {**settings, role: {**agent, "runtime": {"type": "subprocess"}}}
    return settings


def describe_load_error(error: Exception, label: str) -> str:
    """Describe the error in one sentence; for a pydantic error, name the first invalid setting."""
    if hasattr(error, "errors") and callable(error.errors):
        first = error.errors()[0]
        return f"verifiers.args.{'.'.join(map(str, first['loc']))}: {first['msg']}; see the settings of {label[14:]}"
    return f"{label}: cannot be loaded ({describe_error(error)}{where_raised(error)})"


def opening(data: Any) -> Messages:
    """Return the first messages of a row."""
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [message_of(message) for message in data.prompt or ()]
    if not any(message["role"] == "user" for message in messages):  # the environment opens the conversation
        messages.append({"role": "user", "content": data.description or data.name or "..."})
    return messages


def message_of(message: Any) -> dict[str, Any]:
    """Convert a verifiers message for chat templates and rewards."""
    parts = message.content if isinstance(message.content, list) else []
    if any(part.type != "text" for part in parts):
        raise UserError("images are not supported; only text is")
    text = "".join(part.text for part in parts) if parts else message.content or ""
    converted = {"role": message.role, "content": text}
    calls = getattr(message, "tool_calls", None) or ()
    if calls:
        converted["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    if message.role == "tool":
        converted["tool_call_id"] = message.tool_call_id
    return converted


def _has(module: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        module = getattr(module, name, None)
    return module is not None


# token requests, and the episode from them -----------------------------------------------------------------------


class AgentTurns:
    """Turns of one agent in one episode (a Trace), sampled by the engine."""

    def __init__(
        self,
        trace: Any,
        seed: int,
        sampling: Sampling,  # max_tokens limits the whole episode
        context: int,  # maximum tokens per sequence on the servers
        ask: Callable[[Request, Sampling], Any],
    ) -> None:
        self.trace, self.seed, self.sampling, self.context, self.ask = trace, seed, sampling, context, ask
        self.turns: list[TurnChain] = []
        self.truncated = False  # the last turn was truncated, or no tokens were left for another turn
        self.error: ValueError | None = None  # error of the vLLM servers

    async def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and reply of vLLM's token route; of the parameters, use only max_tokens and stop ids."""
        if body.get("features") or body.get("content_parts"):
            self.error = UnusableError("verifiers: images are not supported; only text is")
            return 400, {"error": {"message": str(self.error)}}
        prompt_ids, params = body.get("token_ids"), body.get("sampling_params")
        params = params if isinstance(params, dict) else {}
        if not is_ids(prompt_ids) or not prompt_ids:
            return 400, {"error": {"message": "token_ids: not a list of ids"}}
        limit, stop_ids = params.get("max_tokens"), params.get("stop_token_ids") or []
        if not is_ids(stop_ids) or not is_ids([limit or 1]):
            return 400, {"error": {"message": "sampling_params: stop_token_ids or max_tokens is not a number"}}
        if self.turns and self.turns[-1].prompt_ids == prompt_ids:
            self.turns.pop()  # a retry: the previous reply was not used
        before = len(prompt_ids) - len(self.turns[0].prompt_ids) if self.turns else 0
        tokens_left = min(self.sampling.max_tokens - max(before, 0), self.context - len(prompt_ids))
        if tokens_left < 1:
            self.trace.stop(OUT_OF_TOKENS)  # the environment ends and scores the episode
            self.truncated = True
            return 400, {"error": {"message": f"{OUT_OF_TOKENS}={self.sampling.max_tokens}: no tokens are left"}}
        sampling = replace(
            self.sampling,
            max_tokens=min(limit or tokens_left, tokens_left),
            stop_ids=tuple(dict.fromkeys((*self.sampling.stop_ids, *stop_ids))),
        )
        request = Request(prompt_ids=prompt_ids, seed=turn_seed(self.seed, len(self.turns)))
        try:
            completion = await self.ask(request, sampling)
        except ValueError as error:
            self.error = error
            return 400, {"error": {"message": str(error)}}
        ids, logps = completion.ids, completion.logps
        mask, versions = [True] * len(ids), tuple(completion.versions)
        self.turns.append(TurnChain(prompt_ids, ids, logps, mask, versions=versions))
        self.truncated = completion.finish_reason == "length"
        pairs = zip(ids, logps, strict=True)
        content = [{"token": f"token_id:{token}", "logprob": logp, "top_logprobs": []} for token, logp in pairs]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}}
        choice["finish_reason"] = completion.finish_reason
        return 200, {"request_id": secrets.token_hex(8), "choices": [choice]}


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


class TokenServer:
    """vLLM's token route on the loopback interface; a request header identifies the agent and episode.

    The URL contains a secret, so that other users of the machine cannot send requests.
    """

    def __init__(self) -> None:
        self.agents: dict[str, AgentTurns] = {}
        self._runner: Any = None

    async def open(self) -> str:
        """Start to listen and return the base URL."""
        from aiohttp import web  # a dependency of verifiers

        secret = secrets.token_urlsafe(16)
        app = web.Application(client_max_size=2**28)
        app.router.add_post(f"/{secret}/inference/v1/generate", self._generate)
        # If the client disconnects, cancel the request, including on the vLLM server.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/{secret}/v1"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        agent_turns = self.agents.get(request.headers.get(SESSION, ""))
        if agent_turns is None:  # the episode has ended
            return web.json_response({"error": {"message": "no such episode"}}, status=400)
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return web.json_response({"error": {"message": "the body is not a JSON object"}}, status=400)
        status, reply = await agent_turns.answer(body)
        return web.json_response(reply, status=status)


def read_episode(
    episode: Any, agents: Mapping[str, AgentTurns], cfg: VerifiersConfig, *, prompt_ids: list[int]
) -> Completion:
    """Convert an episode to a Completion: the turns and the reward of the trained agent."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        kind, text = (errors[-1].type, errors[-1].message) if errors else ("failed", "no reason given")
        raise EpisodeError(f"{kind}: {' '.join(text.split())[:300]}", kind=kind)
    traces = [one for one in episode.traces if one.agent.trainable and cfg.agent in (None, one.agent.name)]
    if len(traces) != 1:
        names = ", ".join(sorted({one.agent.name for one in episode.traces})) or "none"
        raise UnusableError(
            f"verifiers.agent={cfg.agent}: an episode has {len(traces)} conversations to train on instead of one; name "
            f"an agent ({names}) that runs once per episode"
        )
    (trace,) = traces
    reward = read_reward(trace.reward)
    agent = agents[trace.id]
    nodes = trace.branches[-1].nodes if trace.branches else []
    first = next((i for i, node in enumerate(nodes) if node.sampled), len(nodes))
    columns = {
        "env_reward": reward,
        "env_failed": 0.0,
        "reward_components": {name: one.score for name, one in trace.rewards.items() if one is not None},
    }
    return last_chain(
        agent.turns, prompt_ids=prompt_ids, max_tokens=agent.sampling.max_tokens,
        truncated=agent.truncated or trace.is_truncated, columns=columns,
        messages=[message_of(node.message) for node in nodes[first:]],
    )  # fmt: skip
