from __future__ import annotations

import errno
import json
import multiprocessing
import random
import resource
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config.blocks import OptimConfig
from trainer.files.atomic_folder import remove_leftovers
from trainer.policy import offload
from trainer.policy.adapters import freeze_except
from trainer.policy.optim import build_optimizer
from trainer.run import checkpoint
from trainer.run import checkpoint as saver
from trainer.run.checkpoint import (
    find_problem,
    latest_valid,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    set_aside_after,
)


def tiny_llama(tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=tied, attention_dropout=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.3, target_modules="all-linear", task_type="CAUSAL_LM"))


def a_part(model: nn.Module, *patterns: str) -> nn.Module:
    freeze_except(model, patterns or ("model.layers.1", "model.norm"))
    return model


def optimizer_of(model: nn.Module, lr: float = 1e-2) -> tuple[AdamW, LambdaLR]:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1}]
    groups += [{"params": rest, "weight_decay": 0.0}] if (rest := [p for p in trained if p.ndim < 2]) else []
    optimizer = AdamW(groups, lr=lr)
    return optimizer, LambdaLR(optimizer, lambda step: (step + 1) / (step + 3))


def train(model: nn.Module, optimizer: AdamW, schedule: LambdaLR, steps: int) -> list[float]:
    """Take steps that draw from all three generators, including for dropout."""
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 40, (2, 8)) + random.randrange(1) + int(np.random.randint(1))
        loss = model(input_ids=ids, labels=ids).loss * (1 + 0.1 * random.random() + 0.1 * np.random.normal())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
    return losses


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def save(folder: Path, step: int, model: nn.Module | None = None, keep: int = 9, state: dict | None = None) -> Path:
    model = model or nn.Linear(2, 3)
    optimizer, schedule = optimizer_of(model)
    return save_checkpoint(folder, step, model, optimizer, schedule, state or {}, keep=keep)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch warns once on a CPU without bfloat16 matmuls
@pytest.mark.parametrize(
    "build",
    [
        lambda: tiny_llama(tied=True),
        lambda: tiny_llama(tied=False, dtype=torch.bfloat16),
        lambda: with_lora(tiny_llama(dtype=torch.float64)),
        lambda: a_part(tiny_llama()),
    ],
    ids=["tied", "untied bfloat16", "lora float64", "a part"],
)
def test_resumed_training_is_bit_identical(tmp_path, build):
    model = build()
    optimizer, schedule = optimizer_of(model)
    seed_all(3)
    train(model, optimizer, schedule, 3)
    state = {"loader": {"position": [1, 2.5, None]}, "counters": {"tokens": 10**15 + 1, "inf": float("inf")}}
    folder = save_checkpoint(tmp_path, 3, model, optimizer, schedule, state, keep=2)
    unbroken = train(model, optimizer, schedule, 3)

    other = build()
    other_optimizer, other_schedule = optimizer_of(other)
    seed_all(99)
    train(other, other_optimizer, other_schedule, 1)  # earlier state must not matter
    loaded = load_checkpoint(folder, other, other_optimizer, other_schedule)
    assert loaded == {"step": 3, "run": state, "tensors": {}}
    assert train(other, other_optimizer, other_schedule, 3) == unbroken
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    for group, other_group in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
        assert group["lr"] == other_group["lr"]
        for a, b in zip(group["params"], other_group["params"], strict=True):
            ours, theirs = optimizer.state[a], other_optimizer.state[b]
            assert ours.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
            assert all(torch.equal(ours[k], theirs[k]) and ours[k].dtype == theirs[k].dtype for k in ours)
    assert schedule.get_last_lr() == other_schedule.get_last_lr()
    assert schedule.last_epoch == other_schedule.last_epoch == 6


def test_restored_embedding_is_still_tied(tmp_path):
    folder = save(tmp_path, 1, tiny_llama(seed=4))
    model = tiny_llama(seed=5)
    load_checkpoint(folder, model, *optimizer_of(model))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tiny_llama(seed=4).lm_head.weight)


