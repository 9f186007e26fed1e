"""The load-balancing loss vs. transformers' loss over all sequences of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.packing import Item
from tests.entry import metrics, repeatable
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig, RunConfig
from trainer.methods.sft import backward
from trainer.offline.rows import pack_items
from trainer.policy.experts import RouterLoss
from trainer.policy.load import BUILTIN, load_policy
from trainer.policy.logps import Policy

CPU = torch.device("cpu")
COEF = 3.0  # large, so that its gradient is not lost in the likelihood's
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, initializer_range=0.2, vocab_size=275, bos_token_id=None, eos_token_id=2,
             pad_token_id=0, num_experts_per_tok=2)  # fmt: skip
MODELS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8},
}
SEQUENCES = [list(range(3 + n, 3 + n + length)) for n, length in enumerate((13, 5, 9, 21, 3))]


@pytest.fixture(params=MODELS)
def folder(request, tmp_path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES, **MODELS[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(BUILTIN["builtin:tiny"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path) -> Policy:
    return load_policy(ModelConfig(model=str(folder)), LoraConfig(), CPU, with_reference=False)


def by_transformers(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The load-balancing loss, and the gradient of likelihood plus loss; every sequence runs alone."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    lm = load(folder).model
    config, nll, routed = lm.config, [], []
    for ids in SEQUENCES:
        ids = torch.tensor(ids)
        out = lm(input_ids=ids[None], output_router_logits=True)
        nll.append(-out.logits[0, :-1].log_softmax(dim=-1).gather(1, ids[1:, None])[:, 0])
        routed.append(out.router_logits)
    layers = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
    aux = load_balancing_loss_func(layers, layers[0].shape[-1], config.num_experts_per_tok)
    (torch.cat(nll).mean() + COEF * aux).backward()
    return aux.item(), {name: p.grad for name, p in lm.named_parameters()}


@pytest.mark.parametrize(
    "run", [{}, {"max_tokens_per_micro_batch": 24}, {"gradient_accumulation_steps": 3}, {"packing": False}], ids=str
)
def test_gradient_is_normalised_over_the_whole_step(run, folder):
    run = RunConfig(**run)
    policy = load(folder)
    policy.router = RouterLoss(policy, COEF)
    items = [Item(ids=ids, mask=[False] + [True] * (len(ids) - 1)) for ids in SEQUENCES]
    aux, want = by_transformers(folder)
    for _ in range(2):  # the second step must not depend on the first
        micro_batches = pack_items(run, policy, items, accumulation=run.gradient_accumulation_steps)
        sums = backward(policy, micro_batches)
        assert policy.router.end() == {"loss/router_aux": pytest.approx(aux, rel=1e-5)}
        for name, parameter in policy.model.named_parameters():
            torch.testing.assert_close(parameter.grad, want[name], rtol=1e-3, atol=1e-5, msg=name)
        policy.model.zero_grad()
    assert "loss/nll" in sums.means()


def test_evaluation_has_no_router_loss(folder):
    policy = load(folder)
    policy.router = RouterLoss(policy, COEF)
    policy.model.eval()
    items = [Item(ids=ids, mask=[False] + [True] * (len(ids) - 1)) for ids in SEQUENCES]
    (micro_batch,) = pack_items(RunConfig(), policy, items, accumulation=1)
    plain = load(folder)
    for each in (policy, plain):
        each.model.eval()
        backward(each, [micro_batch])
    for (name, a), b in zip(policy.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert policy.router.end() == {}


def test_models_without_experts_are_rejected():
    policy = load_policy(ModelConfig(model="builtin:tiny"), LoraConfig(), CPU, with_reference=False)
    with pytest.raises(ValueError, match="router_aux_loss_coef=0.01: .*ForCausalLM .*experts"):
        RouterLoss(policy, 0.01)


@pytest.mark.parametrize("method", ["sft", "kto", "dpo"])
def test_run_trains_with_the_router_loss(method, tmp_path, folder, capfd):
    if "qwen3" in (folder / "config.json").read_text() and method != "sft":
        pytest.skip("one model is enough")
    split = "sft" if method == "sft" else "train"
    argv = ["--method", method, "--model", str(folder), "--data", f"task:addition:split={split},size=32",
            "--max-steps", "8", "--per-device-train-batch-size", "8", "--max-tokens-per-micro-batch", "64",
            "--learning-rate", "1e-2", "--lr-scheduler-type", "constant", "--save-steps", "0"]  # fmt: skip
    with_loss = ["--router-aux-loss-coef", "1", "--eval-data", "task:addition:split=eval,size=4"]
    assert main([*argv, *with_loss, "--output-dir", str(tmp_path / "run")]) == 0
    values = [row["loss/router_aux"] for row in repeatable(metrics(tmp_path / "run")) if row["step"]]
    assert len(values) == 8 and min(values) > 1.9, "2 if the two chosen experts are balanced"
    assert min(values[-3:]) < max(values[0], 2.05)
