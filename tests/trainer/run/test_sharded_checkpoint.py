"""Checkpoints of a model in shards, written by two processes and read by this one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout.servers.model_folder import resolve_model
from tests.ranks.sharded import everything, optimizer_of, same, take_step
from tests.ranks.worker import make_policy
from tests.test_ranks import two_ok
from trainer.run.checkpoint import find_problem, latest_valid, load_checkpoint


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    assert "all well" in two_ok("tests.ranks.sharded", folder, cwd=folder).stdout
    return folder


@pytest.mark.parametrize("mode", ["fsdp", "copies"])
def test_one_process_goes_on_with_the_same_numbers(saved, mode):
    expected = load_file(saved / f"{mode}.safetensors")
    loss = float(expected.pop("loss"))
    policy = make_policy(tied=False)
    optimizer, schedule = optimizer_of(policy)
    load_checkpoint(saved / mode / "step-00000002", policy.model, optimizer, schedule)
    same(everything(policy, optimizer), expected)
    assert take_step(policy, optimizer, 3) == pytest.approx(loss, rel=1e-12)


def damage(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    "name", ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors", "shards.json"]
)
def test_damaged_shard_is_named(saved, tmp_path, name):
    folder = tmp_path / "step-00000002"
    shutil.copytree(saved / "fsdp" / "step-00000002", folder)
    damage(folder, name)
    assert find_problem(folder) == f"{name} has changed since it was written"
    (folder / name).unlink()
    assert find_problem(folder) == f"{name} is missing"
    newer = folder.rename(tmp_path / "step-00000003")
    shutil.copytree(saved / "fsdp" / "step-00000002", folder)
    said = []
    assert latest_valid(tmp_path, said.append) == folder and newer.name in said[0] and name in said[0]


def test_shards_are_no_model_and_the_error_says_how_to_make_one(saved):
    with pytest.raises(ValueError, match=r"sharded checkpoint; convert it with python -m trainer\.export .* OUT"):
        resolve_model(str(saved / "fsdp" / "step-00000002"))


def test_index_says_where_each_part_is(saved):
    folder = saved / "fsdp" / "step-00000002"
    index = json.loads((folder / "shards.json").read_text())
    uneven = index["weights/model.embed_tokens.weight"]  # 29 rows
    assert (uneven["shape"], uneven["dtype"]) == ([29, 8], "F64")
    assert [(part["start"], part["shape"]) for part in uneven["parts"]] == [([0, 0], [15, 8]), ([15, 0], [14, 8])]
    assert index["moments/model.embed_tokens.weight.step"]["shape"] == []
    second = load_file(folder / "shard-00001-of-00002.safetensors")
    whole = load_file(saved / "fsdp.safetensors")["weights/model.embed_tokens.weight"]
    assert torch.equal(second["weights/model.embed_tokens.weight"], whole[15:])