def test_lora_checkpoint_contains_only_the_adapter(tmp_path):
    from safetensors import safe_open

    folder = save(tmp_path, 1, with_lora(tiny_llama()))
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    assert len(names) == 2 * 7 * 2 and all("lora_" in name for name in names)


def test_checkpoint_of_a_part_is_a_whole_model_and_resumes_with_another_part(tmp_path):
    """The frozen weights that are read come from the checkpoint, not from the model."""
    model = a_part(tiny_llama())
    optimizer, schedule = optimizer_of(model)
    train(model, optimizer, schedule, 1)
    folder = save_checkpoint(tmp_path, 1, model, optimizer, schedule, {}, keep=1)
    names = {name for name, _ in model.named_parameters()}
    assert load_file(folder / "model.safetensors").keys() == names
    moments = {name.rpartition(".")[0] for name in load_file(folder / "optimizer.safetensors")}
    assert moments == {name for name in names if name.startswith(("model.layers.1.", "model.norm."))}
    other = a_part(tiny_llama(), "model.norm", "model.embed_tokens")
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.zero_()
    other_optimizer, other_schedule = optimizer_of(other)
    load_checkpoint(folder, other, other_optimizer, other_schedule)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert list(other_optimizer.state) == [other.model.norm.weight]
    train(other, other_optimizer, other_schedule, 1)


def test_learning_rate_changed_at_resume_takes_effect(tmp_path):
    model = nn.Linear(2, 2)
    optimizer, schedule = optimizer_of(model, lr=1e-2)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    folder = save_checkpoint(tmp_path, 4, model, optimizer, schedule, {}, keep=1)
    optimizer, schedule = optimizer_of(model, lr=1e-3)
    load_checkpoint(folder, model, optimizer, schedule)
    assert optimizer.param_groups[0]["lr"] == 1e-3 * 5 / 7 == schedule.get_last_lr()[0]


