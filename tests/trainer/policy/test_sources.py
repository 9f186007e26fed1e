"""--revision and --tokenizer: another commit of a model on the hub, and another tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.command.config_file import load_config
from data.show import main as show
from rollout.engines.load import load_model
from trainer.__main__ import main
from trainer.config.blocks import LoraConfig, ModelConfig
from trainer.metrics.card import model_card
from trainer.plan import meta_model
from trainer.policy.heads import load_scorer
from trainer.policy.load import BUILTIN, load_policy, load_tokenizer, model_tensors
from trainer.policy.reference import load_frozen
from trainer.run.export import ExportConfig, dtype_on_disk, export_checkpoint

CPU = torch.device("cpu")
TINY = BUILTIN["builtin:tiny"]
NAME = "some/tiny"
NORM = "model.norm.weight"
COMMITS = {"main": "a" * 40, "v1": "b" * 40}
SFT = ("--method", "sft", "--data", "task:addition:split=sft,size=8", "--max-steps", "1", "--save-steps", "1")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> dict[str, torch.Tensor]:
    """A cache of the hub with two revisions; v1 has other weights, another dtype and another eos token. Returns the
    norm of each."""
    repo = tmp_path / "hub" / "models--some--tiny"
    (repo / "refs").mkdir(parents=True)
    norms = {}
    for ref, commit in COMMITS.items():
        folder = repo / "snapshots" / commit
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "teacher"))
        (repo / "refs" / ref).write_text(commit)
        weights = load_file(folder / "model.safetensors")
        if ref == "v1":
            weights[NORM] = weights[NORM] * 1.5
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
            change(folder / "config.json", dtype="bfloat16", max_position_embeddings=128)
            change(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
        norms[ref] = weights[NORM].float()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(repo.parent))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return norms


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_revision_of_every_file(hub, tmp_path):
    for ref, revision in (("main", None), ("v1", "v1"), ("v1", COMMITS["v1"])):
        cfg = ModelConfig(model=NAME, revision=revision)
        policy = load_policy(cfg, LoraConfig(), CPU, with_reference=True)
        assert torch.equal(policy.model.model.norm.weight, hub[ref]) and policy.revision == revision
        assert torch.equal(policy.reference.model.norm.weight, hub[ref])
        assert (policy.tokenizer.eos_token == "<|endoftext|>") == (ref == "v1")
        assert policy.context_length == (128 if ref == "v1" else 512)
        assert torch.equal(model_tensors(NAME, revision).read(NORM).float(), hub[ref])
        assert dtype_on_disk(NAME, revision) == (torch.bfloat16 if ref == "v1" else torch.float32)
        assert meta_model(NAME, revision).config.max_position_embeddings == policy.context_length
    scorer = load_scorer(ModelConfig(model=NAME, revision="v1"), LoraConfig(), CPU, kind="sequence")
    assert torch.equal(scorer.model.model.norm.weight, hub["v1"])
    same, other = (load_frozen("ref_model", name, cfg, policy, None) for name in (NAME, "builtin:tiny"))
    assert torch.equal(same.model.model.norm.weight, hub["v1"])
    assert torch.equal(other.model.model.norm.weight, hub["main"])
    with pytest.raises(ValueError, match="^revision=v1: .*tiny.*--revision"):
        load_policy(ModelConfig(model="builtin:tiny", revision="v1"), LoraConfig(), CPU, with_reference=False)
    with pytest.raises(ValueError, match=rf"^model={NAME} \(revision=v9\): "):
        load_policy(ModelConfig(model=NAME, revision="v9"), LoraConfig(), CPU, with_reference=False)


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A folder with nothing but a tokenizer: the tiny model's, which ends with another token."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    change(folder / "tokenizer_config.json", eos_token="<|im_start|>")
    return folder


def test_run_records_revision_and_tokenizer(hub, tokenizer, tmp_path):
    """The adapter names its base's revision, with which sampling, exports and later runs load it."""
    run = tmp_path / "run"
    flags = ("--model", NAME, "--revision", "v1", "--tokenizer", str(tokenizer), "--lora.r", "4")
    assert main([*SFT, *flags, "--output-dir", str(run)]) == 0
    assert load_config(run / "config.yaml")["revision"] == "v1"
    for folder in (run / "final", run / "checkpoints" / "step-00000001"):
        settings = json.loads((folder / "adapter_config.json").read_text())
        assert (settings["base_model_name_or_path"], settings["revision"]) == (NAME, "v1")
        assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_start|>"
    assert f"[{NAME}](https://huggingface.co/{NAME}) (revision `v1`)" in model_card(run, "me/model")
    model, loaded = load_model(str(run))
    assert torch.equal(model.get_base_model().model.norm.weight, hub["v1"]) and loaded.eos_token == "<|im_start|>"
    assert meta_model(str(run)).config.max_position_embeddings == 128
    continued = load_policy(ModelConfig(model=str(run)), LoraConfig(r=4), CPU, with_reference=False)
    assert torch.equal(continued.model.get_base_model().model.norm.weight, hub["v1"]) and continued.revision == "v1"
    export_checkpoint(ExportConfig(source=str(run), out=str(tmp_path / "out"), merge_lora=True))
    exported = load_file(tmp_path / "out" / "model.safetensors")[NORM]
    assert exported.dtype == torch.bfloat16 and torch.equal(exported, hub["v1"].bfloat16())


def test_tokenizer_of_another_folder(tokenizer, tmp_path, capsys):
    cfg = ModelConfig(model="builtin:tiny", tokenizer=str(tokenizer), special_tokens={"pad_token": "<|im_end|>"})
    policy = load_policy(cfg, LoraConfig(), CPU, with_reference=False)
    assert (policy.tokenizer.eos_token, policy.tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>")
    policy.tokenizer.add_tokens(["one more"])
    policy.tokenizer.save_pretrained(tmp_path / "larger")
    larger = replace(cfg, tokenizer=str(tmp_path / "larger"))
    for load in (load_policy, load_scorer):
        options = {"with_reference": False} if load is load_policy else {"kind": "token"}
        with pytest.raises(ValueError, match="^tokenizer=.*larger: .* 275.* 275 "):
            load(larger, LoraConfig(), CPU, **options)
    # Another model of the run has its own tokenizer, which must agree with this one.
    policy.tokenizer = load_tokenizer("", larger)
    with pytest.raises(ValueError, match="ref_model=builtin:tiny_teacher: "):
        load_frozen("ref_model", "builtin:tiny_teacher", larger, policy, None)
    for name in ("./no", "no-such/tokenizer"):
        with pytest.raises(ValueError, match=f"^tokenizer={name}: no such folder"):
            load_tokenizer(str(TINY), replace(cfg, tokenizer=name))
    assert show(["--data", "task:addition:split=sft,size=1", "--tokenizer", str(tmp_path / "no")]) == 2
    assert "tokenizer=" in capsys.readouterr().err
