"""A teacher with another tokenizer: spans, its log-probs, the gradient against a plain loop, a run."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.runs.objectives import save_other_teacher
from rollout.engine import Completion, Group
from tests.entry import metrics
from tests.trainer.methods.test_opd import gradient, logits_by_transformers, parse, prompt_of, tiny_policy
from trainer.__main__ import main
from trainer.methods import opd
from trainer.methods.grpo import backward, logps_at_start
from trainer.methods.opd import open_teacher
from trainer.rl.minibatch import pack
from trainer.rl.teacher import CrossTeacher, align, fill_spans, token_ends

END = 2


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The tiny teacher with ids in another order, and tokens for 42, 12 and ==."""
    folder = tmp_path_factory.mktemp("other")
    save_other_teacher(folder, ("42", "12", "=="))
    return folder


def test_spans_end_where_a_token_of_both_ends():
    for student, teacher, expected in (
        ([1, 2, 3], [1, 2, 3], ([0, 1, 2], [0, 1, 2])),
        ([1, 2, 9, 10], [2, 6, 9, 10], ([0, 0, 1, 2], [0, 1, 1, 2])),
        ([3, 5], [2, 4, 5], ([0, 0], [0, 0, 0])),
        ([None, 1, 2], [1, 1, 2], ([0, 0, 1], [0, 0, 1])),  # two tokens for one character
        ([1, None], [1], ([0, 1], [0])),
        ([], [], ([], [])),
    ):
        assert align(student, teacher) == expected, (student, teacher)


def test_ends_of_tokens_skip_the_inside_of_characters():
    tokenizer = tiny_policy().tokenizer
    ids = tokenizer("4\u00e92 \U0001f600", add_special_tokens=False)["input_ids"]
    assert len(ids) == 9
    assert token_ends(tokenizer, ids) == ("4\u00e92 \U0001f600", [1, None, 2, 3, 4, None, None, None, 5])
    assert token_ends(tokenizer, ids[:2]) == ("4\ufffd", [1, 2])  # truncated inside a character


def completion_of(policy, prompt, text: str, *, ended: bool = True) -> Completion:
    ids = [*policy.tokenizer(text, add_special_tokens=False)["input_ids"], *([END] if ended else [])]
    return Completion(prompt_ids=prompt.ids, ids=ids, logps=[-0.5] * len(ids), text=text, versions=[(0, len(ids))],
                      finish_reason="stop" if ended else "length")  # fmt: skip


def groups_of(policy) -> list[Group]:
    prompt = prompt_of(policy, "17+25=", answer="42")
    texts = [("42", True), ("x42==\u00e912", True), ("420", False), ("", True)]
    completions = [completion_of(policy, prompt, text, ended=ended) for text, ended in texts]
    return [Group(0, prompt, 0, "fresh", completions, [[0.0]] * 4)]


def doubled(policy):
    return replace(policy, model=copy.deepcopy(policy.model).double(), compute_dtype=torch.float64)


