"""--rollout.engine auto: the choice, its log line, and that a resumed run keeps the choice."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from data.errors import UserError
from tests.entry import metrics, repeatable
from trainer import cli
from trainer.__main__ import main
from trainer.config.defaults import default_tree
from trainer.config.groups import servers_asked
from trainer.rl import engine_choice
from trainer.rl.engine_choice import GIB, Memory, choose, engine_bytes, resolve_engine, training_bytes

FITS = Memory(training=20 * GIB, copy=3 * GIB, cache=GIB, room=137 * GIB)
SHORT = FITS._replace(training=134 * GIB)
GYM = ("--nemo-gym.datasets", "rows.jsonl", "--nemo-gym.multi-turn", "--vllm.port", "8000", "--reward-funcs", "env")
RUN = (
    "--model", "builtin:tiny", "--data", "task:addition:size=8", "--max-steps", "1", "--save-steps", "1",
    "--max-completion-length", "4", "--rollout.eval-temperature", "0.5", "--per-device-train-batch-size", "8",
)  # fmt: skip


def parse(*argv: str, method: str = "grpo"):
    required = () if "--nemo-gym.datasets" in argv else ("--data", "d")
    required += ("--teacher", "t") if method == "opd" else ()
    return cli.parse(["--method", method, "--model", "m", *required, *argv])[1]


def no_vllm() -> None:
    raise UserError("vllm: is not installed")


ASKED = [
    ((), None),
    (("--rollout.max-batch-size", "64", "--rollout.cache-gib", "8"), None),
    (("--rollout.partial", "0.5"), None),
    (("--streaming-partial-batch",), None),
    (("--dynamic-sampling",), None),
    (("--vllm.replicas", "2"), "vllm.replicas=2"),
    (("--vllm.url", "http://a:1", "http://b:2"), "vllm.url=http://a:1 http://b:2"),
    (("--sync.probe-every", "5"), "sync.probe_every=5"),
    (("--async-prefetch",), "async_prefetch=True"),
    (("--vllm-sync-interval", "4"), "vllm_sync_interval=4"),
    (("--vllm-lora-sync", "--lora.r", "8"), "sync.backend=lora"),
    (GYM, "vllm.port=8000"),
]


@pytest.mark.parametrize(("argv", "asked"), ASKED)
def test_settings_that_need_servers_decide_on_any_device(argv, asked):
    cfg = parse(*argv)
    assert cfg.rollout.engine == "auto" and servers_asked(cfg) == asked
    for memory in (None, FITS):
        engine, line = choose(cfg, memory, no_vllm)
        assert engine == ("local" if asked is None else "vllm")
        assert asked is None or line.startswith("rollout.engine=auto: vllm, ") and asked in line
    replace(cfg, rollout=replace(cfg.rollout, engine="local" if asked is None else "vllm"))  # is accepted


def test_memory_decides_on_a_gpu():
    cfg = parse()
    assert choose(cfg, None, no_vllm) == ("local", "")
    engine, line = choose(cfg, FITS, no_vllm)
    assert engine == "local" and line.startswith("rollout.engine=auto: local, ")
    assert all(x in line for x in ("24.00 of 137.00 GiB", "training 20.00", "weights 3.00", "group 1.00"))
    engine, line = choose(cfg, SHORT, lambda: None)
    assert engine == "vllm" and line.startswith("rollout.engine=auto: vllm, ") and "138.00 of 137.00 GiB" in line
    with pytest.raises(ValueError, match=r"auto: .* 138.00 of 137.00 GiB .*: vllm: is not"):
        choose(cfg, SHORT, no_vllm)
    local = parse("--rollout.cache-gib", "8")
    with pytest.raises(ValueError, match="rollout.cache_gib=8.0: has no effect with vLLM servers"):
        choose(local, SHORT, lambda: None)
    assert choose(local, FITS, no_vllm).engine == "local"


@pytest.mark.parametrize("method", ["grpo", "gdpo", "rloo", "opd", "online_dpo", "ppo", "ebft"])
def test_an_explicit_engine_is_kept(method):
    for engine in ("local", "vllm"):
        cfg = parse("--rollout.engine", engine, method=method)
        assert resolve_engine(cfg, None, []) is cfg


def test_bytes_of_training_and_engine():
    layer = nn.Linear(8, 4, bias=False, device="meta")
    assert training_bytes(layer, "adamw", 2) == 32 * (4 + 8 + 2) and training_bytes(layer, "adamw", 0) == 32 * (4 + 8)
    assert training_bytes(layer, "adamw_8bit", 4) == 32 * (4 + 2)
    assert training_bytes(layer.bfloat16(), "adamw", 2) == 32 * (2 + 4)
    assert training_bytes(layer.float().requires_grad_(False), "adamw", 2) == 0
    assert training_bytes(nn.Linear(8, 4), "adamw", 2) == 0  # in main memory
    text = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, num_hidden_layers=3)
    layer.requires_grad_(True).config = SimpleNamespace(get_text_config=lambda: text)
    policy = SimpleNamespace(model=layer, compute_dtype=torch.bfloat16, is_lora=False)
    # in pages of 64: 100 prompt tokens once, 256 + 1 tokens and a spare page per completion, a scratch page
    tokens = 128 + 8 * 384 + 64
    assert engine_bytes(parse(), policy, 100) == (2 * 32, 2 * 3 * (2 * 8) * 2 * tokens)
    text.layer_types = ["conv", "full_attention", "conv"]
    assert engine_bytes(parse(), policy, 100) == (2 * 32, 2 * 1 * (2 * 8) * 2 * tokens)
    del text.num_attention_heads
    assert engine_bytes(parse(), policy, 100) == (2 * 32, 0)


def test_free_gpu_memory_decides(monkeypatch, capsys):
    text = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, num_hidden_layers=3)
    model = nn.Linear(1024, 1024, bias=False, device="meta")
    model.config = SimpleNamespace(get_text_config=lambda: text)
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    policy = SimpleNamespace(model=model, compute_dtype=dtype, is_lora=False, is_sharded=False, device=device)
    allocated, needed = 5 << 20, (5 + 14 + 2) << 20  # gradients, moments, casts; a copy
    cache = 2 * 3 * 16 * 2 * (64 + 8 * 384 + 64)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * allocated)
    monkeypatch.setattr(engine_choice, "check_vllm", lambda vllm: None)
    for spare, engine in ((0, "local"), (-1, "vllm")):
        free = needed + cache + engine_choice.SPARE - 2 * allocated + spare
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10 * free))
        cfg = resolve_engine(parse(), policy, [SimpleNamespace(ids=[1] * 40)], extra_tokens=20)
        assert cfg.rollout.engine == engine
        assert f"rollout.engine=auto: {engine}, " in capsys.readouterr().err


@pytest.mark.gpu
def test_a_small_model_is_sampled_in_process_on_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--method", "grpo", *RUN, "--rollout.cache-gib", "1", "--output-dir", "run"]) == 0
    assert "rollout.engine=auto: local, " in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["rollout"]["engine"] == "local"
    assert main(["--resume", "run", "--max-steps", "2"]) == 0
    assert "rollout.engine" not in capsys.readouterr().err


def test_a_resumed_run_keeps_the_engine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--method", "grpo", *RUN, "--output-dir", "run"]) == 0
    assert "rollout.engine" not in capsys.readouterr().err  # a CPU has no choice
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["rollout"] == {
        "engine": "local", "max_batch_size": None, "cache_gib": None, "partial": 0.0, "eval_temperature": 0.5,
        "eval_top_p": 1.0, "eval_top_k": 0, "replay_routes": True,
    }  # fmt: skip
    cfg = cli.parse(["--resume", "run", "--max-steps", "2"])[1]
    assert cfg.rollout.engine == "local"
    with pytest.raises(ValueError, match="vllm.replicas=2: .*rollout.engine=local"):
        cli.parse(["--resume", "run", "--vllm.replicas", "2"])
    defaults = default_tree(type(cfg), saved)["rollout"]
    assert [name for name in defaults if defaults[name] != saved["rollout"][name]] == [
        "eval_temperature"
    ]  # report.html

    monkeypatch.setattr(engine_choice, "choose", None)  # a second call would fail
    assert main(["--resume", "run", "--max-steps", "2"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["rollout"] == saved["rollout"]


def test_a_gpu_that_is_too_small_is_an_error_before_the_run_folder_exists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    decide = engine_choice.choose
    monkeypatch.setattr(engine_choice, "choose", lambda cfg, memory, check: decide(cfg, SHORT, no_vllm))
    assert main(["--method", "grpo", *RUN, "--output-dir", "run"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: rollout.engine=auto: ") and "138.00 of 137.00 GiB" in error
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(engine_choice, "choose", lambda cfg, memory, check: decide(cfg, FITS, no_vllm))
    assert main(["--method", "grpo", *RUN, "--output-dir", "run"]) == 0
    line = capsys.readouterr().err
    assert "rollout.engine=auto: local, " in line and "24.00 of 137.00 GiB" in line


def test_streaming_does_not_change_a_local_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two = ("--num-generations", "4", "--rollout.engine", "local")
    assert main(["--method", "grpo", *RUN, *two, "--output-dir", "whole"]) == 0
    assert main(["--method", "grpo", *RUN, *two, "--streaming-partial-batch", "--output-dir", "stream"]) == 0
    assert repeatable(metrics(tmp_path / "whole")) == repeatable(metrics(tmp_path / "stream"))


def test_configs_of_earlier_versions_keep_their_engine(tmp_path):
    """Their config.yaml contains the former defaults, even unused ones: engine local and 256 rows."""
    (tmp_path / "run").mkdir()
    old = {"max_batch_size": 256, "eval_temperature": 0.0, "eval_top_p": 1.0, "eval_top_k": 0}
    for method, extra, engine, found in (
        ("grpo", {}, "local", ("local", 256)),
        ("grpo", {}, "vllm", ("vllm", None)),
        ("ebft", {}, "local", ("local", 256)),
        ("ebft", {"mode": "strided"}, "local", ("auto", None)),
    ):
        tree = {"method": method, "model": "m", "data": ["d"], "rollout": {"engine": engine, **old}, **extra}
        file = tmp_path / "run" / "config.yaml"
        file.write_text(yaml.safe_dump(tree))
        for argv in (["--resume", str(tmp_path / "run")], ["--config", str(file)]):
            cfg = cli.parse(argv)[1]
            assert (cfg.rollout.engine, cfg.rollout.max_batch_size) == found, (method, argv)
