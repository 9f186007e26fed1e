from __future__ import annotations

import pytest
import torch

from losses.types import LossOut, Term, merge


def make(name: str, value: float) -> LossOut:
    total = torch.tensor(value, requires_grad=True)
    return LossOut(
        {name: Term(0.5, total, torch.tensor(4))}, {f"policy/{name}": (torch.tensor(value), torch.tensor(4))}
    )


def test_merge_keeps_every_term_and_metric():
    policy, kl = make("policy", 3.0), make("kl", 2.0)
    out = merge(policy, kl)
    assert list(out.terms) == ["policy", "kl"]
    assert out.terms["policy"] is policy.terms["policy"] and out.terms["kl"] is kl.terms["kl"]
    assert {name: (float(s), int(c)) for name, (s, c) in out.metrics.items()} == {
        "policy/policy": (3.0, 4),
        "policy/kl": (2.0, 4),
    }


def test_merge_leaves_its_inputs_alone():
    policy, kl = make("policy", 3.0), make("kl", 2.0)
    merge(policy, kl).metrics["policy/entropy"] = (torch.tensor(1.0), torch.tensor(1))
    assert list(policy.terms) == ["policy"] and list(policy.metrics) == ["policy/policy"]
    assert list(kl.terms) == ["kl"] and list(kl.metrics) == ["policy/kl"]


def test_merge_of_one_is_itself():
    out = make("nll", 1.0)
    assert merge(out) == out


def test_merge_refuses_two_terms_of_one_name():
    with pytest.raises(AssertionError, match="kl"):
        merge(make("kl", 1.0), make("kl", 2.0))
