"""The retained share matches a float64 computation, and the engine reports a low share once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from rollout.engine import Request, Sampling
from rollout.engines.adapter_share import adapter_share, exact_logps, sampler_logps
from rollout.engines.forward import BlockForward, TransformersForward, base_of
from rollout.engines.local import LocalEngine, is_measured

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def with_adapter(make_model, std: float, kind: str = "qwen3"):
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(make_model(kind).bfloat16(), options).eval()
    set_adapter(model, std)
    return model


def set_adapter(model, std: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
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


class RoundedWeights(BlockForward):
    """Weights rounded to bfloat16, everything else in float32."""

    def refresh(self) -> bool:
        super().refresh()
        for target, _, _ in self._copies:
            target.copy_(target.bfloat16())
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
        forward = RoundedWeights(model.get_base_model(), torch.float32)
        forward.cover(16)
        retained, _ = adapter_share(model, forward, ids)
        assert retained == pytest.approx(want, abs=2e-3)
        shares.append(retained)
        lm, noisy = model.get_base_model(), []
        if std == 1e-3:  # in bfloat16 throughout: the same, up to the noise of activations
            noisy = [BlockForward(lm, torch.bfloat16), TransformersForward(lm, torch.bfloat16, copied=True)]
        for forward in noisy:
            forward.cover(16)
            retained, error = adapter_share(model, forward, ids)
            assert abs(retained - want) < 4 * error < 0.8
            with torch.no_grad():  # the adapter is merged again
                before = sampler_logps(forward, ids)
                forward.refresh()
                assert torch.equal(sampler_logps(forward, ids), before)
    assert shares[0] < 0.3 and 0.5 < shares[1] < 0.9 and 0.99 < shares[2] < 1.01
    set_adapter(model, 0.0)
    assert adapter_share(model, forward, ids) is None


def test_the_engine_reports_the_share_and_warns_once(make_model, tokenizer):
    name, lines = "policy/adapter_retained_frac", []
    model = with_adapter(make_model, 1e-5)
    engine = LocalEngine(model, tokenizer, autocast_dtype=torch.bfloat16, log=lines.append)
    engine._ways = lambda: [lambda: RoundedWeights(model.get_base_model(), torch.float32)]
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
