"""The gradient of a step depends only on its completions, not on micro-batching, order or the number of ranks.

Every loss, at every level and with every correction, is compared with its formula over padded rows (naive_groups.py).
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from kernels import linear_logprob
from losses.policy import POLICY_LOSSES
from rollout.engine import Completion
from tests.trainer.rl.group_cases import (
    ADVANTAGE,
    CUTS,
    LENGTHS,
    NO_LOGP,
    TEMPERATURE,
    TOTAL,
    TRUNCATED,
    VOCAB,
    WHOLE,
    by_hand,
    close,
    gradient,
    iterations,
    logps_of,
    make_completions,
    make_config,
    make_llama,
    make_policy,
    micro_batch_rows,
    moved_llama,
    prepare,
    step,
)
from tests.trainer.rl.naive_groups import padded, padded_logps
from trainer.config.groups import AdvantageConfig
from trainer.config.policy import CorrectionConfig, PolicyLossConfig
from trainer.methods import grpo
from trainer.methods.grpo import backward
from trainer.rl import minibatch
from trainer.rl.entropy_target import EntropyTarget

MODES = get_args(get_type_hints(CorrectionConfig)["vllm_importance_sampling_mode"])
CORRECTION_CASES: dict[str, dict[str, Any]] = {
    "off": {"vllm_importance_sampling_correction": False},
    **{
        mode: {
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_cap": 1.5,
            "vllm_importance_sampling_min": 0.6,
        }
        for mode in MODES
    },
    "geometric": {"vllm_importance_sampling_cap": 1.3, "geometric_min": 0.85, "geometric_max": 1.2},
    "behaviour": {"proximal_policy": "behaviour"},
}
SEQUENCE_LEVEL = [kind for kind, loss in POLICY_LOSSES.items() if loss.ratio == "token"]
LEVELS = [
    (kind, level)
    for kind, level in itertools.product(POLICY_LOSSES, ("token", "sequence"))
    if level == "token" or kind in SEQUENCE_LEVEL
]
EVERYTHING = {
    "beta": 0.1, "entropy_coef": 0.05, "top_entropy_quantile": 0.7,
    "correction": {**CORRECTION_CASES["geometric"], "off_policy_mask_threshold": 0.1},
}  # fmt: skip
ORDER = [5, 11, 8, 2, 0, 10, 7, 9, 3, 1, 6, 4]


def corrections_of(kind: str, level: str, *, after: int) -> list[str]:
    """Two different corrections for each loss and level; all for vespo, whose weight includes them."""
    names, index = list(CORRECTION_CASES), LEVELS.index((kind, level)) + after
    chosen = names if kind == "vespo" else [names[index % len(names)], names[(index + 3) % len(names)]]
    return [name for name in chosen if (kind, name) != ("reinforce", "behaviour")]


# Formulas.


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_gradient_and_loss_match_the_formula(kind):
    """On the first step, which has no old log-probs unless whole completions matter, and on a later step."""
    for num_iterations, level in itertools.product({1, iterations(kind)}, ("token", "sequence")):
        for name in corrections_of(kind, level, after=num_iterations) if (kind, level) in LEVELS else ():
            cfg = make_config(
                (TOTAL // 3, 2, "shared"), num_iterations=num_iterations, loss_type=kind,
                importance_sampling_level=level, correction=CORRECTION_CASES[name],
            )  # fmt: skip
            got, logged, batch = step(cfg)
            want, loss = by_hand(cfg, micro_batch_rows(batch))
            assert close(got, want), (num_iterations, level, name)
            found = [logged["loss/policy"], logged["loss/total"]]
            assert found == pytest.approx([loss, loss], rel=1e-5, abs=1e-6), (num_iterations, level, name)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_the_gradient_does_not_depend_on_micro_batches_or_order(kind, monkeypatch):
    """With a KL term, an entropy bonus, the entropy quantile and filters; the head splits completions into slices."""
    monkeypatch.setattr(linear_logprob, "BLOCK_ELEMENTS", 3 * VOCAB)
    completions = [make_completions()[i] for i in ORDER]
    for index, (name, level) in enumerate(LEVELS):
        for cut in (CUTS[index % len(CUTS)], CUTS[(index + 3) % len(CUTS)]) if name == kind else ():
            settings = {"loss_type": kind, "importance_sampling_level": level, **EVERYTHING}
            cfg = make_config(cut, num_iterations=iterations(kind), **settings)
            got, logged, batch = step(cfg, completions, ADVANTAGE[ORDER])
            want, loss = by_hand(cfg, [[ORDER[row] for row in rows] for rows in micro_batch_rows(batch)])
            assert close(got, want), (level, cut)
            assert logged["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6), (level, cut)


@functools.cache
def episodes() -> list[Completion]:
    """Two episodes that fork at each of 4 turns, and a completion with the first ids of one of them."""
    generator = torch.Generator().manual_seed(5)

    def draw(length: int) -> list[int]:
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    def extend(prefix: list[int], mask: list[bool], turns: int) -> list[tuple[list[int], list[bool]]]:
        """A first branch trains all its turns, others the turns after their fork. A turn: one id, then 2 or 3."""
        if turns == 0:
            return [(prefix, mask)]
        branches = []
        for fork in range(2):
            turn, seen = draw(3 + turns % 2), mask if fork == 0 else [False] * len(mask)
            branches += extend(prefix + turn, [*seen, False, *[True] * (len(turn) - 1)], turns - 1)
        return branches

    prompt = draw(3)
    rows = [extend(prompt, [False] * 3, 4) for _ in range(2)]
    rows.append([(rows[0][0][0][:7], [False] * 3 + [True] * 4)])
    parts = [
        Completion(prompt_ids=prompt, ids=ids[3:], mask=mask[3:], logps=[0.0] * (len(ids) - 3), finish_reason="stop",
                   text="", versions=[])
        for branches in rows for ids, mask in branches
    ]  # fmt: skip
    with torch.no_grad():
        logps = padded_logps(make_llama(0), parts, TEMPERATURE).logp
    logps = logps + 0.1 * torch.randn(logps.shape, generator=generator, dtype=torch.float64)
    parts = [replace(part, logps=row[: len(part.ids)].tolist()) for part, row in zip(parts, logps, strict=True)]
    return [replace(parts[0], branches=tuple(parts[1:16])), replace(parts[16], branches=tuple(parts[17:32])), parts[32]]


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_the_gradient_of_a_tree_is_that_of_its_branches_as_separate_rows(kind):
    """Prefixes are computed once at each of 4 levels, in one micro-batch or several."""
    found, advantage = [], ADVANTAGE[:3]
    for cut in ((9999, 1, "padded"), (9999, 1, "shared"), (60, 1, "shared")):
        cfg = make_config(cut, num_iterations=iterations(kind), loss_type=kind, **EVERYTHING)
        vector, logged, batch = step(cfg, episodes(), advantage)
        found.append((vector, logged["loss/total"], sum(x.num_computed for x in batch.batches), batch.batches))
    rows, tree, cut = found
    assert close(tree[0], rows[0]) and tree[1] == pytest.approx(rows[1], rel=1e-9) and rows[0].norm() > 0
    assert len(tree[3]) == 1 and len(tree[3][0].spans) == 10 and len(cut[3]) > 3
    if kind != "bnpo":  # depends on micro-batches
        assert close(cut[0], rows[0])
    branches = [(n, [*part.prompt_ids, *part.ids]) for n, c in enumerate(episodes()) for part in (c, *c.branches)]
    unique = {((n + 1) * (size > 3), *ids[:size]) for n, ids in branches for size in range(1, len(ids) + 1)}
    assert rows[2] == sum(len(ids) for _, ids in branches) and tree[2] == len(unique) < cut[2] < rows[2]


REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]  # of three groups


def plain_max_rl(group: list[float]) -> list[float]:
    return [(r - sum(group) / 4) / (sum(group) / 4) for r in group]


def plain_opo(group: list[float], lengths: list[int]) -> list[float]:
    return [r - sum(n * x for n, x in zip(lengths, group, strict=True)) / sum(lengths) for r in group]


def plain_normalized(values: list[list[float]]) -> list[list[float]]:
    """Mean and deviation over tokens, each with the value of its completion."""
    both = zip(sum(values, []), sum(trained_lengths(), []), strict=True)
    tokens = [x for x, n in both for _ in range(n)]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens) + 1e-4
    return [[(x - mean) / deviation for x in group] for group in values]


def trained_lengths() -> list[list[int]]:
    trained = [sum(c.mask) if c.mask else len(c.ids) for c in make_completions()]
    return [trained[i : i + 4] for i in (0, 4, 8)]


PLAIN_ADVANTAGES = {
    "max_rl": lambda: [plain_max_rl(group) for group in REWARDS],
    "opo": lambda: [plain_opo(*x) for x in zip(REWARDS, trained_lengths(), strict=True)],
    "reinforce_plus_plus": lambda: plain_normalized(REWARDS),
    "reinforce_plus_plus_baseline": lambda: plain_normalized([[r - sum(g) / 4 for r in g] for g in REWARDS]),
}


@pytest.mark.parametrize("name", PLAIN_ADVANTAGES)
def test_the_gradient_of_an_estimator_matches_its_formula_for_every_cut(name):
    """Rewards -> --advantage-estimator -> the clipped loss of a second step, against the formula in plain Python."""
    reward = torch.tensor(REWARDS, dtype=torch.float64)
    r = SimpleNamespace(reward=reward, completions=make_completions(), all_sum=lambda x: x)
    advantage = AdvantageConfig(advantage_estimator=name).estimate(r)
    expected = torch.tensor(PLAIN_ADVANTAGES[name](), dtype=torch.float64)
    torch.testing.assert_close(advantage, expected, atol=1e-12, rtol=1e-12)
    want, loss = by_hand(make_config(), advantage=expected.flatten())
    for cut in CUTS:
        got, logged, _ = step(make_config(cut), advantage=advantage.flatten())
        assert close(got, want) and logged["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6), cut


def test_only_bnpo_depends_on_micro_batches():
    gradients = [step(make_config(cut, loss_type="bnpo"))[0] for cut in (WHOLE, (TOTAL // 3, 1, "packed"))]
    assert (gradients[0] - gradients[1]).norm() > 0.01 * gradients[0].norm()


def test_additional_clip_bounds_match_the_formula():
    for settings in ({"delta": 1.2}, {"dual_clip": 1.15}, {"epsilon_high": 0.2}):
        cfg = make_config((TOTAL // 3, 1, "shared"), correction=CORRECTION_CASES["off"], **settings)
        got, logged, _ = step(cfg)
        want, loss = by_hand(cfg)
        assert close(got, want) and logged["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6), settings
        assert (want - by_hand(make_config(correction=CORRECTION_CASES["off"]))[0]).norm() > 1e-3 * want.norm()


def test_the_kl_term_has_the_average_of_the_loss_but_no_correction_weight():
    cases = itertools.product(("k1", "k2", "k3"), (True, False))
    for kind, (estimator, weighted) in zip(itertools.cycle(("grpo", "dapo", "dr_grpo", "luspo")), cases, strict=False):
        cfg = make_config(
            (TOTAL // 3, 2, "shared"), loss_type=kind, beta=0.3, kl_estimator=estimator,
            use_bias_correction_kl=weighted,
            correction={**CORRECTION_CASES["token_mask"], "off_policy_mask_threshold": 0.1},
        )  # fmt: skip
        got, logged, _ = step(cfg)
        want, loss = by_hand(cfg)
        assert close(got, want), (kind, estimator, weighted)
        assert logged["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6), (kind, estimator, weighted)


def test_kl_in_reward_removes_the_kl_term():
    cfg = make_config(beta=0.3)
    cfg.advantage.kl_in_reward = True
    got, logged, batch = step(cfg)
    assert close(got, step(make_config())[0])
    assert "loss/kl" not in logged and batch.micro_batches[0].ref_logp is None


def test_the_cases_are_not_trivial():
    """Some ratios are clipped, some weights bounded and some completions filtered, but not all."""
    _, logged, batch = step(make_config((1, 1, "packed"), correction=CORRECTION_CASES["token_truncate"]))
    assert 0.1 < logged["policy/clip_frac"] < 0.9
    assert 0.1 < logged["policy/correction_bound_frac"] < 0.9
    assert len(batch.micro_batches) == 7 and batch.skipped == 3
    for name in ("token_mask", "sequence_mask", "icepop"):
        _, logged, _ = step(make_config(correction=CORRECTION_CASES[name]))
        assert 0.1 < logged["policy/correction_zero_frac"] < 0.9, name
    correction = {**CORRECTION_CASES["geometric"], "off_policy_mask_threshold": 0.1}
    _, logged, _ = step(make_config(correction=correction, top_entropy_quantile=0.7))
    for name in ("geometric_dropped_frac", "off_policy_dropped_frac", "entropy_kept_frac"):
        assert 0.05 < logged[f"policy/{name}"] < 0.95, (name, logged[f"policy/{name}"])
    _, logged, _ = step(make_config(loss_type="cispo"))
    assert 0.1 < logged["policy/cispo_cap_frac"] < 0.9
    for kind in ("dppo_tv", "dppo_kl"):
        assert 0.05 < step(make_config(loss_type=kind))[1]["policy/dppo_masked_frac"] < 0.9, kind
    gradients = [
        step(make_config(num_iterations=iterations(kind), loss_type=kind, importance_sampling_level=level))[0]
        for kind, level in LEVELS
        if kind != "bnpo"
    ]
    for a, b in itertools.combinations(gradients, 2):
        assert (a - b).norm() > 1e-3 * a.norm()


COPIES = 6
COPIED_CUTS = [(8 * TOTAL, 1, "packed"), (8 * TOTAL, 1, "shared"), (1, 1, "packed"), (40, 1, "shared"),
               (8 * TOTAL, 1, "padded"), (8 * TOTAL, 3, "packed")]  # fmt: skip


@pytest.mark.parametrize(("dtype", "tops"), [(torch.float64, (0.4,)), (torch.float32, (0.2, 0.6))], ids=str)
def test_the_entropy_threshold_keeps_all_or_none_of_equal_tokens_in_every_layout(dtype, tops):
    """Six copies of a completion of seven tokens; the threshold falls among the copies of one token.

    Entropies of the copies differ by rounding, so an exact comparison would keep one to five copies.
    """
    copied, advantage = [make_completions()[6]] * COPIES, torch.tensor([1.0, -0.3, 0.7, -1.1, 0.4, 2.0]).to(dtype)
    model = copy.deepcopy(make_policy().model).to(dtype)
    policy = replace(make_policy(model), compute_dtype=dtype)
    for top in tops:
        found = []
        for cut in COPIED_CUTS:
            cfg = make_config(cut, num_iterations=1, top_entropy_quantile=top)
            batch = prepare(cfg, policy, copied, advantage)
            logged = backward(cfg, policy, batch).means()
            found.append((gradient(policy.model), round(42 * logged["policy/entropy_kept_frac"])))
        assert {kept for _, kept in found} == {found[0][1]} and found[0][1] % COPIES == 0, [kept for _, kept in found]
        for other, _ in found[1:]:
            assert (other - found[0][0]).norm() <= (1e-9 if dtype == torch.float64 else 1e-4) * found[0][0].norm()


# Skipped completions and passes.


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_skipping_zero_advantages_does_not_change_the_gradient(kind):
    level = "sequence" if kind in ("grpo", "cispo") else "token"
    settings = {"num_iterations": iterations(kind), "loss_type": kind, "importance_sampling_level": level}
    cut = (TOTAL // 3, 1, "shared")
    skipping, logged, batch = step(make_config(cut, **settings))
    full, want, whole = step(make_config(cut, **settings, skip_zero_advantage_batches=False))
    if kind == "bnpo":  # keeps its micro-batches
        assert micro_batch_rows(batch) == micro_batch_rows(whole)
    else:
        assert [batch.rows[i] for mb in batch.micro_batches for i in mb.batch.rows] and batch.skipped == 3
        assert sorted(set(whole.rows) - set(batch.rows)) == [6, 8, 9]
    assert close(skipping, full)
    for name in {"loss/policy", "loss/total", "policy/clip_frac", "policy/clip_low_frac"} & want.keys():
        assert logged[name] == pytest.approx(want[name], rel=1e-5), name
    assert want["policy/skipped_frac"] == 0.0


def test_bnpo_and_the_entropy_quantile_skip_whole_micro_batches_only():
    for settings in ({"loss_type": "bnpo"}, {"top_entropy_quantile": 0.5}):
        got, logged, batch = step(make_config((1, 1, "packed"), **settings))
        rows = zip(sum(micro_batch_rows(batch), []), [mb.is_idle for mb in batch.micro_batches], strict=True)
        assert sorted(row for row, idle in rows if idle) == [6, 8, 9]
        assert close(got, step(make_config((1, 1, "packed"), skip_zero_advantage_batches=False, **settings))[0])
        assert logged["policy/skipped_frac"] == pytest.approx(3 / 10)


def test_nothing_is_skipped_with_a_kl_or_entropy_term():
    zero = torch.zeros_like(ADVANTAGE)
    for settings in ({"beta": 0.1}, {"entropy_coef": 0.1}):
        got, logged, batch = step(make_config(**settings), advantage=zero)
        assert logged["policy/skipped_frac"] == 0.0 and len(batch.completions) == 10
        assert close(got, by_hand(make_config(**settings), advantage=zero)[0]) and got.norm() > 1e-6


def test_an_adaptive_entropy_bonus_equals_a_fixed_bonus_with_its_coefficient():
    """Nothing is skipped, even while the coefficient is 0, because it may change in the next step."""
    zero, fixed = torch.zeros_like(ADVANTAGE), make_config(num_iterations=1, entropy_coef=0.1)
    want, logged, _ = step(fixed, advantage=zero)
    policy, cfg = make_policy(), make_config(num_iterations=1, entropy_target=0.3)
    policy.model.zero_grad(set_to_none=True)
    batch = prepare(cfg, policy, make_completions(), zero)
    assert len(batch.completions) == 10
    found = backward(cfg, policy, replace(batch, entropy_coef=0.1)).means()
    assert close(gradient(policy.model), want) and found == logged
    off = backward(cfg, policy, replace(batch, entropy_coef=0.0)).means()
    assert gradient(policy.model).norm() == 0 and off["policy/entropy"] == logged["policy/entropy"]


def test_the_entropy_coefficient_is_0_above_the_target_and_adapts_below():
    options = PolicyLossConfig(entropy_target=0.3, entropy_coef_step=0.5, entropy_coef=0.5, entropy_coef_max=1.0)
    adaptive = EntropyTarget(options)
    found = []
    for entropy in (0.4, 0.2, 0.2, 0.2, 0.4, 0.3, 0.2):
        found.append((adaptive.coef, adaptive.weight))
        adaptive.observe(entropy)
    # No bonus before the first step, because the entropy is unknown.
    assert found == [(0, 0.5), (0, 0), (0.5, 0.5), (1, 1), (1, 1), (0, 0.5), (0.5, 0.5)]
    other = EntropyTarget(options)
    other.load_state_dict(json.loads(json.dumps(adaptive.state_dict())))
    assert (other.coef, other.weight) == (adaptive.coef, adaptive.weight) == (1, 1)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_a_step_without_signal_has_zero_gradients_and_the_usual_metrics(kind):
    cfg = make_config(num_iterations=1, loss_type=kind)
    policy = make_policy()
    policy.model.zero_grad(set_to_none=True)
    batch = prepare(cfg, policy, make_completions(), torch.zeros_like(ADVANTAGE))
    sums = backward(cfg, policy, batch)
    assert all(p.grad is not None and not p.grad.any() for p in policy.model.parameters())
    policy.model.zero_grad(set_to_none=True)
    full = backward(cfg, policy, prepare(cfg, policy, make_completions(), ADVANTAGE))
    assert sums.pairs.keys() == full.pairs.keys()
    assert sums.means()["loss/total"] == 0.0 and sums.means()["policy/skipped_frac"] == 1.0
    policy.model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_masked_truncated_completions_are_not_counted(kind):
    num_iterations = iterations(kind)
    beta = {"beta": 0.1, "entropy_coef": 0.02}
    masked = {"loss_type": kind, "mask_truncated_completions": True, **beta}
    cfg = make_config((TOTAL // 3, 1, "shared"), num_iterations=num_iterations, **masked)
    got, logged, batch = step(cfg)
    want, loss = by_hand(cfg, micro_batch_rows(batch))
    assert close(got, want) and logged["loss/total"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    others = [row for row in range(len(LENGTHS)) if row not in TRUNCATED]
    without = make_config(WHOLE, num_iterations=num_iterations, loss_type=kind, **beta)
    if kind != "bnpo":
        assert close(got, step(without, [make_completions()[i] for i in others], ADVANTAGE[others])[0])


def test_a_batch_of_truncated_completions_has_zero_gradients_and_losses():
    completions = [replace(c, finish_reason="length") for c in make_completions()]
    extras = itertools.cycle([{}, {"beta": 0.1}, {"entropy_coef": 0.1, "top_entropy_quantile": 0.5}])
    for kind, extra in zip(POLICY_LOSSES, extras, strict=False):
        cfg = make_config(num_iterations=iterations(kind), loss_type=kind, mask_truncated_completions=True, **extra)
        got, logged, batch = step(cfg, completions)
        assert not got.any() and not batch.micro_batches, kind
        losses = {name: value for name, value in logged.items() if name.startswith("loss/")}
        usual = {name: 0.0 for name in step(cfg)[1] if name.startswith("loss/")}
        assert losses == usual and len(losses) >= 2, kind


def count_passes(monkeypatch: pytest.MonkeyPatch, cfg: Any, **more: Any) -> dict[str, int]:
    """Count no-grad passes of policy and reference in prepare and in two calls of backward."""
    counts = dict.fromkeys(("prepare", "first", "second", "reference"), 0)
    phase = ["prepare"]
    token_logps, reference_logps = minibatch.token_logps, grpo.reference_logps

    def count_policy(*args: Any, **kwargs: Any) -> Any:
        counts[phase[0]] += 1
        return token_logps(*args, **kwargs)

    def count_reference(*args: Any, **kwargs: Any) -> Any:
        counts["reference"] += 1
        return reference_logps(*args, **kwargs)

    monkeypatch.setattr(minibatch, "token_logps", count_policy)
    monkeypatch.setattr(grpo, "reference_logps", count_reference)
    policy = make_policy()
    batch = prepare(cfg, policy, make_completions(), ADVANTAGE, **more)
    for phase[0] in ("first", "second"):
        backward(cfg, policy, replace(batch, is_first=phase[0] == "first"))
    policy.model.zero_grad(set_to_none=True)
    return counts


PASSES = [
    # settings, correction, num_iterations -> prepare, first, second, reference
    ({}, {}, 1, (0, 0, 0, 0)),
    ({}, {}, 2, (1, 0, 0, 0)),
    ({"beta": 0.1}, {}, 1, (0, 0, 0, 1)),
    ({"beta": 0.1}, {}, 2, (1, 0, 0, 1)),
    ({"importance_sampling_level": "sequence"}, {}, 1, (0, 0, 0, 0)),
    ({"importance_sampling_level": "sequence"}, {}, 2, (1, 0, 1, 0)),
    ({"loss_type": "rloo"}, {}, 2, (1, 0, 1, 0)),
    ({"loss_type": "vespo"}, {"vllm_importance_sampling_correction": False}, 1, (0, 0, 0, 0)),
    ({"loss_type": "vespo"}, {}, 1, (0, 1, 1, 0)),
    ({}, {"vllm_importance_sampling_mode": "icepop"}, 1, (0, 0, 0, 0)),
    ({}, {"vllm_importance_sampling_mode": "sequence_mask"}, 1, (0, 1, 1, 0)),
    ({}, {"vllm_importance_sampling_mode": "sequence_mask"}, 2, (1, 0, 0, 0)),
    ({}, {"geometric_max": 2.0}, 1, (0, 1, 1, 0)),
    ({}, {"off_policy_mask_threshold": 0.5}, 2, (1, 0, 1, 0)),
    ({"top_entropy_quantile": 0.5}, {}, 1, (0, 1, 1, 0)),
    ({}, {"proximal_policy": "behaviour"}, 2, (0, 0, 0, 0)),
    ({"importance_sampling_level": "sequence"}, {"proximal_policy": "behaviour"}, 2, (0, 1, 1, 0)),
]


def test_only_needed_passes_run():
    for settings, correction, num_iterations, want in PASSES:
        cfg = make_config(num_iterations=num_iterations, correction=correction, **settings)
        with pytest.MonkeyPatch.context() as monkeypatch:
            found = tuple(count_passes(monkeypatch, cfg).values())
        assert found == want, (settings, correction, num_iterations)


def test_old_logps_are_computed_with_dropout_off_and_the_mode_is_restored():
    policy, seen = make_policy(), []
    handle = policy.model.model.register_forward_pre_hook(lambda module, args: seen.append(module.training))
    try:
        prepare(make_config(), policy, make_completions(), ADVANTAGE)
    finally:
        handle.remove()
    assert seen == [False] and policy.model.training


# Equivalences.


def test_sequence_level_equals_token_level_for_completions_of_one_token():
    completions = [
        replace(c, ids=c.ids[:1], logps=c.logps[:1], mask=None, versions=[(0, 1)]) for c in make_completions() if c.ids
    ]
    advantage = torch.linspace(-1, 1, len(completions), dtype=torch.float64)
    for kind, name in zip(SEQUENCE_LEVEL, itertools.cycle(("off", "token_mask", "behaviour")), strict=False):
        token, sequence = (
            step(
                make_config(loss_type=kind, importance_sampling_level=level, correction=CORRECTION_CASES[name]),
                completions, advantage,
            )[0]
            for level in ("token", "sequence")
        )  # fmt: skip
        assert close(sequence, token), (kind, name)


def test_sequence_level_grpo_is_gspo():
    """GSPO as published: exp of the mean log-ratio of a completion, differentiated as a whole."""
    cfg = make_config((TOTAL // 3, 1, "shared"), loss_type="grpo", importance_sampling_level="sequence", epsilon=0.02,
                      correction=CORRECTION_CASES["off"])  # fmt: skip
    model, completions = moved_llama(), make_completions()
    model.zero_grad(set_to_none=True)
    now = padded_logps(model, completions, TEMPERATURE)
    length = now.mask.sum(1)
    ratio = (((now.logp - logps_of("start").logp.detach()) * now.mask).sum(1) / length.clamp(min=1)).exp()
    loss = -torch.minimum(ratio * ADVANTAGE, ratio.clamp(0.98, 1.02) * ADVANTAGE)
    (loss[length > 0].sum() / (length > 0).sum()).backward()
    want = gradient(model)
    got, logged, _ = step(cfg)
    assert close(got, want) and 0 < logged["policy/clip_frac"] < 1


def test_missing_engine_logps_count_as_old_logps():
    """Nothing is corrected, and the off-policy mask measures drift from the old policy."""
    correction = {
        "vllm_importance_sampling_mode": "sequence_mask",
        "geometric_max": 1.01,
        "off_policy_mask_threshold": 0.0,
    }
    results = []
    for is_missing in (True, False):
        completions = [
            replace(c, logps=[float("nan")] * len(c.ids) if is_missing else row[: len(c.ids)].tolist())
            for c, row in zip(make_completions(), logps_of("start").logp.detach(), strict=True)
        ]
        results.append(step(make_config(correction=correction), completions)[:2])
    (missing, logged), (old, old_logged) = results
    assert close(missing, old) and logged == pytest.approx(old_logged, abs=1e-6)
    assert 0 < logged["policy/off_policy_dropped_frac"] < 1


def test_replayed_groups_use_the_log_probs_of_their_first_use():
    """Two of three groups are replayed."""
    completions = make_completions()
    earlier = [None if row >= 8 else [x - 0.05 for x in c.logps] for row, c in enumerate(completions)]
    earlier[NO_LOGP[0]][NO_LOGP[1]] = -2.0
    old = logps_of("start").logp.detach().clone()
    old[:8] = padded(completions, [x or [0.0] * len(c.ids) for x, c in zip(earlier, completions, strict=True)])[:8]
    for num_iterations, level in ((1, "token"), (2, "sequence")):
        cfg = make_config(
            (TOTAL // 3, 1, "shared"), num_iterations=num_iterations, importance_sampling_level=level,
            correction=CORRECTION_CASES["geometric"],
        )  # fmt: skip
        got, _, _ = step(cfg, replayed_logps=earlier)
        assert close(got, by_hand(cfg, old=old)[0]), (num_iterations, level)


def test_is_first_does_not_change_the_gradient():
    cfg = make_config(importance_sampling_level="sequence", top_entropy_quantile=0.5,
                      correction={"off_policy_mask_threshold": 0.1})  # fmt: skip
    policy = make_policy()
    batch = prepare(cfg, policy, make_completions(), ADVANTAGE)
    policy.model.zero_grad(set_to_none=True)
    gradients = []
    for is_first in (True, False):
        backward(cfg, policy, replace(batch, is_first=is_first))
        gradients.append(gradient(policy.model))
    assert close(gradients[1], gradients[0])


# Metrics.


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_metrics_match_the_formulas_and_do_not_depend_on_micro_batches(num_iterations):
    """Raw ratios are unbounded, between the old policy and the engine."""
    correction = {"vllm_importance_sampling_cap": 1.1, "geometric_max": 1.5, "off_policy_mask_threshold": 0.1}
    settings = {"num_iterations": num_iterations, "beta": 0.1, "entropy_coef": 0.1, "top_entropy_quantile": 0.6}
    logged = [step(make_config(cut, correction=correction, **settings))[1] for cut in (WHOLE, *CUTS[:3])]
    with pytest.MonkeyPatch.context() as monkeypatch:  # the head splits completions into slices
        monkeypatch.setattr(linear_logprob, "BLOCK_ELEMENTS", 3 * VOCAB)
        logged.append(step(make_config(correction=correction, **settings))[1])
    for other in logged[1:]:
        assert other == pytest.approx(logged[0], rel=1e-5, abs=1e-7)
    start, completions = logps_of("start"), make_completions()
    engine = padded(completions, [c.logps for c in completions])
    d = torch.where(engine.isnan(), 0.0, start.logp.detach() - engine) * start.mask
    length = start.mask.sum(1)
    token, sequence = d[start.mask > 0].exp(), d.sum(1)[length > 0].exp()
    now = logps_of("start" if num_iterations == 1 else "moved")
    want = {
        "policy/behaviour_ratio": token.mean(),
        "policy/behaviour_chi2": token.square().mean() - 1,
        "policy/behaviour_gap": d[start.mask > 0].abs().mean(),
        "policy/behaviour_kl": (token - 1 - token.log()).mean(),
        "policy/behaviour_sequence_ratio": sequence.mean(),
        "policy/behaviour_geometric_ratio": (d.sum(1) / length.clamp(min=1))[length > 0].exp().mean(),
        "policy/ess_frac": token.sum() ** 2 / (len(token) * token.square().sum()),
        "policy/ess_sequence_frac": sequence.sum() ** 2 / (len(sequence) * sequence.square().sum()),
        "policy/correction": token.clamp(max=1.1).mean(),
        "policy/correction_bound_frac": (token > 1.1).double().mean(),
        "policy/entropy": now.entropy[now.mask > 0].mean(),
        "policy/ratio": (now.logp - start.logp)[now.mask > 0].exp().mean(),
        "policy/geometric_dropped_frac": torch.tensor(0.2),  # rows 0 and 5 of ten with a trained token
        "policy/skipped_frac": torch.tensor(0.0),
    }
    assert {name: logged[0][name] for name in want} == pytest.approx(
        {name: x.item() for name, x in want.items()}, rel=1e-4, abs=1e-6
    )
