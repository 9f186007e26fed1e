"""A small program with the unmodified package openai-agents: answers {row}'s question with a tool."""

from __future__ import annotations

import json
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
row = json.load(open(sys.argv[1]))


@function_tool
def lookup(key: str) -> str:
    """Return the value of a key."""
    return row.get("table", {"a": "37"}).get(key, "unknown")


agent = Agent(name="agent", instructions="Use the tool.", tools=[lookup], model="policy")
print(Runner.run_sync(agent, row["prompt"][-1]["content"], max_turns=3).final_output)
