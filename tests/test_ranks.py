"""Several processes give what one gives: gradients, runs, checkpoints; and what happens when one of them fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data.command.config_file import load_config
from tests.entry import ROOT, environment, metrics, repeatable, run_ok
from trainer.__main__ import main
from trainer.config.blocks import ParallelConfig
from trainer.parallel.comm import shares
from trainer.parallel.watch import HUNG, Place, Watch, record_flight
from trainer.run.checkpoint import find_problem, list_checkpoints

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SFT = (
    "--method", "sft", "--learning-rate", "1e-3", "--max-eval-rows", "20", "--save-steps", "2", "--eval-steps", "2",
    "--lr-scheduler-type", "constant",
)  # fmt: skip


def two(*argv: Any, cwd: Path, timeout: float = 240, launcher: tuple[str, ...] = (), **env: str) -> Any:
    command = [*TORCHRUN, *launcher, "-m", *map(str, argv)]
    env = environment() | {"PYTHONFAULTHANDLER": "1"} | env
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def two_ok(*argv: Any, cwd: Path, **options: Any) -> Any:
    return checked(argv, two(*argv, cwd=cwd, **options))


def checked(argv: tuple[Any, ...], done: Any) -> Any:
    assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}\n{said(done.stderr)}"
    return done


def said(stderr: str) -> str:
    """Its start and its end: the rank that failed first speaks first, and what others say of it is long."""
    return stderr if len(stderr) < 8000 else f"{stderr[:4000]}\n...\n{stderr[-4000:]}"


def results_of(*argv: Any, cwd: Path, **options: Any) -> list[dict[str, Any]]:
    """The lines of a worker that writes no files. One run has lost a process to SIGABRT, for a reason not found (gloo,
    torch 2.13; it did not come again in some thirty): that alone is tried again, and shown."""
    done = two(*argv, cwd=cwd, **options)
    if done.returncode and "Signal 6 (SIGABRT)" in done.stderr:
        warnings.warn(f"{argv}: tried again after\n{said(done.stderr)}", stacklevel=2)
        done = two(*argv, cwd=cwd, **options)
    return [json.loads(line) for line in checked(argv, done).stdout.splitlines() if line.startswith("{")]


def alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], limit: float = 1e-4) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for a, b in zip(ours, theirs, strict=True):
        names = {name for name in a.keys() | b.keys() if not name.startswith(("time/", "perf/", "mem/"))}
        for name in names:
            assert a[name] == pytest.approx(b[name], rel=limit, abs=limit), (a["step"], name)


@pytest.mark.parametrize("mode", [pytest.param("replicate", marks=pytest.mark.slow), "fsdp"])
def test_every_method_has_the_gradient_of_one_process(mode, tmp_path):
    """float64: uneven rows, a rank with nothing to do, tied and untied heads, LoRA, statistics over the step."""
    found = results_of("tests.ranks.worker", mode, cwd=tmp_path)
    assert len(found) == 32
    for result in found:
        assert result["gradient"] < 1e-12, result
        assert result["norm"] < 1e-12 and result["clipped"] == pytest.approx(1e-3, rel=1e-4), result
        assert result["unlike"] == {}, result


def test_bnpo_averages_over_micro_batches_with_completions_alone(tmp_path):
    """Six and one of them, where the second rank passes five empty ones: divided by 7 as in one process, not by 12."""
    cases = ("grpo-bnpo", "grpo-bnpo-masked", "ebft-bnpo")
    found = results_of("tests.ranks.worker", "replicate", *cases, cwd=tmp_path)
    assert [result["case"] for result in found] == list(cases)
    for result in found:
        assert result["gradient"] < 1e-12 and result["unlike"] == {}, result


@pytest.mark.parametrize("mode", ["copies", pytest.param("once", marks=pytest.mark.slow)])
def test_copies_of_shards_and_gradients_reduced_once_have_it_too(mode, tmp_path):
    found = results_of("tests.ranks.worker", mode, "sft-untied", "dpo-lora", cwd=tmp_path)
    assert [result["case"] for result in found] == ["sft-untied", "dpo-lora"]
    assert all(result["gradient"] < 1e-12 and result["norm"] < 1e-12 for result in found), found


@pytest.mark.slow  # trainer/run/test_sharded_checkpoint.py reads checkpoints of two processes in one, every time
@pytest.mark.parametrize("mode", ["replicate", "fsdp"])
def test_sft_saved_by_two_goes_on_with_one_and_the_reverse(mode, tmp_path):
    one_batch, two_batch = ("--per-device-train-batch-size", "16"), ("--per-device-train-batch-size", "8")
    spread = ("--parallel.mode", mode)
    run_ok(*SFT, *one_batch, "--max-steps", "4", "--output-dir", tmp_path / "whole", cwd=tmp_path)
    two_ok("trainer", *SFT, *two_batch, *spread, "--max-steps", "2", "--output-dir", tmp_path / "a", cwd=tmp_path)
    exported_again(tmp_path / "a", tmp_path / "out")
    run_ok("--resume", tmp_path / "a", *one_batch, "--max-steps", "4", cwd=tmp_path)
    assert load_config(tmp_path / "a" / "config.yaml")["parallel"]["mode"] == mode, "for those who take it up again"
    alike(metrics(tmp_path / "a"), metrics(tmp_path / "whole"))
    exported = [load_file(tmp_path / name / "final" / "model.safetensors") for name in ("a", "whole")]
    assert exported[0].keys() == exported[1].keys()
    for name, value in exported[0].items():
        torch.testing.assert_close(value, exported[1][name], rtol=1e-3, atol=1e-5)

    run_ok(*SFT, *one_batch, "--max-steps", "2", "--output-dir", tmp_path / "b", cwd=tmp_path)
    two_ok("trainer", "--resume", tmp_path / "b", *two_batch, *spread, "--max-steps", "4", cwd=tmp_path)
    alike(metrics(tmp_path / "b"), metrics(tmp_path / "whole"))


def exported_again(run: Path, out: Path) -> None:
    """The last checkpoint, exported by one process, is what all ranks together wrote as final/, byte for byte."""
    done = subprocess.run(
        [sys.executable, "-m", "trainer.export", str(run), str(out)], cwd=run.parent, env=environment(),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    names = sorted(path.name for path in (run / "final").iterdir())
    assert names == sorted(path.name for path in out.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    assert weights
    for name in names:
        if name in weights:
            ours, theirs = load_file(out / name), load_file(run / "final" / name)
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
        else:
            assert (out / name).read_text() == (run / "final" / name).read_text(), name


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--lora.r", "4"), ("--lora.r", "4", "--merge-lora")])
def test_adapter_in_shards_is_exported_as_it_is_and_merged(flags, tmp_path):
    two_ok("trainer", *SFT, "--max-steps", "2", "--parallel.mode", "fsdp", *flags, "--output-dir", tmp_path / "run",
           cwd=tmp_path)  # fmt: skip
    exported_again(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "adapter_config.json").exists() == ("--merge-lora" not in flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--ref-model", "builtin:tiny"),  # in shards too
        ("--ref-model", "builtin:tiny", "--ref", "precomputed", "--ref-cache", "cache"),
        ("--sync-ref-model", "--ref-model-sync-steps", "1"),
    ],
)
def test_references_in_shards_are_those_of_one_process(flags, tmp_path):
    common = ("--method", "dpo", "--max-steps", "3", "--data", "task:addition:split=train,size=64", "--max-eval-rows",
              "5", "--save-steps", "2", *flags)  # fmt: skip
    run_ok(*common, "--per-device-train-batch-size", "6", "--output-dir", tmp_path / "one", cwd=tmp_path)
    two_ok("trainer", *common, "--parallel.mode", "fsdp", "--per-device-train-batch-size", "3", "--output-dir",
           tmp_path / "two", cwd=tmp_path)  # fmt: skip
    alike(metrics(tmp_path / "two"), metrics(tmp_path / "one"), limit=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rm", "prm"])
def test_scorer_in_shards_is_exported(method, tmp_path):
    for name, flags in (("all", ()), ("lora", ("--lora.r", "4"))):
        two_ok("trainer", "--method", method, "--max-steps", "2", "--max-eval-rows", "5", "--parallel.mode", "fsdp",
               *flags, "--output-dir", tmp_path / name, cwd=tmp_path)  # fmt: skip
        config = json.loads((tmp_path / name / "final" / "config.json").read_text())
        assert config["architectures"] == [f"LlamaFor{'Sequence' if method == 'rm' else 'Token'}Classification"]
    exported_again(tmp_path / "all", tmp_path / "out")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--parallel.mode", "replicate"), marks=pytest.mark.slow),
        pytest.param(("--parallel.mode", "fsdp", "--lora.r", "4", "--beta", "0.05"), marks=pytest.mark.slow),
    ],
)
def test_grpo_deals_different_groups_to_ranks_and_learns_as_one_process_does(flags, tmp_path):
    common = ("--method", "grpo", "--max-steps", "2", "--max-eval-rows", "20", "--save-steps", "2")
    alone = [flag for flag in flags if flag not in ("--parallel.mode", "replicate", "fsdp")]
    run_ok(*common, *alone, "--per-device-train-batch-size", "32", "--output-dir", tmp_path / "one", cwd=tmp_path)
    two_ok(
        "trainer", *common, *flags, "--per-device-train-batch-size", "16", "--output-dir", tmp_path / "two",
        cwd=tmp_path,
    )  # fmt: skip
    alike(metrics(tmp_path / "two"), metrics(tmp_path / "one"), limit=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-steps", "0"), "max_steps=0: must be 1 or more"),
        (("--data", "rows.jsonl"), "rows.jsonl:2: has none of"),
    ],
)
def test_what_all_ranks_find_wrong_is_said_once(flags, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n{"prompt": "1+2="}\n')
    failed = two("trainer", "--method", "sft", *flags, "--output-dir", tmp_path / "run", cwd=tmp_path)
    assert failed.returncode != 0
    assert failed.stderr.count("error:") == 1 and message in failed.stderr, failed.stderr[-3000:]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_with_what_is_waited_for(tmp_path):
    (tmp_path / "sleepy.py").write_text(
        "import time, torch\n"
        "from trainer.parallel.comm import all_sum, process_group, rank\n"
        "with process_group(4.0):\n"
        "    all_sum(torch.ones(1), 'first')\n"
        "    if rank() == 1:\n"
        "        time.sleep(60)\n"
        "    all_sum(torch.ones(1), 'count of tokens')\n"
    )
    started = time.monotonic()
    done = two("sleepy", cwd=tmp_path, timeout=60, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode != 0 and time.monotonic() - started < 45
    assert "rank 0: has waited 4 s in 'count of tokens' (collective 2)" in done.stderr
    assert "rank 1 is busy elsewhere, its last collective was 'first' (collective 1)" in done.stderr
    assert f"exitcode  : {HUNG}" in done.stderr


SLOW_DISK = """
import sys, time
from trainer.run import checkpoint
from trainer.cli import parse
from trainer.parallel.comm import of_all, process_group, rank
from trainer.run.run import open_run

