"""Tiny models of current architectures, in float32 and bfloat16: leak probe, one SFT step, one GRPO step, sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from rollout.engine import Request, Sampling
from rollout.engines.local import LocalEngine
from tests.entry import metrics, run_ok
from trainer.policy.logps import Policy, check_logps
from trainer.tiny.build import make_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("dtype", ["float32", "bfloat16"]),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # a warning on CPUs without bfloat16 instructions
]

COMMON = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
HEAD = dict(head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1,
              topk_group=1)  # fmt: skip
LATENT = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8,
              v_head_dim=8)  # fmt: skip
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
ATTENTION: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": HEAD,
    "qwen3_moe": HEAD | EXPERTS,
    "smollm3": {},
    "olmo3": {},
    "phi3": {},
    "ministral3": HEAD,
    "granite": {},
    "glm4": HEAD,
    "glm4_moe": HEAD | ROUTED,
    "gemma3_text": HEAD | dict(query_pre_attn_scalar=8, sliding_window=4),
    "gemma4_text": HEAD | dict(global_head_dim=8, sliding_window=4, hidden_size_per_layer_input=8,
                               vocab_size_per_layer_input=275, num_kv_shared_layers=0),
    "deepseek_v3": ROUTED | LATENT,
    "minimax_m2": HEAD | LOCAL,
    "gpt_oss": HEAD | LOCAL | dict(sliding_window=4),
}  # fmt: skip

LINEAR = dict(layer_types=["linear_attention", "full_attention"])
HEADS = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
DELTA = HEAD | LINEAR | HEADS
SHARED = EXPERTS | dict(shared_expert_intermediate_size=16)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2)
CONV = dict(layer_types=["conv", "full_attention"])
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | SHARED,
    "qwen3_next": DELTA | SHARED,
    "olmo_hybrid": LINEAR | HEADS,
    "nemotron_h": HEAD | dict(layers_block_type=["mamba", "attention"], mamba_num_heads=4, mamba_head_dim=16,
                              ssm_state_size=8, n_groups=1),
    "granitemoehybrid": MAMBA | LOCAL | dict(layer_types=["mamba", "attention"], shared_intermediate_size=16),
    "lfm2": CONV,
    "lfm2_moe": CONV | EXPERTS | dict(num_dense_layers=1),
    "falcon_h1": MAMBA | dict(mamba_d_ssm=64),
    "kimi_linear": LINEAR | LATENT | LOCAL | dict(linear_head_dim=8, linear_num_heads=2, moe_intermediate_size=16),
    "jamba": dict(num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False),
    "bamba": MAMBA | dict(attn_layer_indices=[1]),
    "zamba2": dict(n_mamba_heads=4, layers_block_type=["mamba", "hybrid"], mamba_d_state=8, mamba_ngroups=1),
    "mamba": {},
    "mamba2": dict(num_heads=4, head_dim=16, state_size=8, n_groups=1),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], lru_width=32, attention_window_size=8),
    "rwkv": dict(attention_hidden_size=32, context_length=64),
    "minimax": HEAD | LINEAR | LOCAL,
    "xlstm": dict(num_heads=4),
}  # fmt: skip
SAMPLED = list(RECURRENT)[: list(RECURRENT).index("mamba")]  # the others give a one-line error


def make_model(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = COMMON | (ATTENTION | RECURRENT)[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=275, **settings))


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def policy_of(model: Any, dtype: str) -> Policy:
    device, compute_dtype = torch.device("cpu"), getattr(torch, dtype)
    return Policy(model=model, tokenizer=None, source="tiny", device=device, compute_dtype=compute_dtype)


def flags_of(method: str, model: Path, dtype: str) -> list[Any]:
    rollout = ["--num-generations", 2, "--max-completion-length", 4] if method == "grpo" else []
    return [
        "--method", method, "--model", model, "--dtype", dtype, "--data", "task:addition", "--max-steps", 1,
        "--per-device-train-batch-size", 4, "--max-eval-rows", 2, "--save-steps", 0, *rollout,
        "--output-dir", model / method,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_models_pass_the_probe_and_train(tmp_path, kind, dtype):
    model = make_model(kind)
    check_logps(policy_of(model, dtype))
    folder = save(model, tmp_path)
    for method in ("sft", "grpo"):
        run_ok(*flags_of(method, folder, dtype), cwd=tmp_path)
        assert metrics(folder / method)[-1]["step"] == 1


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_models_train(tmp_path, kind, dtype):
    folder = save(make_model(kind), tmp_path)
    for method in ("sft", "grpo") if kind in SAMPLED else ("sft",):
        done = run_ok(*flags_of(method, folder, dtype), cwd=tmp_path)
        assert f"layers of model_type={kind} carry state" in done.stderr
        assert metrics(folder / method)[-1]["step"] == 1


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_models_sample_or_give_a_one_line_error(kind, dtype):
    autocast_dtype = torch.bfloat16 if dtype == "bfloat16" else None
    engine = LocalEngine(make_model(kind), make_tokenizer(), autocast_dtype=autocast_dtype, log=lambda line: None)
    prompts = ([5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [11, 12], list(range(20, 30)))
    requests = [Request(prompt_ids=prompt, seed=i, max_tokens=3 + 3 * i) for i, prompt in enumerate(prompts)]
    try:
        completions = engine.generate(requests, Sampling())
    except UserError as error:
        assert kind not in SAMPLED and str(error).startswith("rollout.engine=local: "), error
        return
    logps = engine.logps([(c.prompt_ids, c.ids) for c in completions], 1.0)
    gaps = [abs(a - b) for c, row in zip(completions, logps, strict=True) for a, b in zip(c.logps, row, strict=True)]
    assert max(gaps) < (1e-3 if dtype == "float32" else 0.25), gaps
