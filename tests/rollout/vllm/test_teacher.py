"""A real vLLM server as the teacher of distillation: its scores are those of its model, and a run learns from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout.engine import Completion, Group
from rollout.servers.command import TOKEN
from tests.entry import ROOT, metrics
from tests.rollout.vllm.test_client import largest_gap, logps_by_transformers, prompts, tokenizer_at
from trainer import cli
from trainer.__main__ import main
from trainer.rl.teacher import open_teacher

TINY = ("--model", "builtin:tiny", "--max-completion-length", "8", "--data", "task:addition:split=train,size=64")


def groups_of(folder) -> list[Group]:
    made = []
    for row, prompt_ids in enumerate(prompts(folder)):
        ids = [20 + row, 21, 22 + 3 * row, 2]
        completion = Completion(
            prompt_ids=prompt_ids, ids=ids, logps=[0.0] * 4, finish_reason="stop", text="", versions=[(0, 4)]
        )
        made.append(Group(row, SimpleNamespace(), row, "fresh", [completion]))
    return made


def test_a_server_scores_as_its_model_does(untied_server, monkeypatch):
    monkeypatch.setenv(TOKEN, untied_server.token)
    folder = untied_server.model_folder
    cfg = cli.parse(["--method", "opd", *TINY, "--teacher-url", untied_server.url])[1]
    teacher = open_teacher(cfg, SimpleNamespace(tokenizer=tokenizer_at(folder)))
    try:
        groups = groups_of(folder)
        for group, found in zip(groups, teacher.logps(groups), strict=True):
            (completion,) = group.completions
            expected = logps_by_transformers(folder, completion.prompt_ids, completion.ids, 1.0)
            assert largest_gap(found, expected) < 1e-4
    finally:
        teacher.close()
    monkeypatch.setenv(TOKEN, "wrong")
    with pytest.raises(ValueError, match="needs another token; set STROP_VLLM_TOKEN"):
        open_teacher(cfg, SimpleNamespace(tokenizer=tokenizer_at(folder)))


def test_a_vocabulary_that_the_server_lacks_is_refused(untied_server, monkeypatch):
    """The last token of the student is beyond the server's embedding."""
    monkeypatch.setenv(TOKEN, untied_server.token)
    from transformers import AutoTokenizer

    longer = AutoTokenizer.from_pretrained(ROOT / "trainer" / "tiny")
    longer.add_tokens([f"<more {n}>" for n in range(40)])
    cfg = cli.parse(["--method", "opd", *TINY, "--teacher-url", untied_server.url])[1]
    with pytest.raises(ValueError, match=f"teacher_url={untied_server.url}: refuses /v1/completions"):
        open_teacher(cfg, SimpleNamespace(tokenizer=longer))


def test_a_run_with_a_server_is_that_with_its_model_here(untied_server, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, untied_server.token)
    common = ("--method", "opd", *TINY, "--max-steps", "2", "--learning-rate", "1e-4")
    here = ("--teacher", str(untied_server.model_folder))
    assert main([*common, "--teacher-url", untied_server.url, "--output-dir", str(tmp_path / "url")]) == 0
    assert main([*common, *here, "--output-dir", str(tmp_path / "here")]) == 0
    there, here = metrics(tmp_path / "url"), metrics(tmp_path / "here")
    for name in ("policy/reverse_kl", "optim/grad_norm"):
        assert [row[name] for row in there] == pytest.approx([row[name] for row in here], rel=1e-3)


def test_a_student_that_a_server_samples(tied_server, tmp_path, monkeypatch):
    """Teacher and student are in this process, the completions come from the server."""
    common = ("--method", "opd", *TINY, "--teacher", "builtin:tiny_teacher", "--max-steps", "2", "--jsd-beta", "0.5")
    monkeypatch.setenv(TOKEN, tied_server.token)
    engine = ("--rollout.engine", "vllm", "--vllm.url", tied_server.url)
    assert main([*common, *engine, "--output-dir", str(tmp_path / "run")]) == 0
    first, second = metrics(tmp_path / "run")
    assert first["policy/jsd"] > 0 and second["optim/grad_norm"] > 0
