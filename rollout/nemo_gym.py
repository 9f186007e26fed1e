"""NeMo Gym: completions verified by its resource servers, and whole episodes run by its agents.

    gym = GymClient(cfg.nemo_gym)
    gym.connect(prompts, multi_turn=cfg.nemo_gym.multi_turn)
    set_up_rewards(rewards, gym, on_error)                      # `nemo_gym:verify`, one POST /verify per completion
    source = RunSource(gym, sampling, version=lambda: engine.version)      # multi_turn: one POST /run per completion

With multi_turn the tokens are made by our own vLLM server, which the gym's model server (its vllm_model) asks on behalf
of the agents. So our server needs an address that the gym can be told beforehand:

    STROP_VLLM_TOKEN=... python -m rollout.serve --model M --vllm.port 8000 \\
        --vllm.extra-args="--enable-auto-tool-choice --tool-call-parser hermes"
    policy_model.responses_api_models.vllm_model: base_url http://127.0.0.1:8000/v1, api_key the token, model base,
        return_token_id_information true

Temperature, length, seed and stop ids of a request are the trainer's, whatever the row says.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal

from data.types import Messages, Prompt
from rollout.engine import Completion, Sampling
from rollout.nemo_gym_client import GymClient, GymError, row_body
from rollout.nemo_gym_episodes import NoTokenIds, failed, read_episode, read_reward, response_of
from rollout.schedule.source import Job
from rollout.servers.loop import together

# What the completions of a RunSource bring for rewards and metrics; reward_components only where the server has them.
COLUMNS = ("env_reward", "env_failed", "num_turns", "tool_calls", "left_out_turns", "reward_components")
GIVE_UP = 100  # failures in a row after which the gym is taken for broken
SEED_MASK = 2**63 - 1


class VerifyReward:
    """The reward `nemo_gym:verify`: what the row's resource server says of each completion."""

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

        A row that fails stops the run, or with on_error "none" is NaN: that costs it every reward, and is counted.
        """
        if self.gym is None:
            raise ValueError("is asked by the trainer only, which knows the servers; see --nemo-gym.datasets")
        work = self._all(list(zip(prompts, completions, verify_extra, nemo_gym_ref, strict=True)))
        return await asyncio.wrap_future(self.gym.loop.start(work))

    async def _all(self, rows: list[tuple[Messages, Any, str | None, dict[str, Any] | None]]) -> list[float | None]:
        return await together([self._one(*row) for row in rows])

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
                raise ValueError(f"NeMo Gym: {ref['source']}: {error}") from None
            kind = error.kind if isinstance(error, GymError) else "reward"
            self.gym.say_once(kind, f"NeMo Gym: {ref['source']}: {error}; such completions get no reward")
            return math.nan


class RunSource:
    """Completions by the gym's agents: each job is an episode of its own, which POST /run plays to its end.

    An episode that fails is a completion without trained tokens and without a reward, and is said once per kind; when
    nothing but failures comes, the run stops.
    """

    def __init__(
        self,
        gym: GymClient,
        sampling: Sampling,
        *,
        version: Callable[[], int],  # of the weights that the server holds now
        vocab_size: int | None = None,
        seeded: bool = True,
    ) -> None:
        self.gym, self.sampling, self.version = gym, sampling, version
        self.vocab_size, self.seeded = vocab_size, seeded
        self._running: set[Future[Any]] = set()
        self._in_a_row = 0

    def start(self, groups: Sequence[Sequence[Job]]) -> list[Future[list[Completion]]]:
        """Begin; one future per group, its completions in the order of the jobs."""
        version = self.version()
        futures = [self.gym.loop.start(self._group(list(group), version)) for group in groups]
        for future in futures:
            self._running.add(future)
            future.add_done_callback(self._running.discard)
        return futures

    def close(self) -> None:
        """Cancel what runs; the gym's connections are their owner's."""
        for future in list(self._running):
            future.cancel()

    async def _group(self, jobs: list[Job], version: int) -> list[Completion]:
        return await together([self._episode(job, i, version) for i, job in enumerate(jobs)])

    async def _episode(self, job: Job, number: int, version: int) -> Completion:
        prompt = job.prompt
        try:
            name, url = self.gym.agent_of(prompt.columns["nemo_gym_ref"])
            reply = await self.gym.run(self.body(prompt, name, job.seed, number), name, url)
            completion, left_out = read_episode(
                reply,
                prompt_ids=prompt.ids,
                max_tokens=self.sampling.max_tokens,
                version=version,
                vocab_size=self.vocab_size,
            )
        except NoTokenIds:
            raise
        except (GymError, ValueError) as error:
            kind = error.kind if isinstance(error, GymError) else str(error).partition(":")[0]
            return self._failed(prompt, kind, str(error))
        if left_out:
            return self._mismatched(prompt, completion)
        self._in_a_row = 0
        return completion

    def body(self, prompt: Prompt, agent: str, seed: int, number: int) -> dict[str, Any]:
        """The row, with our sampling; `metadata` has what the gym's model server adds to its request."""
        row = row_body(prompt.columns["verify_extra"], prompt.prompt)
        params = {key: value for key, value in row["responses_create_params"].items() if value is not None}
        metadata = dict(params.get("metadata") or {})
        if prompt.settings:
            metadata["chat_template_kwargs"] = json.dumps(prompt.settings)
        extra = json.loads(metadata.get("extra_body") or "{}")
        # As for our own requests: these ids end a turn, not those of the model's generation_config.
        extra |= {"stop_token_ids": list(self.sampling.stop_ids), "ignore_eos": True}
        if self.seeded:
            extra["seed"] = seed & SEED_MASK
        if self.sampling.top_k:
            extra["top_k"] = self.sampling.top_k
        limit = self.sampling.max_tokens
        params |= {
            "max_output_tokens": min(params.get("max_output_tokens") or limit, limit),  # of one turn
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "metadata": metadata | {"extra_body": json.dumps(extra)},
        }
        return row | {
            "responses_create_params": params,
            "agent_ref": {"type": "responses_api_agents", "name": agent},
            "_ng_task_index": prompt.columns["nemo_gym_index"],
            "_ng_rollout_index": number,
        }

    def _mismatched(self, prompt: Prompt, completion: Completion) -> Completion:
        """A turn's prompt was not what came before it: only the turns from the last such place on are one sequence."""
        what = "the prompt of a turn is not the turns before it, token by token"
        rule = self.gym.cfg.prefix_mismatch
        if rule == "stop":
            raise ValueError(
                f"nemo_gym.prefix_mismatch=stop: {prompt.source}: {what}; use a chat template that keeps earlier turns "
                "as they were, or set it to last or drop"
            )
        if rule == "drop":
            return self._failed(prompt, "prefix", what)
        self.gym.say_once(
            "prefix",
            f"NeMo Gym: {prompt.source}: {what}; of such episodes only the last turns are trained on "
            "(rollout/left_out_turns counts the others)",
        )
        return completion

    def _failed(self, prompt: Prompt, kind: str, why: str) -> Completion:
        self._in_a_row += 1
        if self._in_a_row >= GIVE_UP:
            raise ValueError(
                f"nemo_gym: {self._in_a_row} episodes in a row have failed, the last one {prompt.source} ({why}); the "
                "logs of the gym's agent and model server may say more"
            )
        self.gym.say_once(kind, f"NeMo Gym: {prompt.source}: {why}; such episodes are not trained on")
        return failed(prompt.ids)


def set_up_rewards(rewards: Any, gym: GymClient, on_error: Literal["stop", "none"]) -> None:
    """Give the run's connections to every `nemo_gym:verify` among its rewards."""
    for function in rewards.functions:
        if isinstance(function.call, VerifyReward):
            function.call.gym, function.call.on_error = gym, on_error
