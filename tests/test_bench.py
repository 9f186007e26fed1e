"""Benchmarks: clocks and ratios, errors on small shapes, and the tables in the docs."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import runpy
import shlex
import signal
import sys
import time
from dataclasses import asdict, fields
from importlib import import_module

import pytest
import torch
from torch.overrides import TorchFunctionMode

import bench.__main__ as runner
from bench import block, common, ebft, linear_kl, linear_logprob, offloading, peers, rollout, table, train_step, vs_trl
from bench.claims import CLAIMS, Claim, at_least
from bench.common import Row, Timing, alternate, emit, make_row, read_rows, relative_error
from bench.runs import hybrid_gradients, kernel_times, smollm2, vs_trl_run
from bench.runs.kernel_times import Kernel
from tests.entry import ROOT, processes_with
from tests.models import segment_kernels

RESULTS = sorted((ROOT / "bench" / "results").rglob("*.jsonl"))
SMALL = (64, 32, 501)  # N, D, V: a vocabulary that no block size divides


@pytest.fixture(autouse=True)
def named_commit(monkeypatch):
    """Set a commit, because tests may run outside a checkout."""
    monkeypatch.setattr(common, "commit", lambda: "test")


def row(provider: str = "ours", bench: str = "linear_logprob/loss", ms: float = 2.0, **changes) -> Row:
    options = {
        "shape": {"N": 8, "D": 4, "V": 16}, "dtype": "float32", "work": 8, "unit": "tokens",
        "errors": {"logp": 1e-7, "dX": 2e-7, "dW": 3e-7}, "floor": Timing([1.0], None),
        "against": {"trl": Timing([4.0], None)},
    }  # fmt: skip
    return make_row(bench, provider, Timing([ms], None), **(options | changes))


def test_timing_quantiles():
    timing = Timing([6.0, 1.0, 3.0, 2.0, 5.0, 4.0], None)
    assert (timing.at(0.2), timing.p50, timing.at(0.8)) == pytest.approx((2.0, 3.5, 5.0))
    assert (one := Timing([7.0], None)).at(0.2) == one.p50 == one.at(0.8) == 7.0


def test_providers_alternate_after_warm_up():
    called = []
    timings = alternate({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, seconds=0.0, rounds=4)
    warm = 1 if not torch.cuda.is_available() else 2
    assert called[: 2 * warm] == ["a"] * warm + ["b"] * warm
    rounds = [called[i : i + 2] for i in range(2 * warm, len(called), 2)]
    assert len(rounds) == 4 and all(sorted(both) == ["a", "b"] for both in rounds)
    assert ["a", "b"] in rounds and ["b", "a"] in rounds  # not always in the same order
    assert len(timings["a"].times) == len(timings["b"].times) == 4
    assert all(ms >= 0 for ms in timings["a"].times)


def test_missing_and_too_large_providers_are_skipped_and_errors_raised(capsys):
    def absent():
        raise ModuleNotFoundError("No module named 'liger_kernel'")

    def too_big():
        raise torch.OutOfMemoryError("tried to allocate")

    timings = alternate({"liger": absent, "ours": lambda: None, "torch": too_big}, seconds=0.0, rounds=1)
    assert list(timings) == ["ours"]
    assert capsys.readouterr().out == "liger: not installed (No module named 'liger_kernel')\ntorch: out of memory\n"
    with pytest.raises(RuntimeError, match="wrong"):
        alternate({"broken": lambda: (_ for _ in ()).throw(RuntimeError("wrong"))}, seconds=0.0)


@pytest.mark.gpu
def test_peak_memory_excludes_inputs_and_results():
    held = torch.ones(1 << 28, dtype=torch.int8, device="cuda")

    def call() -> dict[str, torch.Tensor]:
        scratch = held + held  # 0.25 GiB
        return {"dX": scratch * 2}  # 0.25 GiB, and scratch is still there

    timing = alternate({"call": call}, seconds=0.0)["call"]
    assert timing.peak_gib == pytest.approx(0.25, abs=0.01)
    assert len(timing.times) == 15 and 0.05 < timing.p50 < 10  # 1.25 GiB through memory


def test_row_compares_medians_of_one_loop():
    made = row(ms=2.0, against={"trl": Timing([4.0, 1.0, 8.0], None), "absent": None})
    assert (made.ratio_to, made.ratio_to_floor, made.rate) == ({"trl": 0.5}, 2.0, 4000.0)
    with pytest.raises(ValueError, match="errors of ours: empty"):
        row(errors={})


def test_relative_error_is_over_the_whole_tensor():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_rows_round_trip_through_a_file(tmp_path, capsys):
    rows = [row(), row("trl", extra={"tflops_8192": 700.0})]
    emit(rows, tmp_path / "new" / "rows.jsonl")
    assert read_rows([tmp_path / "new" / "rows.jsonl"]) == rows
    assert "0.500 x trl" in capsys.readouterr().out
    (tmp_path / "old.jsonl").write_text('{"bench": "x"}\n')
    with pytest.raises(ValueError, match=r"old.jsonl:1: not a benchmark row"):
        read_rows([tmp_path / "old.jsonl"])


def test_commit_comes_from_the_environment_outside_a_checkout(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("STROP_COMMIT", raising=False)
    with pytest.raises(ValueError, match="set STROP_COMMIT"):
        common.commit.__wrapped__()
    monkeypatch.setenv("STROP_COMMIT", "abc1234")
    assert common.commit.__wrapped__() == "abc1234"


def entries() -> list[tuple[str, str]]:
    """Return (module, function) of everything in bench/ that measures rows."""
    makers = [path.stem for path in (ROOT / "bench").glob("*.py") if "make_row(" in path.read_text()]
    return [
        (name, entry)
        for name in sorted(set(makers) - {"common"})
        for entry in (("dpo", "sft", "kto", "offline", "grpo") if name == "vs_trl" else ("main",))
    ]


def test_commands_of_all_claims_parse(monkeypatch):
    def unknown() -> str:
        raise ValueError("commit: unknown")

    monkeypatch.setattr(common, "commit", unknown)
    seen = set()
    for claim in CLAIMS:
        for command in filter(None, (claim.command, claim.smoke)):
            module, *words = shlex.split(command)
            if module == "pytest":
                assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), claim.name
                continue
            ways = words[words.index("--ways") + 1 :] if "--ways" in words else []
            ways = list(itertools.takewhile(lambda word: not word.startswith("--"), ways))
            assert all(way in vs_trl.TRL or vs_trl.base_of(way) in vs_trl.OURS for way in ways), claim.name
            assert command is claim.smoke or not ways or {t.provider for t in claim.targets} <= {*ways}, claim.name
            key = (module, *(word for word in words if word.startswith("--")))
            if key in seen:
                continue
            seen.add(key)
            monkeypatch.setattr(sys, "argv", [module, *words, "--out", "rows.jsonl"])
            monkeypatch.delitem(sys.modules, module, raising=False)
            with pytest.raises((ValueError, SystemExit), match="commit: unknown"), NoWork():
                runpy.run_module(module, run_name="__main__", alter_sys=True)


def test_claims_are_measured_once_within_the_limits(tmp_path, monkeypatch, capsys):
    statement = "timeit -n 1 -r 1 -s 'import os, time, subprocess' {!r}".format
    write = statement("open(os.environ['ROWS'], 'a').write(os.environ['ROW'] + chr(10))")
    claims = (
        Claim("a/row", "writes a row", write, 5, needs=(), targets=(at_least("ours", "x trl", 1.5),)),
        Claim("a/slow", "is killed with its child", statement("subprocess.run(['sleep', '77.5'])"), 1, needs=()),
        Claim("a/long", "does not fit", write, 1000, needs=()),
        Claim("b/wrong", "fails", statement("1 / 0"), 5, needs=()),
        Claim("b/absent", "lacks a package", write, 5, needs=("no_such_package",)),
    )
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(runner, "CLAIMS", claims)
    monkeypatch.setattr(runner, "commit", lambda: "test")
    monkeypatch.setenv("ROWS", str(out))  # also marks the processes
    made = row()
    monkeypatch.setenv("ROW", json.dumps(asdict(made)))
    assert runner.main(runner.Settings(only=("b/", "a/"), out=out, minutes=0.5)) == 1
    said = capsys.readouterr().out
    assert "b/absent: skipped, needs the package no_such_package" in said and "ZeroDivisionError" in said
    assert "a/long: not started, takes 1000 of " in said and "2, met: x trl >= 1.5" in said
    outcomes = {x["claim"]: x["outcome"] for x in runner.records(out) if "claim" in x}
    assert outcomes == {"b/wrong": "failed with 1", "a/row": "done", "a/slow": "killed after 2 s"}
    deadline = time.monotonic() + 5
    while left := processes_with(f"ROWS={out}"):  # a killed grandchild is still in /proc for a moment
        assert time.monotonic() < deadline, left
    assert read_rows([out]) == [made]
    assert runner.main(runner.Settings(only=("a/row",), out=out)) == 0
    assert "a/row: skipped, already measured" in capsys.readouterr().out and len(read_rows([out])) == 1
    with pytest.raises(ValueError, match="^only=c/: no claim begins with it"):
        runner.main(runner.Settings(only=("c/",)))


class NoWork(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called before the commit was known")


def test_benchmark_without_a_commit_measures_nothing(monkeypatch):
    def unknown() -> str:
        raise ValueError("commit: unknown")

    monkeypatch.setattr(common, "commit", unknown)
    for module, entry in entries():
        run = getattr(import_module(f"bench.{module}"), entry)
        with pytest.raises(ValueError, match="^commit: unknown$"), NoWork():
            run()


def test_problem_halves_and_samples_whole_completions():
    problem = peers.make_problem(12, 8, 50, num_sequences=4, device="cpu", dtype=torch.float32, peaked=False)
    kept = problem.half_advantage().advantage.view(4, 3)
    assert torch.equal(kept[[1, 3]], torch.zeros(2, 3)) and torch.equal(
        kept[[0, 2]], problem.advantage.view(4, 3)[[0, 2]]
    )
    few = problem.sample(8)
    assert torch.equal(few.target, problem.target[[0, 1, 3, 4, 6, 7, 9, 10]]) and few.hidden.requires_grad
    assert problem.frozen_head().leaves().keys() == {"dX"}


def test_peaked_problem_has_the_entropy_of_a_trained_model():
    for peaked, low, high in ((False, 5.5, 7.0), (True, 0.1, 1.0)):
        problem = peers.make_problem(64, 64, 1000, num_sequences=2, device="cpu", dtype=torch.float32, peaked=peaked)
        assert low < linear_logprob.exact_entropy(problem) < high


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself is the test")
def test_linear_logprob_bench_measures_every_section(tmp_path, monkeypatch):
    monkeypatch.setattr(linear_logprob, "COMPLETION", 16)
    linear_logprob.run_shape(SMALL, tuple(linear_logprob.SECTIONS), 0.0, tmp_path / "rows.jsonl")
    rows = read_rows([tmp_path / "rows.jsonl"])
    assert {r.bench for r in rows if r.provider == "ours"} == {f"linear_logprob/{s}" for s in linear_logprob.SECTIONS}
    for r in rows:
        assert set(asdict(r)) == {field.name for field in fields(Row)}
        assert r.shape == dict(zip("NDV", SMALL, strict=True)) and r.floor_ms > 0
        assert all(0 <= error < 1e-4 for error in r.errors.values()), (r.bench, r.provider, r.errors)
    errors = {(r.bench, r.provider): set(r.errors) for r in rows}
    assert errors["linear_logprob/loss", "ours"] == {"logp", "dX", "dW"}
    assert errors["linear_logprob/frozen", "ours"] == {"logp", "dX"}
    assert errors["linear_logprob/forward", "ours, entropy"] == {"logp", "entropy"}
    half = next(r for r in rows if r.bench == "linear_logprob/half")
    assert math.isfinite(half.extra["gradients_half_over_full"])


def test_linear_logprob_bench_rejects_unknown_shapes():
    with pytest.raises(ValueError, match="shapes=gpt9: .*smollm2-135m"):
        linear_logprob.main(shapes=("gpt9",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself is the test")
def test_linear_kl_bench_measures_every_section(tmp_path):
    linear_kl.run_shape((40, 16, 24, 501), tuple(linear_kl.SECTIONS), 0.0, tmp_path / "rows.jsonl")
    rows = read_rows([tmp_path / "rows.jsonl"])
    assert {r.bench for r in rows if r.provider == "ours"} == {f"linear_kl/{s}" for s in linear_kl.SECTIONS}
    assert {r.provider for r in rows} >= {"ours", "torch"}
    for r in rows:
        assert r.shape == {"N": 40, "D": 16, "E": 24, "V": 501} and r.floor_ms > 0
        assert all(0 <= error < 1e-4 for error in r.errors.values()), (r.bench, r.provider, r.errors)
        assert set(r.errors) == {"divergence", "dX"} | (set() if r.bench == "linear_kl/frozen" else {"dW"})
    with pytest.raises(ValueError, match="shapes=gpt9: .*smollm2-135m"):
        linear_kl.main(shapes=("gpt9",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself is the test")
def test_block_bench_measures_every_operation(tmp_path):
    block.main(tmp_path / "rows.jsonl", tokens=16, seconds=0.0)
    rows = read_rows([tmp_path / "rows.jsonl"])
    names = ("norm", "head norm", "gated norm", "rotation", "activation")
    assert {r.bench for r in rows} == {f"block/{name}" for name in names}
    for r in rows:
        assert r.provider in ("ours", "transformers") and r.floor_ms > 0 and r.extra["moved_gb"] > 0
        assert {"out0", "d0", "d1"} <= set(r.errors) and all(0 <= error < 1e-2 for error in r.errors.values())
    with pytest.raises(ValueError, match="only=softmax: .*norm, head norm, gated norm, rotation, activation"):
        block.main(only=("softmax",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself is the test")
def test_train_step_gives_the_same_gradient_in_every_layout():
    shape = train_step.TINY | {"num_hidden_layers": 1}
    shared, packed, plain = train_step.measure(shape, group=3, prompt=16, completion=5, seconds=0.0)
    assert (shared.extra["computed_tokens"], packed.extra["computed_tokens"]) == (16 + 3 * 5, 3 * (16 + 5))
    assert shared.rate == pytest.approx(3 * (16 + 5) * 1000 / shared.ms_p50)
    for r in (shared, packed, plain):
        assert r.errors["gradient"] < 1e-5 and r.extra["gap_to_packed"] < 1e-5
    assert shared.ratio_to["packed"] == pytest.approx(shared.ms_p50 / packed.ms_p50)
    rows = train_step.measure(shape, group=2, prompt=9, completion=4, seconds=0.0, turns=3)
    assert [r.extra["computed_tokens"] for r in rows[:3]] == [
        9 + 2 * 3 * 4,
        9 + 2 * (4 + 6 + 8),
        6 * 9 + 2 * (4 + 6 + 8),
    ]
    assert all(r.errors["gradient"] < 1e-5 for r in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself is the test")
def test_offloading_bench_compares_gradients_and_memory():
    shape = train_step.TINY | {"num_hidden_layers": 3}
    kept, offloaded = offloading.measure(shape, num_rows=2, length=16, held=torch.float32, seconds=0.0)
    assert (kept.provider, offloaded.provider) == ("on the GPU", "offloaded")
    assert kept.errors == offloaded.errors == {"largest gradient difference": 0.0}
    assert offloaded.ratio_to["on the GPU"] == pytest.approx(offloaded.ms_p50 / kept.ms_p50)
    assert kept.extra["host_gib"] == 0 and offloaded.extra["host_gib"] == 2 * 2**-6  # a slab for each of two blocks
    assert kept.extra["planned_gib"] >= offloaded.extra["planned_gib"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself is the test")
def test_ebft_layouts_sample_and_train_alike():
    shape = ebft.TINY | {"num_hidden_layers": 2, "vocab_size": 101}
    plan = {"stride": 3, "context_length": 4, "generate_max_len": 5, "n_samples_per_prompt": 3}
    shared, step_major = ebft.measure(shape, 30, plan, seconds=0.0)
    anchors = len(range(4, 30 - 5 + 1, 3))
    assert (shared.extra["places"], step_major.extra["places"]) == (30 + anchors * 3 * 5, 3 * (30 + anchors * 5))
    for r in (shared, step_major):
        assert r.extra["same_ids_frac"] == 1 and r.extra["logp_gap"] < 1e-5 and r.extra["gradient_gap"] < 1e-5
        assert r.errors["logp"] < 1e-6 and r.errors["gradient"] < 1e-5
        assert r.rate == pytest.approx(anchors * 3 * 5 * 1000 / r.ms_p50)
        parts = [r.extra[f"{part}_s"] for part in ("generate", "features", "train")]
        assert min(parts) > 0 and 0.1 < 1000 * sum(parts) / r.ms_p50 < 10
    assert shared.ratio_to["step-major, dense"] == pytest.approx(shared.ms_p50 / step_major.ms_p50)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself is the test")
def test_rollout_writes_a_row_per_case(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    rollout.main(out, engine="local", cases=("2x3x5x7", "1x2x4x3"), rounds=1)
    first, second = read_rows([out])
    assert first.shape == {"prompts": 2, "G": 3, "P": 5, "R": 7, "layers": 3, "D": 128} and second.shape["R"] == 3
    assert first.rate == pytest.approx(2 * 3 * 7 * 1000 / first.ms_p50)
    assert 0 <= first.errors["logp_gap"] <= first.errors["logp_gap_max"] < 1e-5
    assert "start_s" in first.extra and "start_s" not in second.extra
    assert "local, 2x3x5x7 full" in capsys.readouterr().out


def test_rollout_limits_are_log_normal_and_reproducible():
    case = rollout.Case.of("256x8x2x1024")
    work = rollout.make_work(case, "lognormal", 100)
    assert work.limits == rollout.make_work(case, "lognormal", 100).limits and max(work.limits) == 1024
    assert sorted(work.limits)[1024] == pytest.approx(256, rel=0.1) and len(work.requests) == 2048
    assert rollout.make_work(case, "full", 100).tokens == 2048 * 1024
    assert len({tuple(r.prompt_ids) for r in work.requests[:8]}) == 1 and len({r.seed for r in work.requests}) == 2048


def test_rollout_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="cases=64x8x256:"):
        rollout.main(engine="local", cases=("64x8x256",))
    with pytest.raises(ValueError, match="lengths=full full: 2 for 1 cases"):
        rollout.main(engine="local", cases=("1x2x3x4",), lengths=("full", "full"))
    with pytest.raises(ValueError, match="shape=gpt9: .*tiny, smollm2-135m, qwen3-0.6b"):
        rollout.main(engine="local", shape="gpt9")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmark itself is the test")
def test_vs_trl_measures_every_offline_method(tmp_path, monkeypatch):
    def in_this_process(side, jobs):
        return ((way, vs_trl_run.run_ours(job)) for way, job in jobs.items())

    monkeypatch.setattr(vs_trl.Side, "run", in_this_process)
    for module in (vs_trl, vs_trl_run):
        monkeypatch.setattr(module, "PROMPT", 8)
    monkeypatch.setattr(vs_trl, "LONGEST", 40)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match=r"^steps=6: .*14 .*16"):
        vs_trl.dpo(vs_trl.Options(out, shape="tiny", ways=("ours",), rows=1, steps=6))
    monkeypatch.setattr(vs_trl, "WARMUP", {"dpo": 4, "sft": 4, "kto": 4})
    vs_trl.dpo(vs_trl.Options(out, shape="tiny", ways=("ours",), rows=1, steps=6))
    vs_trl.sft(vs_trl.Options(out, shape="tiny", ways=("ours",), rows=2, steps=6))
    vs_trl.kto(vs_trl.Options(out, shape="tiny", ways=("ours",), rows=2, steps=6))
    vs_trl.sft(vs_trl.Options(out, shape="tiny-qwen3.5", ways=("ours, rows",), rows=2, steps=6))
    vs_trl.sft(vs_trl.Options(out, shape="tiny-qwen3-moe", ways=("ours, by memory",), rows=2, steps=6, length=40))
    rows = read_rows([out])
    assert rows[-1].extra["step_tokens"] == 2 * 40 and rows[-1].shape["length"] == 40
    for r, name in zip(rows, ("dpo", "sft", "kto", "sft", "sft"), strict=True):
        assert r.bench == f"vs_trl/{name}" and r.errors["first_loss"] < 1e-6, "the first loss is that of the exact rows"
        assert r.rate > 0 and 2 * (8 + 8) < r.extra["step_tokens"] <= 2 * 40


@pytest.mark.slow
def test_vs_trl_keeps_one_process_per_side_and_continues_after_a_failure(monkeypatch, capsys):
    script = """if True:
        import os, sys
        from bench.runs import vs_trl_run
        def measured(job):
            if job == "dies":
                os._exit(3)
            print("output of", job, end="" if job == "works" else None, flush=True)
            return None if job == "fails" else vs_trl_run.Measured([1.0], [2.0], 0.0, 0.0, {"pid": os.getpid()})
        vs_trl_run.measured = measured
        vs_trl_run.main()
    """
    monkeypatch.setattr(vs_trl.Side, "command", (sys.executable, "-c", script))
    with contextlib.closing(vs_trl.Side()) as side:
        found = dict(side.run({"a": "works", "b": "fails", "c": "works"}))
        assert list(found) == ["a", "c"] and found["c"].tokens == [2.0]
        assert "no result of b:\noutput of works\noutput of fails\n" in capsys.readouterr().out
        assert len({made.parts["pid"] for made in found.values()}) == 1
        (first,) = [made.parts["pid"] for made in dict(side.run({"d": "works"})).values()]
        (second,) = [made.parts["pid"] for made in dict(side.run({"e": "works"})).values()]
        assert first == second not in {made.parts["pid"] for made in found.values()}
        os.kill(second, signal.SIGKILL)
        side._child.wait()  # it dies while the other side runs
        assert dict(side.run({"f": "dies"})) == {} and "no result of f" in capsys.readouterr().out
        with pytest.raises(OSError, match="disk full"):
            for _ in side.run({"g": "works", "h": "works"}):
                child = side._child
                raise OSError("disk full")
        assert side._child is None and child.returncode == -signal.SIGKILL


def test_vs_trl_flags_of_ways():
    for way, engine, packs in (("ours, bf16, local", "local", True), ("ours, bf16, rows, local", "local", False),
                               ("ours, bf16, rows", "vllm", False)):  # fmt: skip
        flags = vs_trl.flags_of("grpo", way, [])
        assert vs_trl.base_of(way) == "ours, bf16" and flags[flags.index("--rollout.engine") + 1] == engine
        assert ("--no-packing" not in flags) == packs
    for way, words in (("ours", ["--gradient-checkpointing"]), ("ours, by memory", []),
                       ("ours, no checkpointing", ["--gradient-checkpointing", "false"])):  # fmt: skip
        assert vs_trl.flags_of("sft", way, []) == [*words, "--compile", "false"]


def test_vs_trl_tunes_trl(monkeypatch):
    monkeypatch.setattr(vs_trl.importlib.util, "find_spec", lambda name: None)
    names = ["TRL", "TRL, liger", "TRL, liger, compile"]
    assert sorted(vs_trl.tuned()) == sorted([*names, *(f"{name}, no checkpointing" for name in names)])
    monkeypatch.setattr(vs_trl.importlib.util, "find_spec", lambda name: name == "flash_attn")
    assert len(vs_trl.tuned()) == 10 and set(vs_trl.tuned()) < vs_trl.TRL.keys()
    assert vs_trl.TRL["TRL, liger, compile, flash"] == ("liger", "compile", "flash") and vs_trl.TRL["TRL"] == ()
    assert set(vs_trl.tuned()) < set(vs_trl.ways_of("dpo", 0)) and "TRL, liger" in vs_trl.ways_of("grpo", 0)


def test_vs_trl_gives_both_sides_the_rows_of_a_step(tmp_path):
    rows = [{"prompt": str(i)} for i in range(12)]
    ordered = vs_trl.in_our_order(rows)
    assert ordered != rows and sorted(ordered, key=str) == sorted(rows, key=str)


def test_vs_trl_also_compares_median_steps():
    def measured(*seconds: float) -> vs_trl.Measured:
        return vs_trl.Measured(list(seconds), [100.0] * len(seconds), 1.0, 0.0, {}, kernels={"gpu_busy": 0.9})

    trl = vs_trl.row_of("dpo", "TRL", measured(3.0, 3.0, 3.0), {}, {"pairs": 1})
    ours = vs_trl.row_of("dpo", "ours", measured(1.0, 1.0, 4.0), {"TRL": trl}, {"pairs": 1})
    assert ours.extra["speedup over TRL"] == pytest.approx(3) and ours.ratio_to["TRL"] == pytest.approx(2 / 3)
    assert ours.extra["gpu_busy"] == 0.9
    liger = vs_trl.row_of("dpo", "TRL, liger", measured(2.0, 2.0, 2.0), {"TRL": trl}, {"pairs": 1})
    assert "best TRL" not in liger.ratio_to
    ways = {"TRL": trl, "TRL, liger": liger}
    ours = vs_trl.row_of("dpo", "ours", measured(1.0, 1.0, 1.0), ways, {"pairs": 1})
    assert ours.ratio_to == pytest.approx({"TRL": 1 / 3, "TRL, liger": 1 / 2, "best TRL": 1 / 2})
    assert ours.extra["speedup over best TRL"] == pytest.approx(2)
    said = vs_trl.comparison(ways, [ours]).splitlines()
    assert "'TRL, liger', 50 tokens/s" in said[1] and said[2].endswith("2.00 x best TRL, 3.00 x TRL's default")
    assert "| TRL 0.33; best TRL 0.50 |" in table.render([trl, liger, ours])


def test_kernel_times_counts_overlaps_once_and_only_the_last_steps():
    marks = [Kernel("at::cuda::spin_kernel(long)", start, start + 1) for start in (0, 1000, 2000, 3000)]
    steps = [
        Kernel("nvjet_tst_128", 100, 900),  # of the first step
        Kernel("nvjet_tst_128", 1000, 1500),
        Kernel("Memcpy HtoD (Pinned -> Device)", 1400, 1600),  # beside the product
        Kernel("_step", 2000, 2300),
        Kernel("triton_poi_fused__to_copy_mul_1", 2900, 3100),  # runs past the end
    ]
    found = kernel_times.summary([*steps, *marks], 2)
    assert found["gpu_busy"] == pytest.approx((600 + 300 + 100) / 2000)
    assert (found["products_ms"], found["copies_ms"], found["optimizer_ms"]) == pytest.approx((0.25, 0.1, 0.15))
    assert found["elementwise_ms"] == pytest.approx(0.1) and next(iter(found)) == "gpu_busy"
    assert kernel_times.summary(steps, 2) == {}, "without marks nothing is known"
    ends = [Kernel("at::native::erfinv_kernel_cuda", start, start + 1) for start in (500, 1100, 1200, 2200)]
    assert "train_busy" not in found, "nothing marks the end of sampling"
    found = kernel_times.summary([*steps, *marks, *ends], 2)
    assert found["gpu_busy"] == pytest.approx(0.5), "marks are not counted"
    assert found["train_busy"] == pytest.approx((200 + 100) / (800 + 800)), "from the last mark to the end of the step"


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("attention", ("triton_tem_fused_flex_attention_0", "cutlass::device_kernel<flash::FwdSm90>", "_attend_rows")),
        ("products", ("sm90_xmma_gemm_bf16", "void cutlass::Kernel2<cutlass_80>", "nvjet_tst_192x192", "_linear")),
        ("optimizer", ("_step", "void at::native::multi_tensor_apply_kernel<FusedAdam>")),
        ("head", ("_exp_product", "_finish_weight", "_redo_sums")),
        ("copies", ("Memset (Device)", "at::native::direct_copy_kernel_cuda")),
        ("elementwise", ("triton_red_fused__to_copy_mean_pow", "void at::native::vectorized_elementwise_kernel<4>")),
    ],
)
def test_kernel_times_groups_kernels_by_name(group, names):
    assert [kernel_times.group_of(name) for name in names] == [group] * len(names)


def test_smollm2_clock_stops_during_evaluations(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(smollm2, "commit", lambda: "test")
    monkeypatch.setattr(smollm2.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(smollm2.time, "time", lambda: now[0] + 1000)
    out = tmp_path / "rows.jsonl"
    job = smollm2.Job("ours", 3, smollm2.Settings(), str(tmp_path), "vllm", begun=1070.0, out=str(out))
    clock = smollm2.Clock(job)

    def evaluate(accuracy: float):
        now[0] += 5
        return accuracy, "more"

    for step, accuracy in ((0, 0.25), (10, 0.5), (20, 0.75)):
        assert clock.point(step, lambda accuracy=accuracy: evaluate(accuracy)) == "more"
        now[0] += 20
        clock.tokens += 1000
    rows = common.read(out)
    assert [row["train_s"] for row in rows] == [0, 20, 40] and [row["wall_s"] for row in rows] == [35, 55, 75]
    assert [row["accuracy"] for row in rows] == [0.25, 0.5, 0.75] and rows[-1]["tokens"] == 2000
    assert smollm2.lines_of([*rows, *rows[:2]]) == {("ours", 3): rows[:2]}, "a run made again replaces the earlier one"
    (said,) = smollm2.summary(rows).splitlines()
    assert said.startswith("ours, seed 3: 0.25 -> 0.75 in 20 steps, 40 s of training (50 completion tokens/s)")


def test_packed_rows_of_a_hybrid_have_the_gradients_of_separate_rows(monkeypatch):
    """As on a GPU, with torch code that runs each segment alone instead of flash-linear-attention."""
    model = hybrid_gradients.make_model()
    code = sys.modules[type(model).__module__]
    plain = getattr(code.causal_conv1d_fn, "plain", code.causal_conv1d_fn)  # as in a new process
    for name, function in ({"causal_conv1d_fn": plain} | segment_kernels(code)).items():
        monkeypatch.setattr(code, name, function)
    policy, items = hybrid_gradients.policy_of(model, "sdpa", torch.float32), hybrid_gradients.make_items()
    alone = hybrid_gradients.gradients(policy, items, packing=False)
    for share_prompt in (False, True):
        packed = hybrid_gradients.gradients(policy, items, packing=True, share_prompt=share_prompt)
        assert packed.keys() == alone.keys() and max(relative_error(packed[x], alone[x]) for x in alone) < 1e-3


def test_ebft_layouts_reward_alike():
    plan = {"stride": 4, "context_length": 2, "generate_max_len": 3, "n_samples_per_prompt": 4}
    work = ebft.make_work(ebft.TINY, 21, plan, torch.device("cpu"))
    shared, step_major = ebft.SharedRow(work), ebft.StepMajor(work)
    ids = torch.randint(512, (5, 4, 3), generator=torch.Generator().manual_seed(2))
    advantage = shared.add_rewards(ids)
    assert advantage.shape == (5, 4) and advantage.std() > 0.01
    assert torch.allclose(step_major.add_rewards(ids), advantage, atol=1e-5)


def test_step_major_rows_match_the_authors_layout():
    """12 tokens, anchors at 4, 7 and 10, two steps: 12 13 14 are the first tokens, 15 16 17 the second tokens."""
    plan = {"stride": 3, "context_length": 4, "generate_max_len": 2, "n_samples_per_prompt": 2}
    way = ebft.StepMajor(ebft.make_work(ebft.TINY | {"num_hidden_layers": 1}, 12, plan, torch.device("cpu")))
    assert way.position_ids.tolist() == [*range(12), 4, 7, 10, 5, 8, 11]
    assert way.predictor.tolist() == [[3, 12], [6, 13], [9, 14]]
    sees = [row.nonzero()[:, 0].tolist() for row in way.mask[0, 0]]
    assert sees[:12] == [list(range(place + 1)) for place in range(12)]
    assert sees[12:15] == [[*range(4), 12], [*range(7), 13], [*range(10), 14]]
    assert sees[15:] == [[*range(4), 12, 15], [*range(7), 13, 16], [*range(10), 14, 17]]
    rows = way._rows(torch.arange(100, 112).view(3, 2, 2))  # anchors, samples, steps
    assert rows[:, 12:].tolist() == [[100, 104, 108, 101, 105, 109], [102, 106, 110, 103, 107, 111]]


def test_table_shows_the_latest_rows():
    rows = [
        row(ms=9.0),
        row(ms=2.0),  # measured again
        row("trl", ms=4.0, against={}),
        row("ours, general entry", ms=3.0),
        row(
            "shared prompt",
            "train_step",
            ms=150.0,
            shape={"G": 8},
            floor=None,
            against={"packed": Timing([300.0], None)},
        ),
    ]
    lines = table.render(rows).splitlines()
    assert "| 8, 4, 16 | loss and gradients in one pass, ms | 2.00 | 4.00 | 1.00 | 0.50 |" in lines
    assert "|  | gradients of any loss, ms | 3.00 | 4.00 | 1.00 | 0.75 |" in lines
    assert "|  | error of dW | 3.0e-07 | 3.0e-07 |  |  |" in lines
    assert any(line.startswith("| train_step | G=8 | shared prompt | 150 | 53 tokens/s |") for line in lines)
    assert any(line.endswith("| packed 0.50 | test |") for line in lines)
    assert lines[0].startswith("One ") and "commit test" in lines[0]


def test_table_is_written_between_the_markers_and_checked(tmp_path, capsys):
    results, text = tmp_path / "rows.jsonl", tmp_path / "README.md"
    emit([row()], results)
    text.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.main((results,), write=text)
    assert text.read_text() == f"before\n{table.BEGIN}\n{table.render(read_rows([results]))}{table.END}\nafter\n"
    table.main((results,), check=text)
    text.write_text(text.read_text().replace("2.00", "1.00"))
    with pytest.raises(SystemExit, match="--write"):
        table.main((results,), check=text)
    text.write_text("no markers\n")
    with pytest.raises(ValueError, match="markers"):
        table.main((results,), write=text)


@pytest.mark.skipif(not RESULTS, reason="no rows are committed under bench/results")
def test_tables_in_the_docs_match_the_committed_rows():
    table.main(tuple(RESULTS), check=ROOT / "docs" / "kernels_and_benchmarks.md")


def test_committed_rows_are_complete():
    for r in read_rows(RESULTS):
        numbers = [r.ms_p20, r.ms_p50, r.ms_p80, r.rate, *r.errors.values(), *r.ratio_to.values(), *r.extra.values()]
        assert all(math.isfinite(x) for x in numbers) and r.ms_p20 <= r.ms_p50 <= r.ms_p80, (r.bench, r.provider)
        assert r.errors and r.commit and r.hardware and {"torch", "triton"} <= r.versions.keys()