def slow(path, sha256_of=checkpoint.sha256_of):
    time.sleep(7)
    return sha256_of(path)

checkpoint.sha256_of = slow
_, cfg, _ = parse(["--resume", sys.argv[1]])
with process_group(4.0):
    with open_run(cfg, "sft") as run:
        print("rank", rank(), run.checkpoint.name, flush=True)
    of_all(None, "both have it")
    if rank() == 0:
        (run.checkpoint / "model.safetensors").write_bytes(b"short")
    of_all(None, "now it is damaged")
    try:
        open_run(cfg, "sft")
    except (SystemExit, ValueError) as error:
        print("rank", rank(), type(error).__name__, str(error).split("; ")[0], flush=True)
"""


def test_a_checkpoint_may_take_longer_to_read_than_ranks_wait_for_each_other(tmp_path):
    """Rank 0 reads all of it; what it finds wrong is an error of its own, and the others end with it."""
    run, script = tmp_path / "run", tmp_path / "slow_disk.py"
    rows = ("--data", "task:addition:split=sft,size=64", "--eval-data", "task:addition:split=eval,size=8")
    assert main([*SFT, *rows, "--max-steps", "2", "--output-dir", str(run)]) == 0
    script.write_text(SLOW_DISK)
    done = two_ok("slow_disk", run, cwd=tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 ValueError resume=run/checkpoints: no undamaged checkpoint (1 tried)",
        "rank 0 step-00000002",
        "rank 1 SystemExit 2",
        "rank 1 step-00000002",
    ]


ASLEEP = """
import time, torch
from data.packing import Item, make_batches
from tests.ranks.worker import make_policy
from trainer.parallel.comm import process_group, rank
from trainer.policy.logps import token_logps
from trainer.policy.sharding import ParallelConfig, parallelize, to_device_and_pad
with process_group(4.0):
    policy = parallelize(ParallelConfig(mode="fsdp"), make_policy())
    batches = make_batches([Item([n, 1, 2, 3], [False, True, True, True]) for n in range(3)], max_tokens=4)
    batches = to_device_and_pad(policy, batches)
    for number, mb in enumerate(batches):
        time.sleep(7 if number == 0 else 0)  # all of them compute, for longer than the limit
        token_logps(policy, mb).logp.sum().backward()
        print("done", number, flush=True)
        if number == 1 and rank() == 1:
            time.sleep(300)