def test_parameter_without_gradient_has_no_moments(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer, schedule = optimizer_of(model)
    model["a"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    folder = save_checkpoint(tmp_path, 1, model, optimizer, schedule, {}, keep=1)
    load_checkpoint(folder, model, optimizer, schedule)
    assert set(optimizer.state) == set(model["a"].parameters())


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 2, 30, 4000):
        save(tmp_path, step, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [30, 4000]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000030", "step-00004000"]


def test_a_save_waits_for_the_previous_save_before_copying(tmp_path, monkeypatch):
    """At most one copy may be in main memory."""
    model, behind = nn.Linear(2, 3), saver.Saver()
    optimizer, schedule = optimizer_of(model)
    write, copy, may_write, under_way = saver.write_tensors, checkpoint._snapshot, threading.Event(), []
    monkeypatch.setattr(saver, "write_tensors", lambda *args: may_write.wait(9) and write(*args))
    monkeypatch.setattr(checkpoint, "_snapshot", lambda *a, **b: under_way.append(behind._save) or copy(*a, **b))
    save_checkpoint(tmp_path, 1, model, optimizer, schedule, {}, keep=2, saver=behind)
    assert behind._save is not None
    threading.Timer(0.05, may_write.set).start()
    save_checkpoint(tmp_path, 2, model, optimizer, schedule, {}, keep=2, saver=behind)
    behind.wait()
    assert under_way == [None, None] and [step for step, _ in list_checkpoints(tmp_path)] == [1, 2]


@pytest.fixture
def slab_saver(monkeypatch) -> saver.Saver:
    """Return a saver that copies CPU tensors like GPU tensors, in small slabs."""
    for module in (offload, checkpoint):
        monkeypatch.setattr(module, "SLAB", 640)
    monkeypatch.setattr(checkpoint, "is_copied_async", lambda tensor: True)
    made = saver.Saver()
    made._slabs.give_back(made._slabs.take(300 * 640))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_in_slabs_are_saved(tmp_path, slab_saver, dtype, monkeypatch):
    model = tiny_llama(dtype=dtype)
    optimizer, schedule = optimizer_of(model)
    train(model, optimizer, schedule, 2)
    more = {"odd": torch.arange(7, dtype=torch.uint8), "none": torch.zeros(0), "one": torch.tensor(3.0).double()}
    more["turned"] = torch.arange(6.0).view(2, 3).T
    count, taken = slab_saver._slabs.count, []
    take = slab_saver._slabs.take
    monkeypatch.setattr(slab_saver._slabs, "take", lambda size: (taken.append(size), take(size))[1])
    for step in (2, 3):
        save_checkpoint(tmp_path, 0, model, optimizer, schedule, {}, keep=9, tensors=more)
        save_checkpoint(tmp_path, step, model, optimizer, schedule, {}, keep=9, tensors=more, saver=slab_saver)
        train(model, optimizer, schedule, 1)  # changes everything in place while the thread writes
        slab_saver.wait()
        for name in ("model.safetensors", "optimizer.safetensors", "extra.safetensors"):
            files = [tmp_path / f"step-{at:08d}" / name for at in (0, step)]
            assert files[0].read_bytes() == files[1].read_bytes(), name
        assert slab_saver._slabs.count == len(slab_saver._slabs.free) == count  # reused
    weights = sum(p.nbytes for p in model.parameters())
    assert 2 * 3 * weights / 640 <= len(taken) <= 2 * 3 * weights / 640 + 50  # with two moments, twice
    assert find_problem(tmp_path / "step-00000003") is None


def test_tensors_over_the_pin_limit_are_copied_synchronously(tmp_path, monkeypatch, slab_saver):
    model = tiny_llama()
    optimizer, schedule = optimizer_of(model)
    slab_saver._slabs.free = slab_saver._slabs.free[:5]
    slab_saver._slabs.count = 5
    save_checkpoint(tmp_path, 0, model, optimizer, schedule, {}, keep=9)
    save_checkpoint(tmp_path, 1, model, optimizer, schedule, {}, keep=9, saver=slab_saver)
    train(model, optimizer, schedule, 1)
    slab_saver.wait()
    files = [tmp_path / f"step-{at:08d}" / "model.safetensors" for at in (0, 1)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert slab_saver._slabs.count == len(slab_saver._slabs.free) == 5


def test_a_container_limits_pinned_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "CONTAINER", (str(tmp_path / "limit"), str(tmp_path / "none")))
    whole = checkpoint.main_memory()
    for written, meant in (("max", whole), (str(2**70), whole), (str(2**20), 2**20)):
        (tmp_path / "limit").write_text(f"{written}\n")
        assert checkpoint.main_memory() == meant
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert checkpoint.locked_share() == 2**20 / 8


def test_a_failed_save_releases_its_slabs(tmp_path, monkeypatch, slab_saver):
    model = tiny_llama()
    optimizer, schedule = optimizer_of(model)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saver, "write_tensors", full)
    save_checkpoint(tmp_path, 1, model, optimizer, schedule, {}, keep=9, saver=slab_saver)
    with pytest.raises(ValueError, match="No space left"):
        slab_saver.wait()
    assert len(slab_saver._slabs.free) == 300
    with pytest.raises(ValueError, match="No space left"):
        save_checkpoint(tmp_path, 1, model, optimizer, schedule, {}, keep=9, saver=slab_saver, describe=full)
    assert len(slab_saver._slabs.free) == 300


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_next_step_waits_for_the_copy_without_a_host_sync(tmp_path, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16))).to("cuda", dtype)  # 1 GiB, or half
    optimizer, schedule = build_optimizer(model, OptimConfig(learning_rate=0.1), 9)
    behind = saver.Saver()

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    step()
    for at in (1, 2, 3):
        want = {name: value.clone() for name, value in model.state_dict().items()}
        moment = optimizer.state[model[15].weight]["exp_avg_sq"].clone()
        torch.cuda.synchronize()
        started = time.perf_counter()
        save_checkpoint(tmp_path, at, model, optimizer, schedule, {}, keep=1, saver=behind)
        took = time.perf_counter() - started
        step()  # immediately, in place
        torch.cuda.synchronize()
        updated = time.perf_counter() - started
        behind.wait()
        print(f"save {at}: {1000 * took:.0f} ms for the host, {1000 * updated:.0f} ms until the next update is over")
        stored = checkpoint.stored_tensors(tmp_path / f"step-{at:08d}")
        for name, value in want.items():
            assert torch.equal(stored.read(f"weights/{name}"), value.cpu()), (at, name)
        assert torch.equal(stored.read("moments/15.weight.exp_avg_sq"), moment.cpu())
    assert behind._slabs.is_locked and behind._slabs.count == len(behind._slabs.free)
    assert took < 0.2, took  # the third save; 3 GiB to plain memory would take longer