@pytest.mark.parametrize("limit", ["1", "40", "1000"])
def test_gradients_match_a_loop_over_spans(limit, other):
    policy = doubled(tiny_policy())
    cfg = parse("--max-tokens-per-micro-batch", limit, "--temperature", "0.8", teacher=("--teacher", str(other)))
    cfg = replace(cfg, correction=replace(cfg.correction, vllm_importance_sampling_correction=False))
    teacher, groups = open_teacher(cfg, policy), groups_of(policy)
    assert isinstance(teacher, CrossTeacher)
    teacher.policy = replace(teacher.policy, model=teacher.policy.model.double(), compute_dtype=torch.float64)
    teacher.read_prompts([groups[0].prompt])
    logps, spans = teacher.compare(groups)
    batch = pack(cfg, policy, groups[0].completions, logps, extra=spans)
    logps_at_start(cfg, policy, [batch], 1)
    fill_spans(cfg, policy, batch)
    sums = backward(cfg, policy, batch, loss=opd.reverse_kl_loss)
    vector = gradient(policy.model)
    policy.model.zero_grad()
    # (ids of the student, of the teacher) of each span, written down by hand.
    vocabulary = {token: number for token, number in teacher.tokenizer.get_vocab().items()}
    e_acute = [vocabulary[x] for x in ("\u00c3", "\u00a9")]
    by_hand = [
        [(2, [vocabulary["42"]]), (1, [END])],
        [(1, [vocabulary["x"]]), (2, [vocabulary["42"]]), (2, [vocabulary["=="]]), (2, e_acute),
         (2, [vocabulary["12"]]), (1, [END])],
        [(2, [vocabulary["42"]]), (1, [vocabulary["0"]])],
        [(1, [END])],
    ]  # fmt: skip
    total, reverse_kl, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for c, parts in zip(groups[0].completions, by_hand, strict=True):
        theirs = [x for _, ids in parts for x in ids]
        prompt = teacher.tokenizer.apply_chat_template(groups[0].prompt.prompt, add_generation_prompt=True)
        prompt = prompt if isinstance(prompt, list) else prompt["input_ids"]
        with torch.no_grad():
            of_teacher = logits_by_transformers(teacher.policy.model, list(prompt), theirs).div(0.8).log_softmax(-1)
        of_student = logits_by_transformers(policy.model, c.prompt_ids, c.ids).div(0.8).log_softmax(-1)
        logp = of_student[torch.arange(len(c.ids)), c.ids]
        teacher_logp = of_teacher[torch.arange(len(theirs)), theirs]
        ours = theirs_done = 0
        for num_ours, ids in parts:
            mine = logp[ours : ours + num_ours].sum()
            gap = (mine - teacher_logp[theirs_done : theirs_done + len(ids)].sum()).detach()
            total, reverse_kl = total + gap * mine, reverse_kl + gap.item()
            ours, theirs_done, count = ours + num_ours, theirs_done + len(ids), count + num_ours
        assert (ours, theirs_done) == (len(c.ids), len(theirs))
    (total / count).backward()
    expected = gradient(policy.model)
    assert (vector - expected).norm() < 1e-6 * expected.norm()
    assert sums.means()["policy/reverse_kl"] == pytest.approx(reverse_kl / count, rel=1e-5)


def test_with_the_same_tokenizer_the_spans_are_tokens():
    policy, groups = tiny_policy(), groups_of(tiny_policy())
    cfg = parse()
    same = open_teacher(cfg, policy)
    cross = CrossTeacher(cfg, policy, same.policy)
    cross.read_prompts([groups[0].prompt])
    logps, spans = cross.compare(groups)
    for got, want in zip(logps[:1] + logps[2:], same.logps(groups)[:1] + same.logps(groups)[2:], strict=True):
        assert got == pytest.approx(want, abs=1e-5)  # the second has a character of two tokens
    assert spans["span"][1] == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8] and spans["span"][3] == [0]


@pytest.mark.parametrize("flags", [("--jsd-beta", "0"), ("--jsd-beta", "0.5"), ("--tools", "json.loads")])
def test_settings_that_need_the_same_ids_are_rejected(flags, other):
    cfg = parse(*flags, teacher=("--teacher", str(other)))
    with pytest.raises(ValueError, match=rf"teacher=.*278 tokens.*275.*remove {flags[0][2:].replace('-', '_')}"):
        open_teacher(cfg, tiny_policy())


def test_a_run_learns_from_a_teacher_with_another_tokenizer(other, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ("--method", "opd", "--teacher", str(other), "--max-steps", "3", "--per-device-train-batch-size", "16",
            "--data", "task:addition:split=train,size=64", "--eval-data", "task:addition:split=eval,size=8",
            "--eval-steps", "0", "--save-steps", "0", "--num-iterations", "1", "--output-dir", "out")  # fmt: skip
    assert main(list(argv)) == 0
    rows = [row for row in metrics(tmp_path / "out") if row["step"]]
    assert len(rows) == 3 and all(row["optim/grad_norm"] > 0 and row["policy/reverse_kl"] > 0 for row in rows)
    assert "another tokenizer" in "".join(capsys.readouterr())
