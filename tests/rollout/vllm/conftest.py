"""Two real vLLM servers for all tests of this folder: the tiny model (tied, with LoRA), and an untied copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rollout.servers.command import device_of, find_python
from rollout.servers.launch import Launched, launch, wait_ready
from rollout.servers.options import VllmConfig

HERE = Path(__file__).parent
TINY = HERE.parents[2] / "trainer" / "tiny"
LENGTH = 256


@dataclass(frozen=True)
class Server:
    """A running server, and the folder of the weights it was started with."""

    launched: Launched
    model_folder: Path

    @property
    def url(self) -> str:
        return self.launched.url

    @property
    def token(self) -> str:
        assert self.launched.token
        return self.launched.token

    @property
    def headers(self) -> dict[str, str]:
        return self.launched.headers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM, or a skip."""
    try:
        return find_python(VllmConfig())
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tied: a copy of the tiny model; untied: the same with a head of its own, far from the embedding."""
    import torch
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("models")
    folders = {name: root / name for name in ("tied", "untied")}
    for folder in folders.values():
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    head = model.get_input_embeddings().weight.detach().clone()
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head + head.std() * noise)
    model.save_pretrained(folders["untied"])
    return folders


@pytest.fixture(scope="session")
def _servers(
    vllm_python: str, model_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """Both at once: most of a start is imports, and two cores do two of them in little more time than one."""
    logs = tmp_path_factory.mktemp("vllm_logs")
    device = device_of(vllm_python)
    shared = {"devices": (0, 0), "gpu_memory_utilization": 0.1} if device == "cuda" else {}
    cfg = VllmConfig(replicas=2, max_model_len=LENGTH, dtype="float32", **shared)
    servers: dict[str, Server] = {}
    try:
        for i, (name, folder) in enumerate(model_folders.items()):
            rank = 8 if name == "tied" else 0
            own = replace(cfg, log_stats=name == "untied")  # with what vLLM counts, and without
            started = launch(own, model=str(folder), lora_rank=rank, log_dir=logs, replica=i, device=device)
            servers[name] = Server(started, folder)
        wait_ready([server.launched for server in servers.values()], cfg.startup_timeout)
        yield servers
    finally:
        for server in servers.values():
            server.launched.stop()


@pytest.fixture(scope="session")
def tied_server(_servers: dict[str, Server]) -> Server:
    """Embedding and head are one tensor; adapters up to rank 8 can be loaded."""
    return _servers["tied"]


@pytest.fixture(scope="session")
def untied_server(_servers: dict[str, Server]) -> Server:
    """Embedding and head differ; no adapters."""
    return _servers["untied"]
