"""Episodes in samples.jsonl and in the report: branches, trained turns, tool calls, rewards and advantages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from data.types import Prompt
from rollout.engine import Completion, Group
from trainer.metrics.samples import samples_html
from trainer.metrics.trajectory import MAX_TEXT, branches_of
from trainer.rl.groups import Rollout, sample_rows

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look<up>", "arguments": "{}"}}]}
RESULTS = [{"role": "tool", "content": "f"}, {"role": "tool", "content": "g"}, {"role": "user", "content": "?"}]
ANSWER = {"role": "assistant", "content": "hi"}


class Letters:
    """A token is a letter."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def completion(prompt: str, text: str, sampled: str = "", **fields: Any) -> Completion:
    """sampled: a + for each sampled letter of the text."""
    mask = [flag == "+" for flag in sampled] if sampled else None
    ids, logps = list(map(ord, text)), [0.0] * len(text)
    return Completion(prompt_ids=list(map(ord, prompt)), ids=ids, logps=logps, finish_reason="stop", text="",
                      versions=[], mask=mask, **fields)  # fmt: skip


def turn(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "tokens": len(text), "trained": role == "assistant", "text": text, **fields}


def main_branch(**fields: Any) -> Completion:
    return completion("abc", "defghi", "++--++", messages=[CALL, *RESULTS, ANSWER], **fields)


FIRST = [turn("prompt", "abc"), turn("assistant", "de", calls=["look<up>"]), turn("tool, user", "fg"),
         turn("assistant", "hi")]  # fmt: skip


def test_turns_with_calls_and_rewards():
    assert branches_of(main_branch(), Letters()) == [{"turns": FIRST}]
    (branch,) = branches_of(main_branch(columns={"turn_rewards": [0.5, 0.0]}), Letters())
    assert [turn.get("reward") for turn in branch["turns"]] == [None, 0.5, None, 0.0]


@pytest.mark.parametrize("messages", [None, [ANSWER]])  # none, or not those of the turns
def test_turns_without_matching_messages(messages):
    (branch,) = branches_of(completion("abc", "defghi", "++--++", messages=messages), Letters())
    assert [(turn["role"], turn["text"]) for turn in branch["turns"]] == [
        ("prompt", "abc"), ("assistant", "de"), ("context", "fg"), ("assistant", "hi"),
    ]  # fmt: skip
    assert not any("calls" in turn for turn in branch["turns"])


def test_only_samples_of_episodes_have_branches():
    prompt = Prompt(ids=[97], prompt="a", source="row")
    group = Group(
        number=0, prompt=prompt, row=0, completions=[completion("a", "b"), main_branch()], values=[[1.0], [0.0]]
    )
    plain, episode = sample_rows(Rollout([group], ["f"], torch.ones(1), {}), [[2.0], [1.0, 2, 9, 9, 3, 5]], Letters())
    assert plain == {"prompt": "a", "completion": "", "rewards": {"f": 1.0}, "advantage": 2.0, "source": "row",
                     "finish_reason": "stop"}  # fmt: skip
    assert [turn.get("advantage") for turn in episode["branches"][0]["turns"]] == [None, 1.5, None, 4.0]
    assert episode["messages"] == main_branch().messages


