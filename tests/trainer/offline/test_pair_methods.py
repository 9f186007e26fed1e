"""Offline methods: the gradient of a step depends only on its rows, not on micro-batches or order.

Whatever goes beyond the loss of a pair (tests/losses) is also compared with plain loops over the model's forward.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.types import Labelled, Pair
from losses.preference import PAIR_LOSSES
from losses.reference_free import CPO_LOSSES
from trainer.config.blocks import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    MovingReferenceConfig,
    ReferenceConfig,
    ResponseConfig,
    RunConfig,
)
from trainer.config.preference import PairLossType
from trainer.methods import cpo, dpo, ipo, kto, orpo, simpo
from trainer.metrics.metrics import MetricSums
from trainer.offline.labelled import Mismatched, pack_labelled
from trainer.offline.pairs import pack_pairs, pair_items
from trainer.policy.logps import Policy
from trainer.policy.reference import Reference

VOCAB = 37
ROWS = 8
# Lengths differ a lot, so that a mean of micro-batch means would be far from the global mean.
PROMPT_LENGTHS = (3, 1, 6, 2, 6, 4, 5, 3)
CHOSEN_LENGTHS = (1, 9, 4, 2, 12, 1, 7, 3)
REJECTED_LENGTHS = (2, 8, 4, 4, 11, 1, 9, 3)  # close to the chosen, so that lengths alone do not rank the pairs
LABELS = (True, False, False, True, True, False, True, False)
TOTAL = 2 * sum(PROMPT_LENGTHS) + sum(CHOSEN_LENGTHS) + sum(REJECTED_LENGTHS)
BUDGETS = (1, TOTAL // 2, 4 * TOTAL)  # one pair, half of the pairs, all pairs including padding
# Every budget and every accumulation, packed and padded.
SIX_CUTS = [
    (1, 1, True), (1, 4, False), (TOTAL // 2, 2, True), (TOTAL // 2, 1, False), (4 * TOTAL, 4, True),
    (4 * TOTAL, 2, False),
]  # fmt: skip
TWO_CUTS = [(1, 1, True), (TOTAL // 2, 2, False)]  # for every loss; six cuts for one loss per kind of average
WHOLE = (4 * TOTAL, 1, True)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


@functools.cache
def make_llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # Llama's norm rounds to float32, which would make the gradients of shared and repeated prompts differ.
    for module in (model.model, *model.model.layers):
        for name in [name for name, _ in module.named_children() if "norm" in name]:
            setattr(module, name, torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    return model


@functools.cache
def make_policy(dtype: torch.dtype) -> Policy:
    """One policy per dtype, since no test takes an optimizer step."""
    model, reference = (copy.deepcopy(make_llama(seed)).to(dtype) for seed in (0, 1))
    reference.eval().requires_grad_(False)
    return Policy(
        model=model.train(), tokenizer=None, source="test", device=torch.device("cpu"), compute_dtype=dtype,
        reference=reference,
    )  # fmt: skip


def make_ids() -> Callable[[int], list[int]]:
    generator = torch.Generator().manual_seed(2)
    return lambda length: torch.randint(VOCAB, (length,), generator=generator).tolist()


def make_pairs() -> list[Pair]:
    ids = make_ids()
    lengths = zip(PROMPT_LENGTHS, CHOSEN_LENGTHS, REJECTED_LENGTHS, strict=True)
    return [
        Pair(source=f"test:{i}", prompt_ids=ids(p), chosen_ids=ids(w), rejected_ids=ids(r))
        for i, (p, w, r) in enumerate(lengths)
    ]


def make_rows() -> list[Labelled]:
    ids = make_ids()
    lengths = zip(PROMPT_LENGTHS, CHOSEN_LENGTHS, LABELS, strict=True)
    return [
        Labelled(source=f"test:{i}", prompt_ids=ids(p), completion_ids=ids(c), label=label)
        for i, (p, c, label) in enumerate(lengths)
    ]


def make_config(method: ModuleType, cut: tuple[int, int, bool] = WHOLE, **settings: Any) -> Any:
    budget, accumulation, packing = cut
    size = RunConfig(
        per_device_train_batch_size=ROWS // accumulation, gradient_accumulation_steps=accumulation,
        max_tokens_per_micro_batch=budget, packing=packing,
    )  # fmt: skip
    blocks = {"model": ModelConfig(model="test"), "data": DataConfig(data=("test",)), "run": size}
    return method.Config(**{**blocks, **settings})


def gradient(model: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def step(
    method: ModuleType,
    settings: dict[str, Any],
    dtype: torch.dtype,
    cut: tuple[int, int, bool],
    order: Any = range(ROWS),
) -> tuple[Tensor, dict[str, float], int]:
    """Gradient, metrics, and number of micro-batches of one optimizer step."""
    cfg, policy = make_config(method, cut, **settings), make_policy(dtype)
    policy.model.zero_grad(set_to_none=True)
    accumulation = cfg.run.gradient_accumulation_steps
    if method is kto:
        rows = make_rows()
        partners = Mismatched(cfg, policy, rows) if cfg.loss_type == "kto" else []
        mismatched = [partners[i] for i in order] if partners else []
        packed = pack_labelled(cfg, policy, [rows[i] for i in order], mismatched, accumulation)
        sums, _ = kto.run_rows(cfg, policy, Reference(policy), packed, train=True)
        return gradient(policy.model), sums.means(), len(packed.batches)
    pairs = [make_pairs()[i] for i in order]
    sums: MetricSums
    if method is orpo:
        micro_batches = orpo.pack(cfg, policy, pairs, accumulation)
        sums = orpo.run_pairs(cfg, policy, micro_batches, train=True)
    else:
        micro_batches = pack_pairs(cfg.run, policy, pairs, accumulation=accumulation)
        if method in (cpo, simpo):
            sums = cpo.run_pairs(cfg, policy, micro_batches, train=True)
        else:
            reference = Reference(None if cfg.reference_free else policy)
            sums = dpo.run_pairs(cfg, policy, reference, pair_items(pairs), micro_batches, train=True)
    return gradient(policy.model), sums.means(), len(micro_batches)


# Formulas over the model's forward. w = chosen, l = rejected; one tensor of tokens per response.


class Hand(NamedTuple):
    w: list[Tensor]  # token log-probs of the policy
    l: list[Tensor]  # noqa: E741
    ref_w: list[Tensor]
    ref_l: list[Tensor]
    collision_w: list[Tensor]  # log of the sum of squared probabilities at each token
    collision_l: list[Tensor]
    whole_w: list[Tensor]  # prompt from its second token on, and chosen response

    def per_pair(self, function: Callable[..., Tensor]) -> Tensor:
        """Mean over pairs of function(c, r, length of w, length of l), c and r being log-ratios."""
        rows = zip(self.w, self.l, self.ref_w, self.ref_l, strict=True)
        values = [function((w - a).sum(), (r - b).sum(), len(w), len(r)) for w, r, a, b in rows]
        return torch.stack(values).mean()

    def free(self, function: Callable[..., Tensor]) -> Tensor:
        """The same for log-probs without a reference."""
        values = [function(w.sum(), r.sum(), len(w), len(r)) for w, r in zip(self.w, self.l, strict=True)]
        return torch.stack(values).mean()

    def nll(self) -> Tensor:
        return -torch.cat(self.w).mean()


def slow_logps(model: Any, prompt: list[int], ids: list[int]) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    logp = logits.log_softmax(dim=-1)
    return logp.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1), logp.exp().square().sum(dim=-1).log().detach()


def by_hand() -> Hand:
    policy = make_policy(torch.float64)
    columns: list[list[Tensor]] = [[] for _ in Hand._fields]
    for pair in make_pairs():
        # One forward for the chosen response, alone and with its prompt.
        whole, collision = slow_logps(policy.model, pair.prompt_ids[:1], [*pair.prompt_ids[1:], *pair.chosen_ids])
        w, collision_w = (x[len(pair.prompt_ids) - 1 :] for x in (whole, collision))
        r, collision_r = slow_logps(policy.model, pair.prompt_ids, pair.rejected_ids)
        ref_w, _ = slow_logps(policy.reference, pair.prompt_ids, pair.chosen_ids)
        ref_r, _ = slow_logps(policy.reference, pair.prompt_ids, pair.rejected_ids)
        for column, value in zip(columns, (w, r, ref_w, ref_r, collision_w, collision_r, whole), strict=True):
            column.append(value)
    return Hand(*columns)


def smooth(x: Tensor, eps: float) -> Tensor:
    return -(1 - eps) * F.logsigmoid(x) - eps * F.logsigmoid(-x)


def aot_by_hand(h: Hand) -> Tensor:
    margin = torch.stack([w.sum() - r.sum() for w, r in zip(h.w, h.l, strict=True)])
    ref = torch.stack([w.sum() - r.sum() for w, r in zip(h.ref_w, h.ref_l, strict=True)])
    return smooth(0.3 * (margin.sort().values - ref.sort().values), 0.1).mean()


def aot_unpaired_by_hand(h: Hand) -> Tensor:
    c = torch.stack([(w - a).sum() for w, a in zip(h.w, h.ref_w, strict=True)])
    r = torch.stack([(w - a).sum() for w, a in zip(h.l, h.ref_l, strict=True)])
    return -F.logsigmoid(0.3 * (c.sort().values - r.sort().values)).mean()


def ld_by_hand(h: Hand) -> Tensor:
    def score(policy: Tensor, ref: Tensor, shared: int) -> Tensor:
        ratio = policy - ref
        return ratio[:shared].sum() + 0.25 * ratio[shared:].sum()

    values = []
    for w, r, a, b in zip(h.w, h.l, h.ref_w, h.ref_l, strict=True):
        shared = min(len(w), len(r))
        values.append(-F.logsigmoid(0.3 * (score(w, a, shared) - score(r, b, shared))))
    return torch.stack(values).mean()


def wpo_by_hand(h: Hand) -> Tensor:
    values = []
    for w, r, a, b, cw, cl in zip(*h[:6], strict=True):
        weight = ((w.detach() - cw).mean() + (r.detach() - cl).mean()).exp().clamp(max=1)
        values.append(weight * -F.logsigmoid(0.3 * ((w - a).sum() - (r - b).sum())))
    return torch.stack(values).mean()


def sigmoid_by_hand(h: Hand) -> Tensor:
    return h.per_pair(lambda c, r, *_: -F.logsigmoid(0.3 * (c - r)))


def orpo_by_hand(h: Hand, whole: bool) -> Tensor:
    def odds(w: Tensor, r: Tensor, n: int, m: int) -> Tensor:
        def log_odds(mean: Tensor) -> Tensor:
            return mean - torch.log(1 - mean.exp())

        return -F.logsigmoid(log_odds(w / n) - log_odds(r / m))

    return -torch.cat(h.whole_w if whole else h.w).mean() + 0.5 * h.free(odds)


def simpo_by_hand(h: Hand) -> Tensor:
    return h.free(lambda w, r, n, m: -F.logsigmoid(2.0 * (w / n - r / m) - 1.0))


class Case(NamedTuple):
    method: ModuleType
    settings: dict[str, Any]
    formula: Callable[[Hand], Tensor] | None = None
    cuts: list[tuple[int, int, bool]] = TWO_CUTS


def dpo_case(*names: str, formula: Callable[[Hand], Tensor] | None = None, **settings: Any) -> Case:
    return Case(dpo, {"loss_type": names, "beta": 0.3, **settings}, formula)


PLAIN = sorted(PAIR_LOSSES.keys() - {"exo_pair", "aot", "aot_unpaired"})
CASES: dict[str, Case] = {
    **{f"dpo {name}": dpo_case(name) for name in PLAIN},
    "dpo sigmoid": dpo_case("sigmoid", formula=sigmoid_by_hand)._replace(cuts=SIX_CUTS),
    "dpo sigmoid_norm": dpo_case(
        "sigmoid_norm", formula=lambda h: h.per_pair(lambda c, r, n, m: -F.logsigmoid(0.3 * (c / n - r / m)))
    ),
    "dpo discopop": dpo_case("discopop", discopop_tau=0.5),  # 0.05 magnifies rounding of fp32 sums twentyfold
    "dpo exo_pair": dpo_case("exo_pair", label_smoothing=0.1),
    "dpo sigmoid, smoothing": dpo_case(
        "sigmoid", label_smoothing=0.1, formula=lambda h: h.per_pair(lambda c, r, *_: smooth(0.3 * (c - r), 0.1))
    ),
    "dpo robust, smoothing": dpo_case("robust", label_smoothing=0.1),
    "dpo aot": dpo_case("aot", label_smoothing=0.1, formula=aot_by_hand)._replace(cuts=SIX_CUTS),
    "dpo aot_unpaired": dpo_case("aot_unpaired", formula=aot_unpaired_by_hand)._replace(cuts=SIX_CUTS),
    "dpo aot, aot_unpaired, ld": dpo_case("aot", "aot_unpaired", ld_alpha=0.5, rpo_alpha=0.7),
    "dpo aot_unpaired, reference free": dpo_case("aot_unpaired", reference_free=True),
    "dpo sft": dpo_case("sft", formula=Hand.nll),
    "dpo mixture": dpo_case("sigmoid", "bco_pair", "sft", loss_weights=(0.8, 0.2, 1.5))._replace(cuts=SIX_CUTS),
    "dpo ld_alpha": dpo_case("sigmoid", ld_alpha=0.25, formula=ld_by_hand),
    "dpo use_weighting": dpo_case("sigmoid", use_weighting=True, formula=wpo_by_hand),
    "dpo use_weighting, mixture": dpo_case("hinge", "apo_zero", "sft", use_weighting=True, ld_alpha=0.5),
    "dpo rpo_alpha": dpo_case("sigmoid", rpo_alpha=0.5, formula=lambda h: sigmoid_by_hand(h) + 0.5 * h.nll()),
    "dpo reference free": dpo_case(
        "sigmoid", reference_free=True, formula=lambda h: h.free(lambda w, r, *_: -F.logsigmoid(0.3 * (w - r)))
    ),
    "dpo forward_kl": dpo_case("hinge", f_divergence_type="forward_kl"),
    "dpo js_divergence": dpo_case("sigmoid", f_divergence_type="js_divergence"),
    "dpo alpha_divergence": dpo_case("sigmoid", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.7),
    "ipo": Case(ipo, {"beta": 0.3}),
    "orpo": Case(orpo, {"orpo_alpha": 0.5}, functools.partial(orpo_by_hand, whole=True), SIX_CUTS),
    "orpo, response alone": Case(
        orpo, {"orpo_alpha": 0.5, "nll_on_prompt": False}, functools.partial(orpo_by_hand, whole=False)
    ),
    **{f"cpo {name}": Case(cpo, {"loss_type": name}) for name in CPO_LOSSES},
    "cpo sigmoid": Case(
        cpo, {"beta": 0.3, "label_smoothing": 0.1, "cpo_alpha": 0.5},
        lambda h: h.free(lambda w, r, *_: smooth(0.3 * (w - r), 0.1)) + 0.5 * h.nll(), SIX_CUTS,
    ),
    "cpo alphapo": Case(cpo, {"loss_type": "alphapo", "beta": 1.0, "simpo_gamma": 0.5, "alpha": 0.25}),
    "simpo": Case(simpo, {}, simpo_by_hand),
    "simpo, cpo_alpha": Case(simpo, {"cpo_alpha": 0.5}, lambda h: simpo_by_hand(h) + 0.5 * h.nll()),
    "kto": Case(kto, {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}, cuts=SIX_CUTS),
    "kto apo_zero_unpaired": Case(kto, {"loss_type": "apo_zero_unpaired", "beta": 0.3, "undesirable_weight": 0.7}),
}  # fmt: skip


def kto_by_hand(settings: dict[str, Any]) -> tuple[Tensor, float]:
    """Loss and z0. Only the choice of mismatched sequences is taken from the method."""
    cfg, policy, rows = make_config(kto, **settings), make_policy(torch.float64), make_rows()

    def log_ratio(prompt: list[int], ids: list[int]) -> Tensor:
        return (slow_logps(policy.model, prompt, ids)[0] - slow_logps(policy.reference, prompt, ids)[0]).sum()

    z0 = 0.0
    if cfg.loss_type == "kto":
        ratios = []
        for row, partner in zip(rows, Mismatched(cfg, policy, rows), strict=True):
            ids = partner.ids
            assert ids[: len(row.prompt_ids)] == row.prompt_ids
            ratios.append(log_ratio(row.prompt_ids, ids[len(row.prompt_ids) :]).item())
        z0 = max(0.0, sum(ratios) / ROWS)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        x = cfg.beta * (log_ratio(row.prompt_ids, row.completion_ids) - z0)
        value = 1 - torch.sigmoid(x if row.label else -x)
        total = total + (cfg.desirable_weight if row.label else cfg.undesirable_weight) * value
    return total / ROWS, z0


@functools.cache
def wanted(name: str) -> tuple[Tensor, float]:
    """Gradient and loss from the formula or, without a formula, from one micro-batch."""
    case = CASES[name]
    if case.method is not kto and case.formula is None:
        vector, metrics, _ = step(case.method, case.settings, torch.float64, WHOLE)
        return vector, metrics["loss/total"]
    model = make_policy(torch.float64).model
    model.zero_grad(set_to_none=True)
    total = kto_by_hand(case.settings)[0] if case.method is kto else case.formula(by_hand())
    total.backward()
    return gradient(model), total.item()


@pytest.mark.parametrize("name", CASES)
def test_gradient_and_metrics_do_not_depend_on_micro_batches_or_order(name):
    """For KTO because its mismatches are fixed for the run."""
    case, order = CASES[name], list(range(ROWS))
    random.Random(name).shuffle(order)
    want, loss = wanted(name)
    _, reported, _ = step(case.method, case.settings, torch.float64, WHOLE)
    assert want.norm() > 1e-3 and reported["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for dtype, cuts in ((torch.float64, case.cuts), (torch.float32, TWO_CUTS[1:])):
        for cut in cuts if dtype == torch.float64 or case.formula or case.method is kto else ():
            got, metrics, _ = step(case.method, case.settings, dtype, cut, order)
            assert (got.double() - want).norm() < TOLERANCE[dtype] * want.norm(), (dtype, cut)
            assert metrics == pytest.approx(reported, rel=1e-4, abs=1e-5), (dtype, cut)


def test_the_cases_are_not_trivial():
    """Layouts differ, all losses are covered, and all settings change the gradient."""
    named = {loss for case in CASES.values() for loss in case.settings.get("loss_type", ()) if case.method is dpo}
    assert named == PAIR_LOSSES.keys() | {"sft"} == set(PairLossType.__args__)
    assert {case.settings.get("loss_type", "sigmoid") for case in CASES.values() if case.method is cpo} == set(
        CPO_LOSSES
    )
    for number in (0, 1):
        assert len({(cut[number], cut[2]) for cut in SIX_CUTS}) == 6  # each value packed and padded
    numbers = {cut: step(dpo, {}, torch.float32, cut)[2] for cut in [*SIX_CUTS, WHOLE]}
    assert numbers[WHOLE] == 1 and numbers[4 * TOTAL, 4, True] == 4 and numbers[4 * TOTAL, 2, False] == 2
    assert numbers[1, 1, True] == numbers[1, 4, False] == ROWS and 1 < numbers[TOTAL // 2, 1, False] < ROWS
    for a, b in itertools.combinations((n for n in CASES if CASES[n].method is not kto), 2):
        if {a, b} not in ({"dpo ipo", "ipo"}, {"dpo robust", "dpo sigmoid"}):  # robust without smoothing is sigmoid
            assert (wanted(a)[0] - wanted(b)[0]).norm() > 1e-3 * wanted(a)[0].norm(), (a, b)
    assert 0.1 < kto_by_hand(CASES["kto"].settings)[1] < 10  # z0 is neither negligible nor clamped


def test_kto_reference_point_is_clamped_once_over_the_step():
    """With policy and reference exchanged, the mean log-ratio is negative, so z0 is 0 in every layout."""
    settings = {"beta": 0.3}
    policy = make_policy(torch.float64)
    exchanged = copy.copy(policy)
    exchanged.model, exchanged.reference = policy.reference, policy.model
    rows = make_rows()
    for cut in TWO_CUTS:
        cfg = make_config(kto, cut, **settings)
        packed = pack_labelled(cfg, policy, rows, Mismatched(cfg, policy, rows), cfg.run.gradient_accumulation_steps)
        assert kto.reference_point(policy, Reference(policy), packed) > 0.1
        assert kto.reference_point(exchanged, Reference(exchanged), packed) == 0


def test_kto_reference_point_has_one_dtype_on_all_ranks():
    """A rank may have no mismatched rows."""
    policy, rows, cfg = make_policy(torch.float32), make_rows(), make_config(kto)
    packed = pack_labelled(cfg, policy, rows, Mismatched(cfg, policy, rows), accumulation=1)
    empty = replace(packed, mismatched=[])
    points = [kto.reference_point(policy, Reference(policy), x) for x in (packed, empty)]
    assert [x.dtype for x in points] == [torch.float64] * 2


def test_sums_of_log_probs_do_not_depend_on_the_order_of_tokens():
    """On a GPU additions are atomic."""
    policy, pairs, cfg = make_policy(torch.float32), make_pairs(), make_config(dpo)
    (mb,) = pack_pairs(cfg.run, policy, pairs, accumulation=1)
    logp = -12 * torch.rand(len(mb.offset), generator=torch.Generator().manual_seed(0))
    is_response = mb.offset >= 0
    exact = [math.fsum(logp[is_response & (mb.batch.slot == i)].tolist()) for i in range(2 * len(pairs))]
    assert mb.sums(logp).flatten().tolist() == pytest.approx(exact, rel=1e-14)


def test_kto_mismatches_have_another_prompt_and_fit_max_length():
    rows = make_rows() + make_rows()  # every prompt twice, as in rows converted from pairs
    cfg = make_config(kto, response=ResponseConfig(max_length=9))
    policy = make_policy(torch.float32)
    partners = Mismatched(cfg, policy, rows)
    assert len(partners) == 2 * ROWS
    for row, item in zip(rows, partners, strict=True):
        num_prompt = len(row.prompt_ids)
        assert item.ids[:num_prompt] == row.prompt_ids and len(item.ids) <= 9
        others = [o.completion_ids[: len(item.ids) - num_prompt] for o in rows if o.prompt_ids != row.prompt_ids]
        assert item.ids[num_prompt:] in others
        assert item.mask == [False] * num_prompt + [True] * (len(item.ids) - num_prompt)
    with pytest.raises(ValueError, match="all rows have the same prompt"):
        Mismatched(cfg, policy, rows[:1] * 3)


def test_kto_rows_with_weight_0_have_no_gradient_but_count():
    for label in (True, False):
        off = "desirable_weight" if label else "undesirable_weight"
        settings = {"loss_type": "apo_zero_unpaired", off: 0.0}
        got, _, _ = step(kto, settings, torch.float64, WHOLE)
        policy = make_policy(torch.float64)
        policy.model.zero_grad(set_to_none=True)
        cfg = make_config(kto, **settings)
        kept = [row for row in make_rows() if row.label is not label]
        packed = pack_labelled(cfg, policy, kept, {}, 1)
        kto.run_rows(cfg, policy, Reference(policy), packed, train=True)
        assert (got - gradient(policy.model) * len(kept) / ROWS).norm() < 1e-9 * got.norm()


ONE = RunConfig(per_device_train_batch_size=1)
CACHED, OTHER = ReferenceConfig(ref="precomputed"), ReferenceConfig(ref_model="other")
MOVING = MovingReferenceConfig(sync_ref_model=True)
REJECTED = [
    (dpo, {"loss_type": ()}, "loss_type=: name at least one loss"),
    (dpo, {"loss_type": ("ipo", "ipo")}, "loss_type=ipo ipo: name at least one loss, each once"),
    (dpo, {"loss_weights": (1.0, 2.0)}, "loss_weights: 2 weights for 1 losses"),
    (dpo, {"beta": 0.0}, "beta=0.0: must be above 0"),
    (dpo, {"beta": float("nan")}, "beta=nan: must be above 0"),
    (dpo, {"label_smoothing": 0.5}, r"label_smoothing=0.5: must be in \[0, 0.5\)"),
    (dpo, {"loss_type": ("hinge",), "label_smoothing": 0.1}, "label_smoothing=0.1: has no effect"),
    (dpo, {"loss_type": ("exo_pair",)}, "label_smoothing=0.0: must be above 0 with loss_type=exo_pair"),
    (
        dpo, {"loss_type": ("bco_pair",), "f_divergence_type": "js_divergence"},
        "f_divergence_type=js_divergence: not defined for loss_type=bco_pair",
    ),
    (dpo, {"f_alpha_divergence_coef": 0.7}, "f_alpha_divergence_coef=0.7: has no effect without"),
    (dpo, {"discopop_tau": 0.1}, "discopop_tau=0.1: has no effect without loss_type=discopop"),
    (dpo, {"loss_type": ("discopop",), "discopop_tau": 0.0}, "discopop_tau=0.0: must be above 0"),
    (dpo, {"loss_type": ("aot",), "use_weighting": True}, "use_weighting=True: loss_type=aot"),
    (dpo, {"loss_type": ("sigmoid", "sft"), "rpo_alpha": 1.0}, "rpo_alpha=1.0: loss_type contains sft"),
    (dpo, {"ld_alpha": 1.5}, "ld_alpha=1.5: must be between 0 and 1"),
    (dpo, {"moving": MOVING, "lora": LoraConfig(r=4)}, "sync_ref_model=True: "),
    (dpo, {"moving": MOVING, "reference_free": True}, "sync_ref_model=True: "),
    (dpo, {"moving": MOVING, "reference": CACHED}, "sync_ref_model=True: "),
    (dpo, {"moving": MOVING, "reference": OTHER}, "sync_ref_model=True: "),
    (dpo, {"reference_free": True, "reference": OTHER}, "ref_model=.*: has no effect with reference_free"),
    (dpo, {"loss_type": ("aot_unpaired",), "run": ONE}, "per_device_train_batch_size=1: loss_type=aot_unpaired sorts"),
    (dpo, {"run": RunConfig(eval_steps=5)}, "eval_steps=5: has no effect without held-out rows"),
    (ipo, {"beta": -1.0}, "beta=-1.0: must be above 0"),
    (kto, {"beta": 0.0}, "beta=0.0: must be above 0"),
    (kto, {"desirable_weight": -1.0}, "desirable_weight=-1.0: must be 0 or above"),
    (kto, {"undesirable_weight": float("nan")}, "undesirable_weight=nan: must be 0 or above"),
    (kto, {"run": ONE}, "per_device_train_batch_size=1: KTO needs at least 2 rows"),
    (orpo, {"orpo_alpha": -0.1}, "orpo_alpha=-0.1: must be 0 or above"),
    (cpo, {"beta": 0.0}, "beta=0.0: must be above 0"),
    (cpo, {"cpo_alpha": -1.0}, "cpo_alpha=-1.0: must be 0 or above"),
    (cpo, {"label_smoothing": 0.6}, "label_smoothing=0.6: must be in"),
    (cpo, {"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing=0.1: has no effect"),
    (cpo, {"simpo_gamma": 1.0}, "simpo_gamma=1.0: has no effect with loss_type=sigmoid"),
    (simpo, {"alpha": 0.5}, "alpha=0.5: has no effect with loss_type=simpo"),
]  # fmt: skip


def test_settings_that_do_not_apply_are_rejected():
    for method, settings, message in REJECTED:
        with pytest.raises(ValueError, match=f"^{message}") as error:
            make_config(method, **settings)
        assert "\n" not in str(error.value), message


def test_accumulation_counts_towards_the_pairs_of_a_step():
    two = RunConfig(per_device_train_batch_size=1, gradient_accumulation_steps=2)
    assert make_config(dpo, run=two, loss_type=("aot",)).run.sequences_per_step == 2
    assert make_config(kto, run=two).run.sequences_per_step == 2
