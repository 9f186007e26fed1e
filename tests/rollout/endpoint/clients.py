"""Conversations of several turns with the unmodified openai and anthropic clients, in their own process.

python clients.py NUMBER < keys: one API key per line and conversation; prints the texts of its turns as JSON lines
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import anthropic
import openai

TURNS = 3
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": TOOL}}]


async def chat(client: openai.AsyncOpenAI, number: int, *, stream: bool) -> list[str]:
    messages, texts = [{"role": "user", "content": f"{number}?"}], []
    for turn in range(TURNS):
        body = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 3 + (number + turn) % 5}
        if stream:
            text = ""
            async for chunk in await client.chat.completions.create(**body, stream=True):
                text += chunk.choices[0].delta.content or ""
            reply = {"role": "assistant", "content": text}
        else:
            message = (await client.chat.completions.create(**body, logprobs=True)).choices[0].message
            reply, text = message.model_dump(exclude_none=True), message.content or ""
        texts.append(text)
        messages += [reply, {"role": "user", "content": f"and {turn}?"}]
    return texts


async def responses(client: openai.AsyncOpenAI, number: int) -> list[str]:
    texts, previous = [], None
    for turn in range(TURNS):
        asked = {"model": "policy", "input": f"{number}.{turn}?", "max_output_tokens": 16}
        reply = await client.responses.create(**asked, **({"previous_response_id": previous} if previous else {}))
        previous = reply.id
        texts.append(reply.output_text)
    return texts


async def messages(client: anthropic.AsyncAnthropic, number: int, *, stream: bool) -> list[str]:
    asked, texts = [{"role": "user", "content": f"{number}?"}], []
    for turn in range(TURNS):
        body = {"model": "policy", "messages": asked, "system": "Be brief.", "max_tokens": 4 + number % 3}
        if stream:
            async with client.messages.stream(**body) as events:
                reply = await events.get_final_message()
        else:
            reply = await client.messages.create(**body)
        texts.append("".join(block.text for block in reply.content if block.type == "text"))
        asked += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": f"and {turn}?"}]
    return texts


async def one(number: int, key: str, slots: asyncio.Semaphore) -> list[str]:
    url = os.environ["OPENAI_BASE_URL"]
    async with slots, openai.AsyncOpenAI(base_url=url, api_key=key) as gpt:
        kind = number % 5
        if kind < 2:
            return await chat(gpt, number, stream=kind == 1)
        if kind == 2:
            return await responses(gpt, number)
        async with anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key) as claude:
            return await messages(claude, number, stream=kind == 4)


async def main() -> None:
    slots = asyncio.Semaphore(64)
    keys = sys.stdin.read().split()
    for texts in await asyncio.gather(*(one(number, key, slots) for number, key in enumerate(keys))):
        print(json.dumps(texts))


asyncio.run(main())
