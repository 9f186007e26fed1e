"""A real vLLM server as the distillation teacher: its log-probs match its model, and a run trains on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout.engine import Completion, Group
from rollout.servers.command import TOKEN
from tests.entry import ROOT, metrics
from tests.rollout.vllm.test_client import largest_gap, logps_by_transformers, prompts, tokenizer_at
from trainer import cli
from trainer.__main__ import main
from trainer.methods.opd import open_teacher

TINY = ("--model", "builtin:tiny", "--max-completion-length", "8", "--data", "task:addition:split=train,size=64")


def groups_of(folder) -> list[Group]:
    groups = []
    for row, prompt_ids in enumerate(prompts(folder)):
        ids = [20 + row, 21, 22 + 3 * row, 2]
        completion = Completion(
            prompt_ids=prompt_ids, ids=ids, logps=[0.0] * 4, finish_reason="stop", text="", versions=[(0, 4)]
        )
        groups.append(Group(row, SimpleNamespace(), row, "fresh", [completion]))
    return groups


def test_teacher_server_logps_match_its_model(untied_server, monkeypatch):
    monkeypatch.setenv(TOKEN, untied_server.token)
    folder = untied_server.model_folder
    cfg = cli.parse(["--method", "opd", *TINY, "--teacher-url", untied_server.url])[1]
    teacher = open_teacher(cfg, SimpleNamespace(tokenizer=tokenizer_at(folder)))
    try:
        groups = groups_of(folder)
        for group, logps in zip(groups, teacher.logps(groups), strict=True):
            (completion,) = group.completions
            expected = logps_by_transformers(folder, completion.prompt_ids, completion.ids, 1.0)
            assert largest_gap(logps, expected) < 1e-4
    finally:
        teacher.close()
    monkeypatch.setenv(TOKEN, "wrong")
    with pytest.raises(ValueError, match="STROP_VLLM_TOKEN"):
        open_teacher(cfg, SimpleNamespace(tokenizer=tokenizer_at(folder)))


def test_student_vocabulary_larger_than_the_servers_is_rejected(untied_server, monkeypatch):
    """The student's last token is outside the server's embedding."""
    monkeypatch.setenv(TOKEN, untied_server.token)
    from transformers import AutoTokenizer

    longer = AutoTokenizer.from_pretrained(ROOT / "trainer" / "tiny")
    longer.add_tokens([f"<more {n}>" for n in range(40)])
    cfg = cli.parse(["--method", "opd", *TINY, "--teacher-url", untied_server.url])[1]
    with pytest.raises(ValueError, match=f"teacher_url={untied_server.url}: .*/v1/completions"):
        open_teacher(cfg, SimpleNamespace(tokenizer=longer))


def test_run_with_a_teacher_server_equals_one_with_a_local_teacher(untied_server, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, untied_server.token)
    common = ("--method", "opd", *TINY, "--max-steps", "2", "--learning-rate", "1e-4")
    here = ("--teacher", str(untied_server.model_folder))
    assert main([*common, "--teacher-url", untied_server.url, "--output-dir", str(tmp_path / "url")]) == 0
    assert main([*common, *here, "--output-dir", str(tmp_path / "here")]) == 0
    there, here = metrics(tmp_path / "url"), metrics(tmp_path / "here")
    for name in ("policy/reverse_kl", "optim/grad_norm"):
        assert [row[name] for row in there] == pytest.approx([row[name] for row in here], rel=1e-3)


def test_student_completions_from_a_server(tied_server, tmp_path, monkeypatch):
    """Teacher and student are in this process; the server samples the completions."""
    common = ("--method", "opd", *TINY, "--teacher", "builtin:tiny_teacher", "--max-steps", "2", "--jsd-beta", "0.5")
    monkeypatch.setenv(TOKEN, tied_server.token)
    engine = ("--rollout.engine", "vllm", "--vllm.url", tied_server.url)
    assert main([*common, *engine, "--output-dir", str(tmp_path / "run")]) == 0
    first, second = metrics(tmp_path / "run")
    assert first["policy/jsd"] > 0 and second["optim/grad_norm"] > 0
