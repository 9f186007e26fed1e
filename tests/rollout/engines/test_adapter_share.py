"""The engine keeps small adapters. A merge loses them: the share shows it, and so does the check at the start."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from kernels.nf4 import Linear4bit
from rollout.engine import Request, Sampling
from rollout.engines.adapter_share import adapter_share, exact_logps, sampler_logps, small_adapter
from rollout.engines.forward import BlockForward, Copies, FusedLinear, TransformersForward, base_of, unchanged
from rollout.engines.local import LocalEngine, is_measured
from tests import models
from tests.kernels.test_decode_lora import whole_numbers
from trainer.config.blocks import LoraConfig
from trainer.policy.adapters import add_adapter

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def with_adapter(make_model, std: float, kind: str = "qwen3", bias: bool = False, **options):
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options)
    model = get_peft_model(make_model(kind, attention_bias=bias).bfloat16(), options).eval()
    set_adapter(model, std)
    return model


def set_adapter(model, std: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16()
        if "lora_B" in name:
            parameter.data = std * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def naive_logps(model, ids: Tensor, *, adapter: bool, rounded: bool) -> Tensor:  # (R, T, V)
    """In float64, with the adapter merged into the weights, which are then rounded to bfloat16 or not."""
    lm = copy.deepcopy(model).double()
    for module in lm.modules():
        if hasattr(module, "base_layer"):
            weight = base_of(module).weight
            weight += module.get_delta_weight("default") if adapter else 0
            weight.copy_(weight.bfloat16() if rounded else weight)
    with lm.disable_adapter():
        return lm(input_ids=ids).logits.log_softmax(dim=-1)


class Merged(BlockForward):
    """Adapters are merged into the weights, which are rounded to bfloat16. Everything else is in float32."""

    def refresh(self) -> bool:
        super().refresh()
        for weight, _, adapters in (x for block in self.blocks for x in block if isinstance(x, FusedLinear)):
            (up, scale, *_), (width, rank) = adapters, adapters.up.shape
            weight[:width] += scale[:, None] * up @ weight[width : width + rank]
            weight[:width] = weight[:width].bfloat16()
            scale.zero_()
        return True


def test_the_share_matches_float64(make_model):
    ids = torch.randint(0, 258, (4, 16), generator=torch.Generator().manual_seed(2))
    shares = []
    for std in (1e-4, 1e-3, 0.1):
        model = with_adapter(make_model, std)
        exact, rounded = (
            naive_logps(model, ids, adapter=True, rounded=x) - naive_logps(model, ids, adapter=False, rounded=x)
            for x in (False, True)
        )
        want = float((rounded * exact).sum() / exact.square().sum())
        with torch.no_grad(), model.disable_adapter():
            base = exact_logps(model, ids)
        with torch.no_grad():
            found = exact_logps(model, ids) - base
        assert (found - exact).norm() < 2e-3 * exact.norm()
        forward = Merged(model.get_base_model(), torch.float32)
        forward.cover(16)
        retained, _ = adapter_share(model, forward, ids)
        assert retained == pytest.approx(want, abs=2e-3)
        shares.append(retained)
        lm, noisy = model.get_base_model(), []
        if std == 1e-3:  # in bfloat16 throughout: all of it, up to the noise of activations
            noisy = [BlockForward(lm, torch.bfloat16), TransformersForward(lm, torch.bfloat16, copied=True)]
        for forward in noisy:
            forward.cover(16)
            retained, error = adapter_share(model, forward, ids)
            assert abs(retained - 1) < 4 * error < 0.8
            with torch.no_grad():  # the adapter is on again
                before = sampler_logps(forward, ids)
                forward.refresh()
                assert torch.equal(sampler_logps(forward, ids), before)
    assert shares[0] < 0.3 and 0.5 < shares[1] < 0.9 and 0.99 < shares[2] < 1.01
    set_adapter(model, 0.0)
    assert adapter_share(model, forward, ids) is None


TARGETS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "one of each input": {"target_modules": ["k_proj", "o_proj", "up_proj"]},
    "ranks": {
        "rank_pattern": {"q_proj": 3, "up_proj": 20, "k_proj": 70},
        "alpha_pattern": {"v_proj": 5, "down_proj": 9},
    },
    "rslora": {"use_rslora": True, "r": 5},
    "biases": {"kind": "llama", "bias": True},
    "4-bit": {},
}


@pytest.mark.parametrize("name", TARGETS)
def test_copies_compute_small_adapters(make_model, name):
    """Their effect on log-probs is about 1e-3, of which a merge into bfloat16 loses most."""
    model = with_adapter(make_model, 1e-4, **TARGETS[name])
    for module in model.float().modules() if name == "4-bit" else ():
        if hasattr(module, "lora_A"):
            module.base_layer = Linear4bit.of(module.base_layer)
    lm, ids = model.get_base_model(), torch.randint(0, 258, (2, 9), generator=torch.Generator().manual_seed(3))
    for forward in (BlockForward(lm, torch.float32), TransformersForward(lm, torch.float32, copied=True)):
        forward.cover(9)
        assert forward.refresh()
        with torch.no_grad():
            with model.disable_adapter():
                base = exact_logps(model, ids)
            exact = exact_logps(model, ids)
            gap = (sampler_logps(forward, ids) - exact).norm() / (exact - base).norm()
        assert gap < 2e-3
        assert adapter_share(model, forward, ids).retained == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("kind", ["gpt_oss", "glm4_moe", "qwen3_5_text"])  # sinks, experts with buffers, states
def test_copies_of_transformers_models_compute_small_adapters(kind):
    model = add_adapter(models.make_model(kind), LoraConfig(r=4)).eval()
    forward = TransformersForward(model.get_base_model(), torch.float32, copied=True)
    with torch.no_grad(), small_adapter(model):
        share = adapter_share(model, forward, torch.arange(40, 64).view(2, 12))
    assert share.retained == pytest.approx(1, abs=1e-3)


def test_the_start_rejects_a_copy_that_loses_small_adapters(make_model, tokenizer):
    model, lines = with_adapter(make_model, 0.0).float(), []
    lm = model.get_base_model()
    engine = LocalEngine(model, tokenizer, log=lines.append)
    engine._ways = lambda: [lambda: Merged(lm, torch.float32), lambda: BlockForward(lm, torch.float32)]
    engine.choose_forward()
    assert type(engine._forward) is BlockForward and len(lines) == 1 and "small adapter" in lines[0]
    assert all(not parameter.any() for key, parameter in model.named_parameters() if "lora_B" in key)
    assert not any(part.any() for part, module, _ in engine._forward._copies.parts if module in lora_b(lm))


def lora_b(lm) -> list[nn.Module]:
    return [module.lora_B["default"] for module in lm.modules() if hasattr(module, "lora_B")]


def test_the_engine_reports_the_share_and_warns_once(make_model, tokenizer):
    name, lines = "policy/adapter_retained_frac", []
    model = with_adapter(make_model, 1e-5)
    engine = LocalEngine(model, tokenizer, autocast_dtype=torch.bfloat16, log=lines.append)
    engine._ways = lambda: [lambda: Merged(model.get_base_model(), torch.float32)]
    engine._check_parity = lambda *args, **options: None
    requests = [Request(prompt_ids=[5, 6, i], seed=i) for i in range(6)]
    shares = {}
    for version in (0, 1, 2, 3, 5, 49, 51):
        if version == 51:
            set_adapter(model, 0.1)
        engine.load(version)
        engine.generate(requests, Sampling(max_tokens=8))
        shares[version] = engine.metrics().get(name)
    assert [version for version, share in shares.items() if share is not None] == [2, 5, 49, 51]
    assert max(shares[2], shares[5], shares[49]) < 0.3 and shares[51] == pytest.approx(1.0, abs=0.01)
    assert len([line for line in lines if name in line and "0.9" in line]) == 1
    engine.load(60)
    engine.load(100)
    model.disable_adapter = None  # a failure of the measurement does not end the run
    engine.generate(requests, Sampling(max_tokens=1))
    assert engine.metrics() == {} and sum("not measured (TypeError" in line for line in lines) == 1
    assert all(parameter.requires_grad == ("lora_" in key) for key, parameter in model.named_parameters())


def test_versions_to_measure():
    assert [v for v in range(1, 160) if is_measured(v, None)] == [2, 5, 10, 20, 50, 100, 150]
    assert [v for v in range(3, 160, 3) if is_measured(v, v - 3)] == [3, 6, 12, 21, 51, 102, 150]


def layers_of(widths: list[int], ranks: list[int], in_features: int) -> nn.Module:
    """Linear layers of one input with adapters of these ranks; rank 0: none. All parameters are whole numbers."""
    from peft import LoraConfig, get_peft_model

    model = nn.ModuleDict({f"x{i}": nn.Linear(in_features, width) for i, width in enumerate(widths)})
    pattern = {f"x{i}": rank for i, rank in enumerate(ranks) if rank}
    model = get_peft_model(model, LoraConfig(target_modules=[*pattern], rank_pattern=pattern, lora_alpha=20)).eval()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = whole_numbers(*parameter.shape, seed=seed)
    return model.base_model.model


@torch.no_grad()
def test_outputs_are_rounded_once(monkeypatch):
    """With whole numbers, only the places of rounding matter. The copy keeps its addresses, for CUDA graphs."""
    modules = [*layers_of([24, 8, 16], [5, 0, 10], 64).children()]
    x, copies = whole_numbers(7, 64, seed=99).bfloat16(), Copies(torch.bfloat16, torch.device("cpu"), unchanged)
    linear = copies.linear(*modules)
    addresses = [target.data_ptr() for target, _, _ in copies.parts]
    for _ in range(2):
        copies.refresh()
        want = [base_of(module)(x.float()) for module in modules]
        for i in (0, 2):
            low = modules[i].lora_A["default"](x.float()).bfloat16()
            want[i] += modules[i].scaling["default"] * modules[i].lora_B["default"](low.float())
        assert torch.equal(linear(x), torch.cat(want, dim=1).bfloat16())
        monkeypatch.setattr("rollout.engines.forward.JOINT_TOKENS", 3)  # the second round is in parts
        for seed, module in enumerate(modules[::2]):
            module.lora_B["default"].weight += whole_numbers(*module.lora_B["default"].weight.shape, seed=seed)
    assert [target.data_ptr() for target, _, _ in copies.parts] == addresses
