"""bench/scaling: collectives counted in real steps vs. modelled, the fit of a collective's time, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.scaling.collectives import FITTED, HELD_OUT, Call, Layout, Network, fits, least_squares, wire_bytes
from bench.scaling.predict import BEGIN, END, ROLLOUTS, grpo, render, servers_per_trainer, train
from bench.table import between_markers
from tests.entry import ROOT, run_python, run_ranks

TWO = (
    "replicate:sft", "replicate:dpo-lora", "replicate:grpo", "fsdp:sft", "fsdp:sft-bf16", "fsdp:sft-lora",
    "fsdp:dpo", "fsdp:dpo-bf16", "fsdp:dpo-lora", "fsdp:grpo", "fsdp:grpo-lora", "once:sft-untied", "once:dpo",
    "replicate/2:sft", "replicate/2:dpo", "fsdp/2:dpo", "fsdp/2:sft-lora", "fsdp/2:sft-recomputed",
)  # fmt: skip
FOUR = ("replicate:dpo", "fsdp:sft-lora", "fsdp:grpo", "pairs:sft", "pairs:sft-untied", "pairs:dpo-lora", "pairs:grpo",
        "pairs-once:dpo", "fsdp/2:dpo", "replicate/4:sft")  # fmt: skip


def check(words: tuple[str, ...], done: Any) -> None:
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == list(words)
    for result in results:
        assert result["counted"] == result["modelled"], result["case"]
        assert result["small"] == result["modelled_small"], result["case"]
        assert result["sync"] == result["modelled_sync"], result["case"]


def test_collectives_of_rank_0_of_64_equal_the_model(tmp_path):
    """Without data: torch's fake group. A head of several copies is reduced within a copy first, and shards are summed
    over copies only once, after all micro-batches.
    """
    words = ("eights:sft-bf16", "eights:sft-all", "replicate:dpo")
    done = run_python("-m", "tests.ranks.traffic", "64", *words, cwd=tmp_path)
    check(words, done)
    for line, passes in zip(done.stdout.splitlines(), (1, 3), strict=False):
        counted = json.loads(line)["counted"]
        copies, shards = ([x for x in counted if x[0] == kind] for kind in ("all_reduce", "reduce_scatter"))
        assert [x[2] for x in copies] == [8] * 3  # blocks, root, head: each one shard of 8
        assert sum(x[3] for x in copies) * passes == sum(x[3] for x in shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"), [(1, ("fsdp:sft", "replicate:dpo", "fsdp:grpo")), (2, TWO), (4, FOUR)], ids=["1", "2", "4"]
)
def test_collectives_of_real_ranks_equal_the_model(ranks, words, tmp_path):
    check(words, run_ranks("-m", "tests.ranks.traffic", *words, cwd=tmp_path, num_ranks=ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 1024])
def test_collectives_of_many_ranks_equal_the_model(ranks, tmp_path):
    words = ("fsdp:sft", "eights:sft-untied", "eights:sft-all", "eights:dpo-lora", "replicate:dpo", "fsdp/2:dpo",
             "fsdp:grpo")  # fmt: skip
    check(words, run_python("-m", "tests.ranks.traffic", str(ranks), *words, cwd=tmp_path))


def test_times_of_collectives_follow_ring_and_tree():
    network = Network(nics=1, nvlink=100e9, nic=10e9, base=0.0, near=1e-6, far=10e-6)
    gather = network.seconds(Call("all_gather", 10**9, 8))
    assert gather == pytest.approx(7e-6 + 7 / 8 * 10**9 / 100e9)
    assert network.seconds(Call("reduce_scatter", 10**9, 16)) == pytest.approx(24e-6 + 15 / 16 * 10**9 / 10e9)
    # one rank of each of 8 nodes: eight such groups share the node's network card
    assert network.seconds(Call("reduce_scatter", 10**9, 8, stride=8)) == pytest.approx(70e-6 + 7 * 10**9 / 10e9)
    assert network.seconds(Call("broadcast", 10**9, 8)) == pytest.approx(7e-6 + 10**9 / 100e9)
    assert network.seconds(Call("all_reduce", 8, 16)) == pytest.approx(2 * (7e-6 + 10e-6) + 16 / 10e9)  # tree
    assert network.seconds(Call("all_reduce", 10**9, 16)) == pytest.approx(2 * (24e-6 + 15 / 16 * 10**9 / 10e9))
    assert network.seconds(Call("all_gather", 10**9, 1)) == 0.0


def test_fit_recovers_latency_and_bandwidth_and_reports_errors_on_other_sizes():
    def seconds(kind: str, size: int) -> float:
        return 50e-6 + wire_bytes(kind, 4) * size / 2e9

    exact = {"all_reduce": {size: seconds("all_reduce", size) for size in FITTED + HELD_OUT}}
    assert fits(exact, 4)[2] == "| all_reduce | 50 | 2.00 | 0.0% | 0.0% |"
    exact["all_reduce"][HELD_OUT[0]] *= 2
    assert fits(exact, 4)[2] == "| all_reduce | 50 | 2.00 | 0.0% | 50.0% |"
    assert least_squares([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], [3.0, 2.0, 1.0])[0][1] == 0.0  # no negative slope


def test_predictions_are_plausible():
    near, far = Network(nics=8), Network(nics=1)
    alone, many = train("qwen3-8b", Layout(8, 8), near), train("qwen3-8b", Layout(64, 64), far)
    assert alone.efficiency > 0.95 > many.efficiency and alone.compute == pytest.approx(many.compute, rel=0.01)
    assert not train("llama-3.1-70b", Layout(8), near).fits and train("llama-3.1-70b", Layout(8, 8), near).fits
    steps = [grpo(*ROLLOUTS[0][:2], Layout(gpus), near) for gpus in (8, 64)]
    assert steps[1]["hand-over"] == pytest.approx(8 * steps[0]["hand-over"])
    assert servers_per_trainer("qwen3-8b", 1024, 8192)[0] > servers_per_trainer("qwen3-8b", 1024, 1024)[0]


def test_page_is_up_to_date():
    page = Path(ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert between_markers(page, BEGIN, END)[1] == render(), "python -m bench.scaling --write docs/scaling.md"