def test_parts_of_two_dtypes_are_read_in_the_wider_one(tmp_path):
    """Like moments with one shard in 8 bits and another too small for that."""
    exact = torch.tensor([[1.0], [1 / 3]])
    first = saver.Shard(exact[:1].bfloat16(), (0, 0), (2, 1))
    save = saver.Save(tmp_path / "step-00000001", saver.Snapshot(shards={"moments/x": first}), lambda: None)
    assert save.prepare(lambda folder: None) is None
    save.writers = [0, 1]
    other, part = "shard-00001-of-00002.safetensors", {"moments/x": exact[1:]}
    sums = save._write_file(other, part)
    record = saver.Record((2, 1), torch.float32, [saver.Part(other, "moments/x", (1, 0), (1, 1))])
    told = {"files": {other: sums}, "tensors": saver.records_to_json({"moments/x": record})}
    save._note(1).write_text(json.dumps(told))
    save._write()
    assert torch.equal(checkpoint.stored_tensors(save.target).read("moments/x"), exact)


def test_later_leftovers_do_not_delete_a_new_checkpoint(tmp_path):
    save(tmp_path, 40)
    save(tmp_path, 30, keep=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [30, 40]


def test_later_checkpoints_are_renamed(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    logged = []
    set_aside_after(tmp_path, 10, logged.append)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10]
    assert (tmp_path / "step-00000020.old" / "manifest.json").exists() and len(logged) == 2
    save(tmp_path, 20)
    set_aside_after(tmp_path, 10, logged.append)  # replaces an earlier renamed checkpoint
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10]