"""


@pytest.mark.slow
def test_a_rank_that_does_not_begin_a_pass_is_named_and_long_computing_is_not(tmp_path):
    (tmp_path / "asleep.py").write_text(ASLEEP)
    started = time.monotonic()
    done = two("asleep", cwd=tmp_path, timeout=280, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode != 0 and time.monotonic() - started < 200
    assert done.stdout.count("done 1") == 2 and "done 2" not in done.stdout, done.stderr[-3000:]
    assert "rank 0: has waited 4 s in 'forward and backward of micro-batch 3 of 3'" in done.stderr
    assert f"exitcode  : {HUNG}" in done.stderr


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_the_run_goes_on_from_its_checkpoint(tmp_path):
    run_ok(*SFT, "--per-device-train-batch-size", "16", "--max-steps", "6", "--output-dir", tmp_path / "whole",
           cwd=tmp_path)  # fmt: skip
    command = [*TORCHRUN, "--max-restarts", "1", "-m", "trainer", *SFT, "--per-device-train-batch-size", "8",
               "--max-steps", "6", "--output-dir", str(tmp_path / "run")]  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=log, text=True)
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir():
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.02)
        os.kill(rank_1_of(process.pid), signal.SIGKILL)
        assert process.wait(timeout=180) == 0, (tmp_path / "log").read_text()[-3000:]
    assert "resuming after step" in (tmp_path / "log").read_text()
    alike(metrics(tmp_path / "run"), metrics(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "full"])
def test_rank_that_cannot_finish_its_shard_leaves_the_checkpoint_before(fault, tmp_path):
    """kill -9 and a full disk (a limit on file sizes) on rank 1 of two, in the middle of a save."""
    flags = (*SFT, "--per-device-train-batch-size", "8", "--parallel.mode", "fsdp", "--max-steps", "6")
    two_ok("trainer", *flags, "--output-dir", tmp_path / "whole", cwd=tmp_path)
    failed = two("tests.ranks.faults", fault, *flags, "--output-dir", tmp_path / "run", cwd=tmp_path)
    assert failed.returncode != 0
    if fault == "full":
        assert "step-00000004: could not be written (rank 1: File too large)" in failed.stderr
        assert failed.stderr.count("Traceback") == 1, "that of torchrun"
    found = [(at, find_problem(path)) for at, path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert found == [(2, None)]
    two_ok("trainer", "--resume", tmp_path / "run", cwd=tmp_path)
    assert repeatable(metrics(tmp_path / "run")) == repeatable(metrics(tmp_path / "whole"))
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


def rank_1_of(launcher: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"RANK=1" in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("rank 1 was not found")


def test_long_computing_is_not_waiting_and_a_rank_that_has_not_begun_is(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    told: dict[str, str] = {}
    watch = Watch.__new__(Watch)
    watch.number, watch.passes, watch.at, watch.timeout_s = 7, 0, Place("tokens"), 60.0
    watch.store = SimpleNamespace(get=told.__getitem__, check=lambda keys: all(key in told for key in keys))
    with watch.passing("micro-batch 1"), watch.inside("a statistic of the step"):
        assert (watch.number, watch.passes, watch.at.is_pass) == (8, 0, False)
    with watch.passing("micro-batch 2"):
        assert watch._is_behind(), "it has never said anything"
        for number, passes, age, behind in ((8, 1, 0, False), (8, 0, 0, True), (7, 3, 0, True), (9, 0, 0, False),
                                            (8, 0, 20, False), (8, 0, 90, True)):  # fmt: skip
            told["1"] = json.dumps({"number": number, "passes": passes, "at": time.time() - age})
            assert watch._is_behind() is behind, (number, passes, age)
        with watch.inside("a statistic of the step"):
            pass
        assert watch.at.since is not None and watch.at.is_pass and watch.at.name == "micro-batch 2"
    assert watch.at.since is None


def test_flight_recorder_is_set_up_unless_somebody_has(monkeypatch):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
             "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # fmt: skip
    for name in names:
        monkeypatch.setenv(name, "theirs")
    record_flight()
    assert {os.environ[name] for name in names} == {"theirs"}
    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_PORT", "29500")
    record_flight()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000" and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"].endswith("strop-nccl-29500-rank-")


def test_shares_are_whole_and_even():
    sizes = [5, 1, 9, 3, 3, 7, 2, 2]
    dealt = shares(sizes, 3)
    assert sorted(i for part in dealt for i in part) == list(range(8))
    assert sorted(sum(sizes[i] for i in part) for part in dealt) == [10, 11, 11]
    assert shares([4], 2) == [[0], []] and shares([], 2) == [[], []] and shares(sizes, 1) == [list(range(8))]


@pytest.mark.parametrize(
    ("world", "settings", "message"),
    [
        ("1", {"mode": "fsdp"}, "parallel.mode=fsdp: has no effect with one process; start several with torchrun"),
        ("4", {"shard": 3}, "parallel.shard=3: must divide the 4 processes"),
        ("4", {"mode": "replicate", "cpu_offload": True},
         "parallel.cpu_offload=True: has no effect with parallel.mode=replicate"),
        ("2", {"timeout_s": 0.0}, "parallel.timeout_s=0.0: must be above 0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_take_effect_are_refused(world, settings, message, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ValueError, match=f"^{message}$"):
        ParallelConfig(**settings)
