"""--exact-sampling on a CPU: engine and trainer give the same bits in every step, and other settings are rejected."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen3Config

from data.errors import UserError
from rollout.engine import Request, Sampling
from rollout.engines.local import LocalEngine
from tests.entry import ROOT, metrics, repeatable, run_ok
from trainer.cli import parse
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.policy.load import load_policy, make_policy_exact, release
from trainer.policy.logps import Policy, logps_in_training
from trainer.rl.engine_choice import Memory, choose

CPU = torch.device("cpu")
RUN = [
    "--method", "grpo", "--exact-sampling", "--max-steps", 3, "--per-device-train-batch-size", 16,
    "--data", "task:addition:split=train,size=64", "--eval-data", "task:addition:split=eval,size=4",
]  # fmt: skip
PLAIN = ["policy/behaviour_gap", "policy/behaviour_kl", "policy/behaviour_chi2"]
SIZES = dict(
    vocab_size=275, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2, pad_token_id=0, bos_token_id=None,
)  # fmt: skip


def check_exact(folder: Path, steps: int = 3) -> list[dict]:
    rows = [row for row in metrics(folder) if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert [row[name] for name in PLAIN] == [0.0] * 3 and row["policy/behaviour_ratio"] == 1.0, row
    return rows


SHAPES = {
    "small micro-batches, few rows": ["--max-tokens-per-micro-batch", 40, "--rollout.max-batch-size", 3],
    "temperature, reference, several steps": ["--temperature", 0.7, "--beta", 0.1, "--minibatches-per-rollout", 2],
    "a row for each completion, recomputed blocks": ["--no-packing", "--gradient-checkpointing", "true"],
    "no shared prompts, two iterations": ["--no-share-prompt", "--num-iterations", 2, "--num-generations", 4],
}
LONG = ("small micro-batches, few rows", "a row for each completion, recomputed blocks")


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=[pytest.mark.slow] * (shape in LONG)) for shape in SHAPES])
def test_the_gap_to_the_engine_is_zero(shape, tmp_path):
    flags = [*RUN, *SHAPES[shape], "--output-dir", tmp_path / "run"]
    run_ok(*flags, cwd=tmp_path)
    rows = check_exact(tmp_path / "run")
    if "--num-iterations" not in flags and "--minibatches-per-rollout" not in flags:
        assert all(row["policy/ratio"] == 1.0 and row["optim/grad_norm"] > 0 for row in rows)


def test_a_resumed_run_is_exact_and_equal(tmp_path):
    flags = [*RUN, "--save-steps", 2, "--output-dir", tmp_path / "run"]
    run_ok(*flags, cwd=tmp_path)
    whole = repeatable(check_exact(tmp_path / "run"))
    run_ok("--resume", tmp_path / "run" / "checkpoints" / "step-00000002", cwd=tmp_path)
    assert repeatable(check_exact(tmp_path / "run")) == whole


def test_gradients_are_those_of_a_plain_run(tmp_path):
    for name, flags in (("exact", RUN), ("plain", [flag for flag in RUN if flag != "--exact-sampling"])):
        run_ok(*flags, "--output-dir", tmp_path / name, cwd=tmp_path)
    exact, plain = (metrics(tmp_path / name)[1] for name in ("exact", "plain"))
    assert exact["reward/mean"] == plain["reward/mean"] and plain["policy/behaviour_gap"] > 0
    assert exact["optim/grad_norm"] == pytest.approx(plain["optim/grad_norm"], rel=1e-4)
    assert exact["loss/total"] == pytest.approx(plain["loss/total"], abs=1e-6)


def open_exact(folder: Path, kind: str, dtype: str = "float32") -> Policy:
    config = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind](
        **SIZES, **({"head_dim": 16} if kind == "qwen3" else {})
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases that matter
        parameter.data += 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "trainer" / "tiny").save_pretrained(folder)
    policy = load_policy(ModelConfig(model=str(folder), dtype=dtype), LoraConfig(), CPU, with_reference=False)
    make_policy_exact(policy)
    return policy


def open_engine(policy: Policy, **options) -> LocalEngine:
    options = {"exact_logps": partial(logps_in_training, policy), "log": lambda line: None} | options
    return LocalEngine(policy.model, policy.tokenizer, autocast_dtype=policy.autocast_dtype, **options)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("qwen2", "float32", marks=pytest.mark.slow),
        pytest.param("qwen3", "float32", marks=pytest.mark.slow),
        ("qwen3", "bfloat16"),
    ],
    ids=str,
)
def test_other_architectures(kind, dtype, tmp_path):
    """Qwen2 has biases, Qwen3 norms of the heads. Prompts and completions end within and beyond a page."""
    policy = open_exact(tmp_path, kind, dtype)
    requests = [Request(prompt_ids=[3 + i % 97 for i in range(n)], seed=n) for n in (1, 15, 16, 17, 40, 40, 70)]
    sampling = Sampling(max_tokens=21)
    for size in (2, 64):
        completions = open_engine(policy, max_batch_size=size).generate(requests, sampling)
        want = logps_in_training(policy, [(c.prompt_ids, c.ids) for c in completions])
        assert [c.logps for c in completions] == want
        assert logps_in_training(policy, [(completions[3].prompt_ids, completions[3].ids)]) == want[3:4]
    engine = open_engine(policy)
    engine.generate(requests[:1], sampling)
    assert engine.logps([(completions[5].prompt_ids, completions[5].ids)], 1.0)[0] == pytest.approx(want[5], abs=0.2)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    engine.load(1)
    (completion,) = engine.generate(requests[:1], sampling)
    assert logps_in_training(policy, [(completion.prompt_ids, completion.ids)]) == [completion.logps] != want[:1]


def test_a_released_model_is_plain_again(tmp_path):
    policy = open_exact(tmp_path, "qwen3")
    release(policy)
    ids = torch.arange(3, 23)[None]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(policy.model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(policy.model(ids).logits, plain(ids).logits)


def test_a_difference_of_one_bit_stops_the_run(tmp_path):
    policy = open_exact(tmp_path, "qwen3")

    def off_by_one_bit(pairs) -> list[list[float]]:
        first, *rest = logps_in_training(policy, pairs)
        value = torch.tensor(first[0])
        return [[torch.nextafter(value, torch.tensor(0.0)).item(), *first[1:]], *rest]

    engine = open_engine(policy, exact_logps=off_by_one_bit)
    with pytest.raises(UserError, match="exact_sampling=True: .* 1 of 14 log-probs differ from the trainer's"):
        engine.generate([Request(prompt_ids=[5], seed=0)], Sampling(max_tokens=2))


def test_models_that_are_not_supported(tmp_path):
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "trainer" / "tiny").save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(model=str(tmp_path)), LoraConfig(), CPU, with_reference=False)
    with pytest.raises(UserError, match="exact_sampling=True: not supported with model=.*: it has sliding windows"):
        make_policy_exact(policy)


REJECTED = {
    "lora.r=4": ["--lora.r", "4"],
    "compile=True": ["--compile"],
    "attn_implementation=eager": ["--attn-implementation", "eager"],
    "top_k=5": ["--top-k", "5"],
    "top_p=0.9": ["--top-p", "0.9"],
    "min_p=0.1": ["--min-p", "0.1"],
    "rollout.engine=vllm": ["--rollout.engine", "vllm"],
    "async_prefetch=True": ["--async-prefetch"],
    "rollout.partial=0.5": ["--rollout.partial", "0.5"],
    "replay_buffer_size=8": ["--replay-buffer-size", "8"],
    "tools=my_tools.py": ["--tools", "my_tools.py"],
}


@pytest.mark.parametrize("setting", REJECTED)
def test_settings_that_are_rejected(setting):
    with pytest.raises(UserError) as raised:
        parse(["--method", "grpo", "--exact-sampling", *REJECTED[setting]])
    assert str(raised.value) == f"exact_sampling=True: not supported with {setting}; remove one of the two flags"


def test_auto_chooses_the_local_engine_even_if_memory_is_short():
    cfg = parse(["--method", "grpo", "--exact-sampling"])[1]
    assert choose(cfg, Memory(1.0, 1.0, 1.0, room=0.0), lambda: None).engine == "local"


def test_methods_and_ranks_that_are_rejected(monkeypatch):
    with pytest.raises(UserError, match="exact_sampling=True: not supported with method=opd"):
        parse(["--method", "opd", "--exact-sampling"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="exact_sampling=True: not supported with 2 ranks"):
        parse(["--method", "grpo", "--exact-sampling"])
