"""A verifiers environment for tests: count in turns. The model is asked for numbers sequentially.

The harness runs in this process: it asks the rollout's endpoint, as a program in a sandbox would.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["ToyHarness", "ToyTaskset"]


class ToyData(vf.TaskData):
    start: int = 0
    rounds: int = 2


class ToyTask(vf.Task[ToyData]):
    @vf.reward
    async def odd(self, trace) -> float:
        """Fraction of replies that end with an odd digit."""
        replies = [message.content or "" for message in trace.assistant_messages]
        return sum(reply[-1:] in ("1", "3", "5", "7", "9") for reply in replies) / max(len(replies), 1)

    @vf.reward(weight=0.5)
    async def rounds(self, trace) -> float:
        return float(trace.num_turns)


class ToyConfig(vf.TasksetConfig):
    rows: int = 8
    rounds: int = 2


class ToyTaskset(vf.Taskset[ToyTask, ToyConfig]):
    def load(self) -> Iterator[ToyTask]:
        for start in range(self.config.rows):
            data = ToyData(prompt=f"{start}+1=", start=start, rounds=self.config.rounds)
            yield ToyTask(data, self.config.task)


class ToyHarnessConfig(vf.HarnessConfig):
    rewrites: bool = False
    """Rewrite the model's answer, so that the next prompt does not continue it."""
    fails: bool = False


class ToyHarness(vf.Harness[ToyHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        if self.config.fails:
            raise RuntimeError("the toy is broken")
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for number in range(trace.task.data.rounds):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": "hm" if self.config.rewrites else text})
                messages.append({"role": "user", "content": f"{number}+2="})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
