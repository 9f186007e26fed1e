from __future__ import annotations

import sys
import threading
from decimal import Decimal

import pytest

from data.types import Prompt
from rollout.engine import Completion
from rollout.rewards.functions import find_last_number
from rollout.rewards.table import load_rewards


def score(name: str, text: str = "", answer: object = None, *, chat: bool = False, ids=(0,)) -> float | None:
    question = [{"role": "user", "content": "?"}] if chat else "?"
    prompt = Prompt(source="x:1", prompt=question, ids=[1], columns={"answer": answer})
    completion = Completion(prompt_ids=[1], ids=[*ids], logps=[], finish_reason="stop", text=text, versions=[])
    return load_rewards([name]).score([prompt], [completion]).totals[0]


def test_exact_match():
    for text, answer, expected in [
        ("95", "95", 1.0), (" 95\n", "95", 1.0), ("95", 95, 1.0), ("95.", "95", 0.0), ("", "95", 0.0),
        ("95", None, None),
    ]:  # fmt: skip
        assert [score("exact_match", text, answer, chat=chat) for chat in (False, True)] == [expected] * 2, text


def test_last_number():
    for text, answer, expected in [
        ("37+58=95", "95", 1.0),
        ("It is 1,234.50 dollars.", "1234.5", 1.0),
        ("first 95 then 96", "95", 0.0),
        ("no number", "95", 0.0),
        ("so 72.", "She sold 48/2 = 24 ... #### 72", 1.0),
        ("72", "no number", None),
        ("72", None, None),
        ("3-24=-21", "-21", 1.0),
        ("=\u221221", -21, 1.0),
        ("10-3", "3", 1.0),
        ("0.50", ".5", 1.0),
        ("12345678901234567890123", "12345678901234567890124", 0.0),
    ]:
        assert score("last_number", text, answer) == expected


def test_find_last_number():
    for text, number in [
        ("1,2,3", "3"),
        ("12,34", "34"),
        ("1,234,567", "1234567"),
        ("5.", "5"),
        ("(-7)", "-7"),
        ("a-7", "7"),
        ("5%", "5"),
    ]:
        assert find_last_number(text) == Decimal(number)


FULL = "<think>hm</think>\n<answer>4</answer>"


def test_tagged_format():
    for text, strict, partial in [
        (FULL, 1.0, 1.0),
        (f"\n {FULL} ", 1.0, 1.0),
        (f"Sure! {FULL}", 0.0, 0.8),
        (f"{FULL} bye", 0.0, 0.8),
        ("<think>hm</think> so <answer>4</answer>", 0.0, 0.8),
        ("<think>hm</think><answer>4", 0.0, 0.6),
        ("<think>hm</think>4", 0.0, 0.4),
        ("<think>hm<think></think><answer>4</answer>", 0.0, 0.6),
        ("<answer>4</answer><think>hm</think>", 0.0, 0.4),
        ("4", 0.0, 0.0),
        ("", 0.0, 0.0),
    ]:
        assert score("tagged_format", text) == strict
        assert score("tagged_format_partial", text) == pytest.approx(partial)
        assert score("tagged_format", text.replace("think", "reasoning")) == 0.0
        assert score("tagged_format:reasoning,answer", text.replace("think", "reasoning"), chat=True) == strict


def test_regex():
    for pattern, text, expected in [
        ("^[0-9]+$", "42", 1.0),
        ("^[0-9]+$", "42a", 0.0),
        ("a:b", "xa:by", 1.0),
        ("a.b", "a\nb", 1.0),
    ]:
        assert score(f"regex:{pattern}", text) == expected


def test_length_repetition_and_soft_overlong_by_hand():
    assert score("length", ids=range(5)) == 5.0
    assert score("repetition:2", ids=[5, 5, 5, 5, 5]) == -0.75
    assert score("repetition", ids=[5, 5]) == score("repetition", ids=[1, 2, 3, 4]) == 0.0
    assert score("repetition", ids=[1, 2, 3, 1, 2, 3]) == pytest.approx(-0.25)
    for num_ids, expected in [(80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (150, -1.0)]:
        assert score("soft_overlong:100,20", ids=[1] * num_ids) == pytest.approx(expected)


def test_bad_arguments_are_rejected():
    for name, message in [
        ("regex", "regex:PATTERN"),
        ("regex:(", r"reward_funcs=regex:\(: "),
        ("tagged_format:think", "tagged_format:think,answer"),
        ("tagged_format_partial:a,a", "tagged_format_partial:think,answer"),
        ("repetition:x", "repetition:N"),
        ("soft_overlong", "soft_overlong:MAX,MARGIN"),
        ("soft_overlong:10,20", "soft_overlong:10,20: MARGIN"),
        ("math_verify:x", "math_verify:x: "),
    ]:
        with pytest.raises(ValueError, match=message):
            load_rewards([name])


MATHS = [
    ("The answer is $\\frac{1}{2}$.", "0.5", 1.0),
    ("so \\boxed{\\frac{2}{4}}", "1/2", 1.0),
    ("3\\pi", "3\\pi", 1.0),
    ("3\\pi", "3", 0.0),
    ("x^2+2x+1", "(x+1)^2", 1.0),
    ("It makes 72.", "72 apples", 1.0),
    ("It makes 73.", "72", 0.0),
    ("no idea", "72", 0.0),
    ("72", "hello", None),
    ("72", None, None),
    ("", "72", 0.0),
]


def test_math_verify_in_and_outside_the_main_thread():
    pytest.importorskip("math_verify")
    scores: list[float | None] = []

    def score_all() -> None:
        scores.extend(score("math_verify", text, answer) for text, answer, _ in MATHS)

    thread = threading.Thread(target=score_all)
    thread.start()
    thread.join()
    score_all()
    assert scores == [expected for _, _, expected in MATHS] * 2


def test_math_verify_without_the_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # import then raises ImportError
    with pytest.raises(ValueError, match=r"strop\[rewards\]"):
        load_rewards(["math_verify"])
