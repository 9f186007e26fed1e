"""`--compile auto`: the choice, its log line, which models are compiled, and --resume."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from data.packing import Item, make_batches
from tests.entry import metrics
from trainer import cli
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.config.defaults import default_tree
from trainer.policy import compile_choice
from trainer.policy.compile_choice import ENOUGH_STEPS, Choice, choose, obstacle, resolve_compile
from trainer.policy.load import blocks_of, load_policy, recomputing
from trainer.policy.logps import causal_lm, reference_logps, token_logps

CPU = torch.device("cpu")
RUNS = {
    "sft": ("--data", "task:addition:size=8", "--per-device-train-batch-size", "4"),
    "grpo": ("--data", "task:addition:size=8", "--max-completion-length", "4", "--per-device-train-batch-size", "8"),
}


@pytest.fixture(scope="module")
def policy():
    return load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), CPU, with_reference=True)


@pytest.fixture
def compiled(monkeypatch):
    """Replace torch.compile by a no-op; return the modules whose forward it was called with."""
    called: list[nn.Module] = []
    monkeypatch.setattr(torch, "compile", lambda forward, **options: called.append(forward.__self__) or forward)
    return called


def parse(*argv: str):
    return cli.parse(["--method", "sft", "--model", "m", "--data", "d", *argv])[1]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), "auto"),
        (("--compile",), True),
        (("--compile", "--packing"), True),
        (("--no-compile",), False),
        (("--compile", "auto"), "auto"),
        (("--compile", "true"), True),
        (("--compile", "False"), False),
    ],
)
def test_flag_is_auto_true_or_false_and_true_without_a_value(argv, expected):
    assert parse(*argv).model.compile is expected


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False), ("auto", "auto"), ("on", True)])
def test_yaml_booleans_are_accepted(value, expected, tmp_path):
    (tmp_path / "own.yaml").write_text(f"compile: {value}\n")
    assert parse("--config", str(tmp_path / "own.yaml")).model.compile is expected


def test_other_values_are_rejected():
    with pytest.raises(ValueError, match=r"^--compile=sometimes: .*auto.*true.*false"):
        parse("--compile", "sometimes")


def test_number_of_steps_decides_on_a_gpu():
    assert choose("cpu", 10**6, "") == Choice(False, "")
    off, on = choose("cuda", ENOUGH_STEPS - 1, ""), choose("cuda", ENOUGH_STEPS, "")
    assert not off.compile and "compile=auto: off, 199 steps" in off.line
    assert on.compile and "compile=auto: on, 200 steps" in on.line
    experts = choose("cuda", 10**6, "the model has experts")
    assert not experts.compile and "compile=auto: off, the model has experts; --compile" in experts.line


def test_obstacles_are_experts_and_missing_blocks_but_not_sharding(policy):
    assert obstacle(policy) == obstacle(replace(policy, is_sharded=True)) == ""

    def like(dtype: torch.dtype = torch.bfloat16, **settings):
        text = SimpleNamespace(**{"num_hidden_layers": 2} | settings)
        model = nn.Module()
        model.config, model.base_model = SimpleNamespace(get_text_config=lambda: text), nn.Module()
        return SimpleNamespace(model=model, source="m", compute_dtype=dtype, is_exact=False)

    experts = {"num_experts_per_tok": 2, "_experts_implementation": "grouped_mm"}
    assert "loops over its experts" in obstacle(like(**experts | {"_experts_implementation": "eager"}))
    assert "--dtype bfloat16" in obstacle(like(dtype=torch.float32, **experts))
    assert "blocks" in obstacle(like(**experts))
    assert "linear_attention" in obstacle(like(layer_types=["linear_attention", "full_attention"]))
    assert obstacle(like()) == "the blocks of the model were not found"


def test_companion_with_an_obstacle_decides_for_all_models(policy, compiled, monkeypatch, capsys):
    """Compiling a teacher with experts does not pay off, and a teacher without known blocks would stop the run."""
    companion = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), CPU, with_reference=False)
    monkeypatch.setattr(policy, "companions", [companion])
    monkeypatch.setattr(policy, "device", torch.device("cuda", 0))
    text = companion.model.config.get_text_config()
    for name, value in (("num_experts_per_tok", 2), ("num_hidden_layers", 1000)):  # on a CPU, in float32
        with monkeypatch.context() as patch:
            patch.setattr(text, name, value, raising=False)
            assert resolve_compile(parse(), policy, 1000).model.compile is False and compiled == []
        err = capsys.readouterr().err
        assert err.startswith("compile=auto: off, ") and companion.source in err


def test_auto_compiles_all_models_of_a_step_or_none(policy, compiled, monkeypatch, capsys):
    companion = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), CPU, with_reference=False)
    monkeypatch.setattr(policy, "companions", [companion])
    monkeypatch.setattr(policy, "device", torch.device("cuda", 0))
    assert resolve_compile(parse(), policy, 10).model.compile is False and compiled == []
    assert "compile=auto: off" in capsys.readouterr().err
    assert resolve_compile(parse(), policy, 1000).model.compile is True
    models = [causal_lm(model) for model in (policy.model, policy.reference, companion.model)]
    assert compiled == [block for lm in models for block in lm.base_model.layers]
    assert capsys.readouterr().err.count("compile=auto: on, 1000 steps") == 1
    compiled.clear()
    for argv in (("--compile",), ("--compile", "false")):  # no choice: load_policy has compiled them or not
        cfg = parse(*argv)
        assert resolve_compile(cfg, policy, 1000) is cfg
    assert compiled == [] and capsys.readouterr().err == ""


@pytest.mark.gpu
@pytest.mark.parametrize("method", RUNS)
def test_long_run_on_a_gpu_is_compiled(method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compile_choice, "ENOUGH_STEPS", 3)
    start = ["--method", method, "--model", "builtin:tiny", *RUNS[method], "--max-steps", "3"]
    assert main([*start, "--output-dir", "run"]) == 0
    assert "compile=auto: on, 3 steps" in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["compile"] is True
    assert main([*start, "--max-steps", "2", "--output-dir", "short"]) == 0
    assert "compile=auto: off, 2 steps" in capsys.readouterr().err


@pytest.mark.parametrize("method", RUNS)
def test_run_saves_the_choice_and_resume_keeps_it(method, tmp_path, monkeypatch, capsys, compiled):
    monkeypatch.chdir(tmp_path)
    start = ["--method", method, "--model", "builtin:tiny", *RUNS[method], "--max-steps", "1", "--save-steps", "1"]
    assert main([*start, "--output-dir", "off"]) == 0
    assert "compile=auto" not in capsys.readouterr().err  # always off on a CPU
    saved = yaml.safe_load((tmp_path / "off" / "config.yaml").read_text())
    assert saved["compile"] is False and compiled == []
    assert default_tree(type(cli.parse(start)[1]), saved)["compile"] is False  # not a change in report.html

    monkeypatch.setattr(compile_choice, "choose", lambda *_: Choice(True, "compile=auto: on, for a test"))
    assert main([*start, "--output-dir", "on"]) == 0
    assert "compile=auto: on, for a test" in capsys.readouterr().err and len(compiled) > 0
    monkeypatch.setattr(compile_choice, "choose", None)  # a second choice would fail
    for name, choice in (("off", False), ("on", True)):
        compiled.clear()
        assert main(["--resume", name, "--max-steps", "2"]) == 0
        assert [row["step"] for row in metrics(tmp_path / name)] == [1, 2]
        assert yaml.safe_load((tmp_path / name / "config.yaml").read_text())["compile"] is choice
        assert bool(compiled) == choice


@pytest.mark.slow
def test_recomputation_inside_the_graph_skips_the_last_matmul(monkeypatch):
    """The backward pass recomputes six of a block's seven matmuls; gradients match the uncompiled block's."""
    matmuls: list[int] = []

    def counted(graph, inputs):
        matmuls.append(sum("aten.mm" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    def gradients(**settings):
        loaded = load_policy(
            ModelConfig(model="builtin:tiny", dtype="float32", **{"gradient_checkpointing": True, **settings}),
            LoraConfig(), CPU, with_reference=False,
        )  # fmt: skip
        for length in (20, 31):
            item = Item([i % 200 for i in range(length)], [False] + [True] * (length - 1))
            (batch,) = make_batches([item], max_tokens=64)
            token_logps(loaded, batch).logp.sum().backward()
        return {name: p.grad for name, p in loaded.model.named_parameters()}

    backend = aot_autograd(fw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    plain = torch.compile
    compiler = {"backend": backend, "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda forward, options, **o: plain(forward, **compiler, **o))
    want = gradients()
    torch._dynamo.reset()
    got = gradients(compile=True)
    torch._dynamo.reset()
    assert matmuls == [7, 6 + 14]
    matmuls.clear()
    with recomputing(2):  # of three blocks
        some = gradients(compile=True, gradient_checkpointing="auto")
    torch._dynamo.reset()
    assert sorted(matmuls) == [7, 7, 14, 6 + 14], "one graph for recomputed blocks and one for the others"
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(some[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_blocks_with_dropout_are_recomputed_with_the_same_masks(monkeypatch):
    """By the outer checkpoint: with torch 2.11, inductor fails to compile a graph that recomputes them."""
    plain, gradients = torch.compile, []
    monkeypatch.setattr(torch, "compile", lambda forward, options, **o: plain(forward, backend="aot_eager", **o))
    for recomputes in (False, True):
        torch.manual_seed(0)
        cfg = ModelConfig(model="builtin:tiny", dtype="float32", compile=True, gradient_checkpointing=recomputes)
        policy = load_policy(cfg, LoraConfig(r=4, dropout=0.5), CPU, with_reference=False)
        blocks = blocks_of(causal_lm(policy.model), "tiny")
        assert {block.gradient_checkpointing for block in blocks} == {recomputes}
        for length in (20, 31):
            item = Item([i % 200 for i in range(length)], [False] + [True] * (length - 1))
            (batch,) = make_batches([item], max_tokens=64)
            token_logps(policy, batch).logp.sum().backward()
        gradients.append({name: p.grad for name, p in policy.model.named_parameters() if "lora_B" in name})
    torch._dynamo.reset()
    assert all(gradient.any() for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_all_graphs_have_the_same_compiler_options_and_serve_all_blocks(monkeypatch):
    """For the policy and the reference, and for the first and later lengths."""
    import torch._inductor.compile_fx as inductor

    options = []

    def compile_fx(graph, inputs, *, config_patches, **_):
        options.append(config_patches)
        return graph.forward

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    cfg = ModelConfig(model="builtin:tiny", dtype="float32", compile=True)
    policy = load_policy(cfg, LoraConfig(r=4), CPU, with_reference=True)
    for length in (20, 31):
        item = Item([i % 200 for i in range(length)], [False] + [True] * (length - 1))
        (batch,) = make_batches([item], max_tokens=64)
        assert torch.equal(token_logps(policy, batch).logp, reference_logps(policy, batch))
    torch._dynamo.reset()
    assert len(blocks_of(causal_lm(policy.model), "tiny")) > 1
    assert options == [{"emulate_precision_casts": True, "deterministic": True}] * 3  # the reference has two graphs


@pytest.mark.gpu
def test_on_a_gpu_attention_is_not_recomputed(monkeypatch):
    """Compiled checkpointed blocks save the attention output and recompute everything else."""
    graphs: dict[str, list[str]] = {}

    def recorder(name):
        def compiler(graph, inputs):
            graphs[name] = [str(node.target) for node in graph.graph.nodes if "flex_attention" in str(node.target)]
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=recorder("forward"), bw_compiler=recorder("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, options, **o: plain(forward, backend=backend, **o))
    cfg = ModelConfig(model="builtin:tiny", gradient_checkpointing=True, compile=True)
    policy = load_policy(cfg, LoraConfig(), torch.device("cuda"), with_reference=False)
    item = Item(list(range(1, 40)), [False] + [True] * 38)
    (batch,) = make_batches([item], max_tokens=256, multiple=policy.row_multiple)
    token_logps(policy, batch.to(policy.device)).logp.sum().backward()
    torch._dynamo.reset()
    assert graphs == {"forward": ["flex_attention"], "backward": ["flex_attention_backward"]}