def test_a_branch_begins_at_the_turn_that_a_client_has_rewritten():
    # The last branch comes first in a completion, but `de` is trained in the main one. The last one shares `fX`, which
    # nobody sampled, with the second.
    second = completion("abcdefXk", "yz")
    third, other, again = completion("abcdefXm", "uv"), completion("abQ", "w"), completion("abc", "dr")
    last, *branches = third, main_branch(), second, other, again
    episode = Completion(**{**vars(last), "branches": tuple(branches)})
    found = branches_of(episode, Letters())
    by_text = {branch["turns"][-1]["text"]: branch for branch in found}
    assert by_text == {
        "hi": {"turns": FIRST},
        "uv": {"fork": by_text["uv"]["fork"], "turns": [turn("prompt", "fXm"), turn("assistant", "uv")]},
        "yz": {"fork": by_text["yz"]["fork"], "turns": [turn("prompt", "fXk"), turn("assistant", "yz")]},
        "w": {"turns": [turn("prompt", "abQ"), turn("assistant", "w")]},
        "dr": {"fork": [0, 1], "turns": [turn("assistant", "dr")]},  # sampled twice from one prompt
    }
    main = found.index(by_text["hi"])
    assert main == 0 and by_text["uv"]["fork"] == by_text["yz"]["fork"] == [main, 2]
    trained = [turn["tokens"] for branch in found for turn in branch["turns"] if turn["trained"]]
    assert sum(trained) == sum(part.trained for part in (last, *branches))


def test_long_texts_are_cut_in_the_middle():
    (branch,) = branches_of(completion("a" * 9000 + "b", "cd", "+-"), Letters())
    assert branch["turns"][0]["text"] == f"{'a' * 2000}\n[5001 more characters]\n{'a' * 1999}b"
    assert branch["turns"][0]["tokens"] == 9001 and MAX_TEXT == 4000


def page(*, finish_reason: str = "stop", config: dict[str, Any] | None = None, last: Completion | None = None) -> str:
    last = last or completion("abcdef<X>", "y<z>", branches=(main_branch(),))
    sample = {"step": 1, "prompt": "q", "completion": "y", "rewards": {"f": 1.0}, "advantage": -0.25,
              "finish_reason": finish_reason, "branches": branches_of(last, Letters())}  # fmt: skip
    return samples_html([sample], config or {})


def flat(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_the_page_nests_a_branch_at_its_turn_and_marks_trained_turns():
    html = page()
    assert "2 branches, 3 turns, 1 tool call, 8 of 17 tokens trained, advantage -0.25" in flat(html)
    assert flat(html).partition("Branch 1: ")[2] == (
        "2 turns, 1 tool call, 4 of 9 tokens trained, advantage -0.25 prompt 3 tokens abc assistant 2 tokens, trained "
        "calls look&lt;up&gt; de Branch 2, instead of the turns below: 1 turn, 4 of 8 tokens trained, advantage -0.25 "
        "prompt 4 tokens f&lt;X&gt; assistant 4 tokens, trained y&lt;z&gt; tool, user 2 tokens fg assistant 2 tokens, "
        "trained hi"
    )
    assert re.findall("<mark>(.*?)</mark>", html) == ["de", "y&lt;z&gt;", "hi"] and "<up>" not in html


def test_the_page_of_an_episode_without_branches():
    html = page(last=main_branch(columns={"turn_rewards": [0.5, 0.0]}))
    assert "2 turns, 1 tool call, 4 of 9 tokens trained, advantage -0.25 prompt" in flat(html)
    assert "Branch" not in html and "trained, reward +0.50" in html


def test_masked_truncated_episodes_are_not_trained():
    html = page(finish_reason="length", config={"mask_truncated_completions": True})
    assert "<mark>" not in html and "0 of 17 tokens trained" in html
    assert "8 of 17 tokens trained" in page(finish_reason="length")


def test_the_texts_of_many_turns_are_shorter():
    last = completion(
        "a", "b" * 3000 + "c" * 3000, "+" * 3000 + "-" * 3000, branches=(completion("a" * 3000, "b"),) * 98
    )
    assert len(page(last=last)) < 200_000 and "more characters" in page(last=last)


def test_episodes_with_the_same_last_text_are_different_samples():
    samples = [{"step": 1, "prompt": "q", "completion": "y", "rewards": {"f": reward}, "branches": [{"turns": [turn]}]}
               for reward, turn in ((1.0, turn("assistant", "used")), (0.0, turn("assistant", "skipped")))]  # fmt: skip
    best, worst = samples_html(samples, {}).partition("Best of step 1")[2].split("Worst of step 1")
    assert "used" in best and "skipped" in worst
