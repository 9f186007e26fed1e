"""`--rollout.engine auto`: which engine it becomes, what is logged, and that a run and its resume keep the decision."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

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
    own = () if "--nemo-gym.datasets" in argv else ("--data", "d")
    own += ("--teacher", "t") if method == "opd" else ()
    return cli.parse(["--method", method, "--model", "m", *own, *argv])[1]


def no_vllm() -> None:
    raise ValueError("vllm: is not installed; pip install it")


ASKED = [
    ((), None),
    (("--rollout.max-batch-size", "64", "--rollout.cache-gib", "8"), None),
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
        assert asked is None or line == f"rollout.engine=auto: vllm, needed by {asked}"
    replace(cfg, rollout=replace(cfg.rollout, engine="local" if asked is None else "vllm"))  # refuses nothing


def test_a_gym_that_needs_a_server_is_reason_enough():
    cfg = SimpleNamespace(**{name: getattr(parse(), name) for name in ("vllm", "sync", "overlap")})
    assert servers_asked(cfg) is None
    cfg.nemo_gym = SimpleNamespace(multi_turn=True)
    assert servers_asked(cfg) == "nemo_gym.multi_turn=True"


def test_memory_decides_on_a_gpu_and_a_cpu_has_nothing_to_log():
    cfg = parse()
    assert choose(cfg, None, no_vllm) == ("local", "")
    assert choose(cfg, FITS, no_vllm) == (
        "local",
        "rollout.engine=auto: local, it takes at least 24.00 of 137.00 GiB (training 20.00, a copy of the weights "
        "3.00, the cache of one group 1.00)",
    )
    engine, line = choose(cfg, SHORT, lambda: None)
    assert engine == "vllm" and line.startswith("rollout.engine=auto: vllm, sampling in this process takes at least")
    assert "138.00 of 137.00 GiB" in line
    with pytest.raises(ValueError, match=r"auto: .* 138.00 of 137.00 GiB .*, and servers cannot start: vllm: is not"):
        choose(cfg, SHORT, no_vllm)
    given = parse("--rollout.cache-gib", "8")
    with pytest.raises(ValueError, match=r"rollout.cache_gib=8.0: has no effect with vLLM servers, which auto chooses"):
        choose(given, SHORT, lambda: None)
    assert choose(given, FITS, no_vllm).engine == "local"


@pytest.mark.parametrize("method", ["grpo", "gdpo", "rloo", "opd", "online_dpo", "ppo", "ebft"])
def test_what_is_named_is_kept_whatever_the_device(method):
    for engine in ("local", "vllm"):
        cfg = parse("--rollout.engine", engine, method=method)
        assert resolve_engine(cfg, None, []) is cfg


def test_bytes_to_come_and_of_the_engine():
    layer = nn.Linear(8, 4, bias=False, device="meta")
    assert training_bytes(layer, "adamw", 2) == 32 * (4 + 8 + 2) and training_bytes(layer, "adamw", 0) == 32 * (4 + 8)
    assert training_bytes(layer, "adamw_8bit", 4) == 32 * (4 + 2)
    assert training_bytes(layer.bfloat16(), "adamw", 2) == 32 * (2 + 4)
    assert training_bytes(layer.float().requires_grad_(False), "adamw", 2) == 0
    assert training_bytes(nn.Linear(8, 4), "adamw", 2) == 0  # in main memory
    text = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, num_hidden_layers=3)
    layer.requires_grad_(True).config = SimpleNamespace(get_text_config=lambda: text)
    policy = SimpleNamespace(model=layer, compute_dtype=torch.bfloat16, is_lora=False)
    tokens = 128 + 8 * 320  # 100 of the prompt once, 256 + 1 of each completion, in pages of 64
    assert engine_bytes(parse(), policy, 100) == (2 * 32, 2 * 3 * (2 * 8) * 2 * tokens)
    del text.num_attention_heads
    assert engine_bytes(parse(), policy, 100) == (2 * 32, 0)


def test_what_is_free_on_the_gpu_decides(monkeypatch, capsys):
    text = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=32, num_hidden_layers=3)
    model = nn.Linear(1024, 1024, bias=False, device="meta")
    model.config = SimpleNamespace(get_text_config=lambda: text)
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    policy = SimpleNamespace(model=model, compute_dtype=dtype, is_lora=False, is_sharded=False, device=device)
    held, needed = 5 << 20, (5 + 14 + 2) << 20  # gradients, moments, casts; a copy
    cache = 2 * 3 * 16 * 2 * (64 + 8 * 320)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * held)
    monkeypatch.setattr(engine_choice, "find_python", lambda vllm: "python")
    monkeypatch.setattr(engine_choice, "check_build", lambda python, device: None)
    for spare, engine in ((0, "local"), (-1, "vllm")):
        free = needed + cache + engine_choice.SPARE - 2 * held + spare
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10 * free))
        cfg = resolve_engine(parse(), policy, [SimpleNamespace(ids=[1] * 40)], extra_tokens=20)
        assert cfg.rollout.engine == engine
        assert f"rollout.engine=auto: {engine}, " in capsys.readouterr().err


@pytest.mark.gpu
def test_a_small_model_is_sampled_in_process_on_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--method", "grpo", *RUN, "--rollout.cache-gib", "1", "--output-dir", "run"]) == 0
    assert "rollout.engine=auto: local, it takes at least " in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["rollout"]["engine"] == "local"
    assert main(["--resume", "run", "--max-steps", "2"]) == 0
    assert "rollout.engine" not in capsys.readouterr().err


def test_a_run_writes_the_decision_and_its_resume_keeps_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--method", "grpo", *RUN, "--output-dir", "run"]) == 0
    assert "rollout.engine" not in capsys.readouterr().err  # on a CPU there is nothing to choose
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["rollout"] == {
        "engine": "local", "max_batch_size": None, "cache_gib": None, "eval_temperature": 0.5, "eval_top_p": 1.0,
        "eval_top_k": 0,
    }  # fmt: skip
    cfg = cli.parse(["--resume", "run", "--max-steps", "2"])[1]
    assert cfg.rollout.engine == "local"
    with pytest.raises(ValueError, match=r"vllm.replicas=2: has no effect with rollout.engine=local"):
        cli.parse(["--resume", "run", "--vllm.replicas", "2"])
    defaults = default_tree(type(cfg), saved)["rollout"]
    assert [name for name in defaults if defaults[name] != saved["rollout"][name]] == [
        "eval_temperature"
    ]  # report.html

    monkeypatch.setattr(engine_choice, "choose", None)  # would fail if it were asked again
    assert main(["--resume", "run", "--max-steps", "2"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["rollout"] == saved["rollout"]


def test_a_gpu_that_is_too_small_is_refused_before_there_is_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    decide = engine_choice.choose
    monkeypatch.setattr(engine_choice, "choose", lambda cfg, memory, check: decide(cfg, SHORT, no_vllm))
    assert main(["--method", "grpo", *RUN, "--output-dir", "run"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: rollout.engine=auto: sampling in this process takes at least 138.00 of 137.00 GiB")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(engine_choice, "choose", lambda cfg, memory, check: decide(cfg, FITS, no_vllm))
    assert main(["--method", "grpo", *RUN, "--output-dir", "run"]) == 0
    assert "rollout.engine=auto: local, it takes at least 24.00 of 137.00 GiB" in capsys.readouterr().err


def test_streaming_in_process_trains_as_without(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two = ("--num-generations", "4", "--rollout.engine", "local")
    assert main(["--method", "grpo", *RUN, *two, "--output-dir", "whole"]) == 0
    assert main(["--method", "grpo", *RUN, *two, "--streaming-partial-batch", "--output-dir", "stream"]) == 0
    assert repeatable(metrics(tmp_path / "whole")) == repeatable(metrics(tmp_path / "stream"))


def test_runs_of_before_are_read_as_before(tmp_path):
    """Their config.yaml has every default of then: engine local, and 256 rows, also where nothing read them."""
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
