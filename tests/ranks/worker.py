"""One optimizer step of each method on this rank's shard vs. the same step in one process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.types import Example, Labelled, Pair, Steps
from rollout.engine import Completion
from tests.clip import clip_gradients
from trainer.config.blocks import ModelConfig, ParallelConfig, RunConfig
from trainer.methods import cpo, dpo
from trainer.offline.labelled import item_of, pack_labelled
from trainer.offline.rows import rows_of_this_rank
from trainer.parallel import comm, overlap
from trainer.parallel.comm import context_size
from trainer.parallel.dtensor import gather
from trainer.policy.adapters import freeze_except
from trainer.policy.attention import use_sliced_attention
from trainer.policy.fuse import join_adapters
from trainer.policy.logps import Policy, causal_lm
from trainer.policy.reference import Reference
from trainer.policy.sharding import OVERLAPS, parallelize, sum_gradients

VOCAB = 29
DATA = ("rows",)
PART = ("model.layers.1.", "model.layers.2.*norm", "model.norm")  # --trained-parameters


def all_of_them(rows: list[Any]) -> list[Any]:
    return rows


class Case(NamedTuple):
    rows: list[Any]
    policy: Callable[[], Policy]
    step: Callable[[Policy, list[Any]], dict[str, float]]  # gradients, and metrics of the step
    deal: Callable[[list[Any]], list[Any]] = rows_of_this_rank  # rows of a rank
    least: int = 1  # minimum number of rows per step


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Hide the other ranks."""
    variables = {name: os.environ.pop(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    try:
        yield
    finally:
        os.environ.update(variables)


def ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def with_sets(c: Completion) -> Completion:
    """The completion as if up to nine ids had been left to sample each token from."""
    rng, sets = random.Random(len(c.ids)), []
    for token in itertools.compress(c.ids, c.mask or itertools.repeat(True)):
        sets += [~token, *rng.sample([i for i in range(VOCAB) if i != token], rng.randrange(9))]
    return replace(c, sets=np.array(sets, np.int32))


def make_model(kind: str, seed: int, *, tied: bool = True) -> Any:
    import transformers

    torch.manual_seed(seed)
    labels = {"causal": {}, "sequence": {"num_labels": 1}, "token": {"num_labels": 2}}[kind]
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, **labels,
    )  # fmt: skip
    name = {"causal": "CausalLM", "sequence": "SequenceClassification", "token": "TokenClassification"}[kind]
    model = getattr(transformers, f"LlamaFor{name}" if kind != "causal" else "LlamaForCausalLM")(config)
    for module in (model.model, *model.model.layers):  # Llama's norm rounds to float32
        for child in [child for child, _ in module.named_children() if "norm" in child]:
            setattr(module, child, torch.nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    if context_size() > 1:
        use_sliced_attention(model)
    return model.double()


def make_experts(seed: int) -> Any:
    """A model with experts, whose router and attention never round to float32."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2, head_dim=4,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, num_local_experts=6,
        num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = GptOssForCausalLM._from_config(config, **options)
    for module in (model.model, *model.model.layers):
        for child in [child for child, _ in module.named_children() if "norm" in child]:
            setattr(module, child, torch.nn.RMSNorm(config.hidden_size, eps=1e-6))
    return model.double()


def make_policy(
    kind: str = "causal", *, tied: bool = True, lora: bool = False, reference: bool = False, seed: int = 0,
    part: tuple[str, ...] = (),
) -> Policy:  # fmt: skip
    model = make_model(kind, seed, tied=tied)
    freeze_except(model, part)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        head = [] if kind == "causal" else ["score"]  # trained in full
        options = {"exclude_modules": head, "modules_to_save": head} if head else {}
        # No larger than the base weights, which would amplify rounding.
        adapter = LoraConfig(r=2, lora_alpha=2, target_modules="all-linear", init_lora_weights=False, **options)
        model = get_peft_model(model, adapter).double()
        join_adapters(model)
    frozen = make_model(kind, 1 - seed, tied=tied).eval().requires_grad_(False) if reference and not lora else None
    return to_policy(model, frozen)


def to_policy(model: Any, reference: Any = None) -> Policy:
    device = comm.pick_device()
    return Policy(
        model=model.to(device).train(), tokenizer=None, source="test", device=device, compute_dtype=torch.float64,
        reference=None if reference is None else reference.to(device),
    )  # fmt: skip


def config(method: str, max_tokens: int = 64, **options: Any) -> Any:
    from importlib import import_module

    from trainer.config.blocks import DataConfig

    module = import_module(f"trainer.methods.{method}")
    run = RunConfig(max_tokens_per_micro_batch=max_tokens, per_device_train_batch_size=8)
    return module, module.Config(model=ModelConfig(model="test"), data=DataConfig(data=DATA), run=run, **options)


def sft_case(**options: Any) -> Case:
    module, cfg = config("sft")
    rng = random.Random(0)
    rows = []
    for n in range(7):
        length = rng.randrange(3, 30)
        rows.append(Example(source=f"row {n}", ids=ids(rng, length), mask=[False] + [True] * (length - 1)))

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        return module.backward(policy, module.pack(cfg, policy, rows, 2)).means()

    return Case(rows, lambda: make_policy(**options), step)


def few_rows_case() -> Case:
    """One row for two ranks, so that one rank has none."""
    case = sft_case()
    return case._replace(rows=case.rows[:1])


def make_pairs() -> list[Pair]:
    rng = random.Random(1)
    return [
        Pair(source=f"row {n}", prompt_ids=ids(rng, rng.randrange(2, 6)), chosen_ids=ids(rng, rng.randrange(1, 12)),
             rejected_ids=ids(rng, rng.randrange(1, 12)), margin=0.1 * n)
        for n in range(7)
    ]  # fmt: skip


def dpo_case(method: str = "dpo", *, policy: dict[str, Any] | None = None, **options: Any) -> Case:
    _, cfg = config(method, **options)

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        from trainer.offline.pairs import pack_pairs, pair_items

        reference = Reference(policy)
        micro_batches = pack_pairs(cfg.run, policy, rows, accumulation=2)
        return dpo.run_pairs(cfg, policy, reference, pair_items(rows), micro_batches, train=True).means()

    return Case(make_pairs(), lambda: make_policy(reference=True, **(policy or {})), step)


def pair_case(method: str, **options: Any) -> Case:
    module, cfg = config(method)
    module = {"simpo": cpo}.get(method, module)

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        from trainer.offline.pairs import pack_pairs

        whole = {"train_prompt": cfg.nll_on_prompt} if method == "orpo" else {}
        micro_batches = pack_pairs(cfg.run, policy, rows, accumulation=1, **whole)
        return module.run_pairs(cfg, policy, micro_batches, train=True).means()

    return Case(make_pairs(), lambda: make_policy(**options), step)


def kto_case(*, lora: bool = False, **options: Any) -> Case:
    module, cfg = config("kto", **options)
    rng = random.Random(8)  # z0 is above 0
    rows = [
        Labelled(
            source=f"row {n}", prompt_ids=ids(rng, 3), completion_ids=ids(rng, rng.randrange(1, 9)), label=n % 3 > 0
        )
        for n in range(7)
    ]
    partner = {id(row): item_of(row, rows[n - 1].completion_ids) for n, row in enumerate(rows)}
    if cfg.loss_type != "kto":
        partner = {}

    def step(policy: Policy, part: list[Any]) -> dict[str, float]:
        packed = pack_labelled(cfg, policy, part, [partner[id(row)] for row in part] if partner else [], 1)
        return module.run_rows(cfg, policy, Reference(policy), packed, train=True)[0].means()

    return Case(rows, lambda: make_policy(reference=True, lora=lora), step)


def rm_case(**options: Any) -> Case:
    module, cfg = config("rm", center_rewards_coefficient=0.01)

    def step(policy: Policy, rows: list[Any]) -> dict[str, float]:
        return module.backward(cfg, policy, module.pack(cfg, policy, rows, 1), rows).means()

    return Case(make_pairs(), lambda: make_policy("sequence", **options), step)


def prm_case(**options: Any) -> Case:
    module, cfg = config("prm")
    rng = random.Random(4)
    rows = []
    for n in range(5):
        length = rng.randrange(4, 12)
        labels = [module.UNLABELLED, *(rng.choice([0, 1, module.UNLABELLED]) for _ in range(length - 2)), n % 2]
        rows.append(Steps(source=f"row {n}", ids=ids(rng, length), labels=labels))

    def step(policy: Policy, part: list[Any]) -> dict[str, float]:
        return module.backward(policy, module.pack(cfg, policy, part, 1), part).means()

    return Case(rows, lambda: make_policy("token", **options), step)


CASES: dict[str, Callable[[], Case]] = {
    "sft": sft_case,
    "sft-untied": lambda: sft_case(tied=False),
    "sft-lora": lambda: sft_case(lora=True),
    "sft-head": lambda: sft_case(tied=False, part=("lm_head",)),  # no backward pass through the blocks
    "sft-part": lambda: sft_case(tied=False, part=PART),
    "sft-one-row": few_rows_case,
    "dpo": dpo_case,
    "dpo-lora": lambda: dpo_case(policy={"lora": True}),
    "dpo-untied": lambda: dpo_case(policy={"tied": False}),
    "dpo-part": lambda: dpo_case(policy={"part": PART}),  # a tied, frozen head
    "dpo-aot": lambda: dpo_case(loss_type=("aot",)),
    "dpo-wpo-ld-rpo": lambda: dpo_case(use_weighting=True, ld_alpha=0.5, rpo_alpha=0.3),
    "orpo": lambda: pair_case("orpo"),
    "cpo": lambda: pair_case("cpo"),
    "kto": kto_case,
    "kto-apo": lambda: kto_case(loss_type="apo_zero_unpaired"),
    "rm": rm_case,
    "prm": prm_case,
}


MODES = {
    "replicate": {"mode": "replicate"},
    "fsdp": {"mode": "fsdp"},
    "copies": {"mode": "fsdp", "shard": 1},  # sharded over one rank: the mesh of several machines
    "once": {"mode": "fsdp", "reduce_once": True},
    "part": {"mode": "fsdp"},  # of a model of which PART is trained
    "pairs": {"mode": "fsdp", "shard": 2},  # on four ranks: two copies, each sharded over two ranks
    "pairs-once": {"mode": "fsdp", "shard": 2, "reduce_once": True},
    "offload": {"mode": "fsdp", "cpu_offload": True},
}


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: gather(p.grad).clone() for name, p in policy.model.named_parameters() if p.requires_grad}


@functools.cache
def context_groups(size: int) -> Any:
    return comm._join_context(size, timedelta(seconds=60))


@contextlib.contextmanager
def sharing_rows(size: int) -> Iterator[None]:
    """Context manager: --parallel.context."""
    comm._context = context_groups(size)
    try:
        yield
    finally:
        comm._context = None


@contextlib.contextmanager
def small_buckets() -> Iterator[list[bool]]:
    """Use several buckets in a tiny model; yield, for each bucket, whether its launch preceded the end of the loop."""
    launched: list[bool] = []
    launch, size = overlap.Overlap._launch, overlap.BUCKET

    def record(self: overlap.Overlap) -> None:
        launched.append(bool(self.missing))
        launch(self)

    overlap.Overlap._launch, overlap.BUCKET = record, 2000
    try:
        yield launched
    finally:
        overlap.Overlap._launch, overlap.BUCKET = launch, size


def counted(policy: Policy) -> tuple[Policy, list[int]]:
    """Return the policy and a list of the positions of each forward pass."""
    seen: list[int] = []

    def count(module: Any, inputs: Any, output: Tensor) -> None:
        seen.append(output.shape[:2].numel())

    causal_lm(policy.model).get_input_embeddings().register_forward_hook(count)
    return policy, seen


def compare(case: Case, mode: str, context: int = 1) -> dict[str, Any]:
    """Compare gradients, their norm, metrics and positions with the same step in one process, on rank 0.

    `context` ranks share each row.
    """
    expected: dict[str, Tensor] = {}
    if comm.is_main():
        with one_process():
            alone, positions = counted(case.policy())
            expected_metrics = case.step(alone, case.rows)
            expected = gradients(alone)
    with sharing_rows(context), small_buckets() as launched:
        policy, computed = counted(case.policy())
        policy = parallelize(ParallelConfig(**MODES[mode], context=context), policy)
        found_metrics = case.step(policy, case.deal(case.rows))
    assert (policy.model in OVERLAPS) == (mode == "replicate" and context == 1)
    sum_gradients(policy.model)
    found = gradients(policy)
    norm = clip_gradients([p for p in policy.model.parameters() if p.requires_grad], 1e-3)
    clipped = torch.cat([g.flatten() for g in gradients(policy).values()]).norm()
    if not expected:
        return {}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    size = torch.cat([g.flatten() for g in expected.values()]).norm()
    error = torch.cat([(found[name] - expected[name]).flatten() for name in expected]).norm() / size
    assert size > 1e-3, size
    unlike = {
        name: [expected_metrics.get(name), found_metrics.get(name)]
        for name in expected_metrics.keys() | found_metrics.keys()
        if abs(expected_metrics.get(name, 1e9) - found_metrics.get(name, -1e9))
        > 1e-5 * max(1.0, abs(expected_metrics.get(name, 0.0)))
    }
    return {
        "gradient": float(error),
        "norm": abs(norm - float(size)) / float(size),
        "clipped": float(clipped),
        "unlike": unlike,
        "positions": sum(positions),
        "computed": sum(computed),
        "early": sum(launched),
        "buckets": len(launched),
    }
