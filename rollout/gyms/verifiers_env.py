"""Environments of the package verifiers (0.4, its `verifiers.v1`): rows, episodes and rewards, sampled by the policy.

    env = VerifiersEnv(cfg.verifiers, model=policy.source, log=run.note)
    prompts = env.prompts(tokenizer)                   # one per row (Task) of the environment
    env.open()                                         # start shared services, such as tool servers
    source = env.source(endpoint, sampling)            # a Source: one episode per request
    -> Completion(ids=[turns and the tokens between them], columns={"env_reward": 1.0, "num_turns": 2, ...})

The package renders each turn's prompt to token ids (TrainClient, with the package renderers) and requests a completion
of these ids from the endpoint (episodes/endpoint.py, its route `generate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
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
from rollout.episodes.endpoint import Endpoint
from rollout.episodes.session import Session
from rollout.gyms.gym_source import (
    COLUMNS,
    EpisodeError,
    GymSource,
    UnusableError,
    log_too_long,
    once_per_kind,
    read_reward,
)
from rollout.gyms.verifiers_options import VerifiersConfig
from rollout.servers.loop import Loop

INDEX = "verifiers_index"  # column: index of the row in the environment
INSTALL = "pip install -e '.[verifiers]'"
# Names that this file uses; a version of the package without one of them is rejected.
NEEDED = (
    "Env.run_slot", "Env.serving", "Env.slots", "EnvConfig.agent_harnesses", "Episode", "ModelContext", "PrimeConfig",
    "SamplingConfig", "Taskset.take", "Trace.stop", "TrainClientConfig", "load_environment", "load_harness",
    "resolve_env_config",
)  # fmt: skip
MODEL = "policy"  # model name in requests; the endpoint has one model
OUT_OF_TOKENS = "max_completion_length"  # stop condition of an episode that has used up its tokens
CLOSE_S = 30.0


class VerifiersEnv:
    """A loaded environment; raises for unsupported settings before anything is sampled."""

    columns = COLUMNS

    def __init__(
        self, cfg: VerifiersConfig, *, model: str, chat_template_kwargs: Mapping[str, Any] | None = None,
        log: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        assert cfg.env is not None, cfg
        self.cfg, self.log, self.log_once = cfg, log, once_per_kind(log)
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
        self._slots = asyncio.Semaphore(cfg.max_concurrent)
        self._serving: asyncio.Task[None] | None = None

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

    def source(self, endpoint: Endpoint | None, sampling: Sampling) -> GymSource:
        """Return a source of episodes; `endpoint` is None on ranks that never start one."""
        return GymSource(
            functools.partial(self._play, sampling), endpoint, loop=self.loop, flag="verifiers",
            title="verifiers", prefix_mismatch=self.cfg.prefix_mismatch, log_once=self.log_once,
            hint="lines above that begin with 'verifiers:' show the first failure of each kind",
        )  # fmt: skip

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

    def context(self, endpoint: Endpoint) -> Any:
        """Return the package's settings of its model; the URL contains the endpoint's token."""
        settings = {"chat_template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        url = endpoint.url.replace("/v1", f"/{endpoint.token}/v1")
        client = self._client.model_copy(update={"base_url": url})
        sampling = self.vf.SamplingConfig(**settings)  # the session sets everything else
        return self.vf.ModelContext(model=MODEL, client=client, sampling=sampling)

    async def _open(self) -> None:
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
            self._serving.result()

    async def _play(self, sampling: Sampling, endpoint: Endpoint, request: Request, index: int) -> Completion:
        assert request.prompt is not None
        prompt, sessions = request.prompt, {}

        with contextlib.ExitStack() as open_sessions:

            def on_trace(trace: Any) -> None:
                opened = endpoint.session(sampling, seed=request.seed, number=trace.id)
                sessions[trace.id], _ = open_sessions.enter_context(opened)
                sessions[trace.id].on_full = lambda: trace.stop(OUT_OF_TOKENS)  # the environment scores the episode

            try:
                (slot,) = self.env.slots(self.tasks[prompt.columns[INDEX]])
                async with self._slots, asyncio.timeout(self.cfg.timeout):
                    episode = await self.env.run_slot(slot, self.context(endpoint), on_trace=on_trace)
            except TimeoutError:
                raise EpisodeError(f"the episode exceeded timeout={self.cfg.timeout:g} s", kind="late") from None
            except Exception as error:  # the environment's code may raise anything
                raise EpisodeError(f"{describe_error(error)}{where_raised(error)}", kind=type(error).__name__) from None
        completion = read_episode(episode, sessions, self.cfg, prompt_ids=prompt.ids)
        if not completion.trained:
            for session in sessions.values():
                log_too_long(self.log_once, "verifiers", prompt, session)
        return completion


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


# the episode ------------------------------------------------------------------------------------------------------


def read_episode(
    episode: Any, sessions: Mapping[str, Session], cfg: VerifiersConfig, *, prompt_ids: list[int]
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
    nodes = trace.branches[-1].nodes if trace.branches else []
    first = next((i for i, node in enumerate(nodes) if node.sampled), len(nodes))
    messages = [message_of(node.message) for node in nodes[first:]]
    completion = sessions[trace.id].completion(prompt_ids, {
        "env_reward": read_reward(trace.reward),
        "env_failed": 0.0,
        "reward_components": {name: one.score for name, one in trace.rewards.items() if one is not None},
    })  # fmt: skip
    columns = completion.columns | {"tool_calls": sum(len(message.get("tool_calls") or ()) for message in messages)}
    text = next((m["content"] for m in reversed(messages) if m["role"] == "assistant"), "")
    finish = "length" if trace.is_truncated else completion.finish_reason
    messages = messages or completion.messages
    return replace(completion, finish_reason=finish, columns=columns, text=text, messages=messages)