def damage_truncate(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def damage_flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


DAMAGE = {
    "truncated": damage_truncate,
    "flipped": damage_flip,
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": lambda folder: (folder / "manifest.json").write_text(""),
    "manifest not utf-8": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe{"),
    "manifest a list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "manifest without files": lambda folder: (folder / "manifest.json").write_text('{"format": 1}'),
    "manifest of another format": lambda folder: (folder / "manifest.json").write_text('{"format": 2, "files": {}}'),
    "file missing": lambda folder: (folder / "rng.safetensors").unlink(),
    "state edited": lambda folder: (folder / "state.json").write_text("{}"),
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
}


def test_a_damaged_checkpoint_is_logged_and_skipped(tmp_path):
    whole, good, bad = save(tmp_path / "whole", 40), save(tmp_path, 20), tmp_path / "step-00000040"
    model = nn.Linear(2, 3)
    for name, damage in DAMAGE.items():
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(whole, bad)
        damage(bad)
        logged = []
        assert latest_valid(tmp_path, logged.append) == good, name
        assert len(logged) == 1 and "step-00000040 is damaged" in logged[0], name
        with pytest.raises(ValueError, match="damaged"):
            load_checkpoint(bad, model, *optimizer_of(model))
    damage_flip(good)
    with pytest.raises(ValueError, match=r"no undamaged checkpoint \(2 tried\)"):
        latest_valid(tmp_path, logged.append)


def test_any_flipped_manifest_byte_is_noticed_or_harmless(tmp_path):
    folder = save(tmp_path, 1)
    whole = (folder / "manifest.json").read_bytes()
    for position in range(0, len(whole), 3):
        data = bytearray(whole)
        data[position] ^= 1
        (folder / "manifest.json").write_bytes(data)
        if find_problem(folder) is None:
            assert json.loads(bytes(data)) == json.loads(whole), position


def test_half_written_folder_is_not_a_checkpoint(tmp_path):
    good = save(tmp_path, 20)
    (tmp_path / ".tmp-step-00000040-123").mkdir()
    (tmp_path / ".tmp-step-00000040-123" / "model.safetensors").write_bytes(b"half")
    assert latest_valid(tmp_path, pytest.fail) == good
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000020"]


def test_no_checkpoint_at_all_is_none(tmp_path):
    assert latest_valid(tmp_path / "nowhere", pytest.fail) is None
    assert latest_valid(tmp_path, pytest.fail) is None


def test_latest_valid_up_to_an_earlier_step(tmp_path):
    folders = [save(tmp_path, step) for step in (10, 20, 30)]
    assert latest_valid(tmp_path, pytest.fail, at_most=20) == folders[1]


def test_another_model_is_an_error_and_stays_unchanged(tmp_path):
    linear, llama = nn.Linear(2, 3), tiny_llama()
    for step, (saved, here, words) in enumerate((
        (linear, nn.Linear(2, 4), r"bias is \(3,\) float32 .* \(4,\) float32"),
        (linear, nn.Linear(2, 3, bias=False), "bias is not trained here; 1 differences"),
        (nn.Linear(2, 3, bias=False), linear, "bias is missing"),
        (linear, nn.Linear(2, 3).bfloat16(), "bias is .* float32 .* bfloat16"),
        (llama, with_lora(tiny_llama()), "base_model.* is missing"),
    )):  # fmt: skip
        folder = save(tmp_path, step, saved)
        before = [p.clone() for p in here.parameters()]
        with pytest.raises(ValueError, match=words) as caught:
            load_checkpoint(folder, here, *optimizer_of(here))
        assert "\n" not in str(caught.value)
        assert all(torch.equal(a, b) for a, b in zip(before, here.parameters(), strict=True)), words


def test_state_that_is_not_json_is_an_error(tmp_path):
    for state, words in (
        ({"rewards": {"best": torch.ones(1)}}, "state_dict of rewards: contains a Tensor"),
        ({"rewards": {"seen": {3: 1}}}, "state_dict of rewards: contains the key 3"),
        ({"loader": [{"order": (1, 2)}]}, "state_dict of loader: contains a tuple"),
        ({"counters": np.float64(1.0)}, "state_dict of counters: contains a float64"),
    ):
        with pytest.raises(ValueError, match=words):
            save(tmp_path, 1, state=state)
    assert list(tmp_path.iterdir()) == []


def test_disk_full_leaves_earlier_checkpoints_and_no_temporary_files(tmp_path, monkeypatch):
    good = save(tmp_path, 20)

    def full(path, *args):
        path.write_bytes(b"half of it")
        if path.name == "optimizer.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(b"half of it"), "its sha256"

    monkeypatch.setattr(saver, "write_tensors", full)
    with pytest.raises(ValueError, match=r"step-00000040: could not be written \(No space left on device\)") as caught:
        save(tmp_path, 40)
    assert "\n" not in str(caught.value) and caught.value.__context__ is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000020"]
    assert find_problem(good) is None


def test_real_write_limit_leaves_earlier_checkpoints_and_no_temporary_files(tmp_path):
    good = save(tmp_path, 20, nn.Linear(100, 100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(ValueError, match="^checkpoint=.*File too large"):
            save(tmp_path, 40, nn.Linear(100, 100), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000020"]
    assert find_problem(good) is None


def save_without_end(folder: Path) -> None:
    model = nn.Linear(300, 300)
    for step in range(1, 100_000):
        nn.init.constant_(model.bias, step)
        save(folder, step, model, keep=2, state={"step": step})


def test_kill_during_saves_always_leaves_a_loadable_checkpoint(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=save_without_end, args=(tmp_path,), daemon=True)
    process.start()
    while not list_checkpoints(tmp_path):
        time.sleep(0.01)
    process.join(random.Random(0).uniform(0.2, 0.6))
    assert process.is_alive()
    process.kill()
    process.join()
    folder = latest_valid(tmp_path, pytest.fail)
    model = nn.Linear(300, 300)
    loaded = load_checkpoint(folder, model, *optimizer_of(model))
    assert loaded["run"] == {"step": loaded["step"]} and loaded["step"] >= 1
    assert torch.equal(model.bias, torch.full((300,), float(loaded["step"])))
