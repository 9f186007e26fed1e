"""An episode with tools: the model's turns, separated by the results of its calls.

    toolset = load_tools(("lookup",), timeout=10.0)
    episode = ToolEpisode(toolset, tokenizer, tool_format="pythonic", max_turns=4)
    source = EpisodeSource(engine, sampling, episode)
    -> Completion(
           ids=call + result + answer, mask=True.. + False.. + True.., text="37",
           messages=[{"role": "assistant", "content": "", "tool_calls": [...]},
                     {"role": "tool", "name": "lookup", "content": "37"}, {"role": "assistant", "content": "37"}],
           columns={"num_turns": 2, "tool_calls": 1, "tool_errors": 0})

max_tokens limits all tokens after the prompt, including results. An episode that reaches it, or that ends with a call
in its last turn, has finish_reason "length". `text` is the text of the last turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from data.chat import render_prompt
from data.errors import UserError
from data.types import Messages, Prompt
from rollout.engine import Completion
from rollout.episodes.episode import Client
from rollout.episodes.options import ToolConfig
from rollout.episodes.tool_calls import Call, Parsed, find_format, parse_turn
from rollout.episodes.tools import Toolset, Turns
from rollout.episodes.turns import CALL_ID, Continuation, Transcript, turn_seed


class ToolEpisode:
    """An Episode (episode.py)."""

    def __init__(
        self,
        toolset: Toolset,
        tokenizer: Any,
        *,
        tool_format: str = "auto",
        max_turns: int = 8,
        max_tool_tokens: int | None = None,
    ) -> None:
        self.toolset, self.tokenizer = toolset, tokenizer
        self.max_turns, self.max_tool_tokens = max_turns, max_tool_tokens
        self.parse: Callable[[str], Parsed] = find_format(tool_format, tokenizer)
        self.continuation = Continuation(tokenizer)

    @classmethod
    def of(cls, cfg: ToolConfig, toolset: Toolset, tokenizer: Any) -> ToolEpisode:
        settings = {name: getattr(cfg, name) for name in ("tool_format", "max_turns", "max_tool_tokens")}
        return cls(toolset, tokenizer, **settings)

    async def __call__(self, client: Client, prompt: Prompt, seed: int) -> Completion:
        turns = self.toolset.begin(prompt)
        try:
            return await self._play(client, prompt, seed, turns)
        finally:
            self.toolset.close(turns)

    async def _play(self, client: Client, prompt: Prompt, seed: int, turns: Turns) -> Completion:
        transcript = Transcript(prompt.ids)
        messages: Messages = []
        limit = client.sampling.max_tokens
        num_calls = num_errors = 0
        for turn in range(self.max_turns):
            turns.turn = turn
            reply = await client.generate(transcript.ids, turn_seed(seed, turn), max_tokens=limit - len(transcript))
            transcript.add(reply)
            parsed = parse_turn(reply, self.parse, self.tokenizer)
            messages.append(self._message(reply, parsed))
            finish_reason = reply.finish_reason
            if finish_reason == "length" or not parsed.calls:
                break
            finish_reason = "length"
            if turn + 1 == self.max_turns:
                break
            results, failed = await self._results(parsed.calls, turns)
            num_calls, num_errors = num_calls + len(results), num_errors + failed
            between = self.continuation.ids(results, transcript.last_id, prompt.settings)
            if len(transcript) + len(between) >= limit:
                break  # the model would have no tokens left, so the results are not added
            transcript.insert(between)
            messages += results
        self.toolset.add_rewards(turns)
        columns: dict[str, Any] = {"num_turns": turn + 1, "tool_calls": num_calls, "tool_errors": num_errors}
        if self.toolset.pays or turns.rewards:
            columns["env_reward"] = sum(turns.rewards.values())
            columns["turn_rewards"] = [turns.rewards.get(i, 0.0) for i in range(turn + 1)]
        return transcript.completion(finish_reason, text=reply.text, messages=messages, columns=columns)

    async def _results(self, calls: Sequence[Call], turns: Turns) -> tuple[Messages, int]:
        """Run the calls in order, because a tool may change the state that the next one reads."""
        results, failed = [], 0
        for call in calls:
            text, error = await self.toolset.run(call, turns)
            failed += error
            message = {"role": "tool", "name": call.name, "tool_call_id": CALL_ID, "content": self._cut(text)}
            results.append(message)
        return results, failed

    def _cut(self, text: str) -> str:
        if self.max_tool_tokens is None:
            return text
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) <= self.max_tool_tokens:
            return text
        return self.tokenizer.decode(ids[: self.max_tool_tokens], clean_up_tokenization_spaces=False)

    def _message(self, reply: Completion, parsed: Parsed) -> dict[str, Any]:
        """Return the turn as a message; calls that cannot be parsed stay in its text."""
        if not parsed.calls or any(call.error for call in parsed.calls):
            return {"role": "assistant", "content": reply.text}
        functions = [{"name": call.name, "arguments": self.toolset.named(call)} for call in parsed.calls]
        calls = [{"id": CALL_ID, "type": "function", "function": function} for function in functions]
        return {"role": "assistant", "content": parsed.content, "tool_calls": calls}


def show_tools(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    schemas: Sequence[dict[str, Any]],
    *,
    max_prompt_length: int | None = None,
    longest: int | None = None,
    log: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> list[Prompt]:
    """Render the prompts with the tools' schemas, as the chat template shows them to the model.

    Prompts that exceed max_prompt_length are skipped and counted. `longest`: tokens that the context leaves for a
    prompt. These tools replace a row's `tools` column, because tools named there cannot be run.
    """
    rendered = []
    for prompt in prompts:
        if not prompt.conversational:
            raise UserError(f"{prompt.source}: plain text prompts do not support tools; use messages")
        ids = render_prompt(tokenizer, prompt.prompt, settings={**prompt.settings, "tools": list(schemas)})
        if longest is not None and len(ids) > longest and (max_prompt_length is None or len(ids) <= max_prompt_length):
            raise UserError(
                f"{prompt.source}: the prompt has {len(ids)} tokens with the tools, but the context leaves only "
                f"{longest}; lower --max-completion-length, or skip long prompts with --max-prompt-length {longest}"
            )
        rendered.append(replace(prompt, ids=ids))
    if rendered and all(one.ids == other.ids for one, other in zip(rendered, prompts, strict=True)):
        log("tools: the chat template does not show tools to the model; describe them in the prompts or train by SFT")
    kept = [prompt for prompt in rendered if max_prompt_length is None or len(prompt.ids) <= max_prompt_length]
    if rendered and not kept:
        raise UserError(f"max_prompt_length={max_prompt_length}: with the tools all prompts are longer; raise it")
    if len(kept) < len(rendered):
        num_skipped = len(rendered) - len(kept)
        log(f"data: skipped {num_skipped} of {len(rendered)} prompts longer than {max_prompt_length=} with the tools")
    return kept
