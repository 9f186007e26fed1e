"""The receiving side of a weight sync without vLLM: real links and buckets, collected in a dict."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rollout.servers.worker import strop_wire
from rollout.sync.base import TensorSpec

CPU = torch.device("cpu")


@dataclass
class Source:
    """A weight source over a dict of tensors."""

    weights: dict[str, Tensor]
    dtype: torch.dtype = torch.float32
    is_lora: bool = False

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, tuple(tensor.shape), self.dtype) for name, tensor in self.weights.items()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.items():
            yield name, tensor.to(self.dtype)

    def save_adapter(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"r": 1}))


def random_source(seed: int = 0, count: int = 9, dtype: torch.dtype = torch.float32) -> Source:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3 + i, 7) if i % 2 else (5 * i + 1,) for i in range(count)]
    return Source({f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}, dtype)


@dataclass
class Receiver:
    """A server whose workers store the received weights; `on_piece(worker, index)` may be slow or raise."""

    workers: int = 1
    url: str = "http://127.0.0.1:1"
    on_piece: Callable[[int, int], None] = lambda worker, index: None
    links: dict[int, Any] = field(default_factory=dict)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    joins: int = 0
    prefix: str | None = None

    def __post_init__(self) -> None:
        self.info = SimpleNamespace(workers=self.workers, device_uuids=(), lora=False, extension=True)
        self.weights = [{} for _ in range(self.workers)]
        self.busy = [threading.Lock() for _ in range(self.workers)]

    async def rpc(self, method: str, *, timeout: float, **kwargs: Any) -> list[dict[str, Any]]:
        def call(rank: int) -> dict[str, Any]:
            with self.busy[rank]:  # one call at a time, as in a real worker
                try:
                    return getattr(self, method)(rank, **kwargs)
                except strop_wire.PeerError as error:
                    return {"error": str(error), "peer": True, "rank": rank}

        return list(await asyncio.gather(*(asyncio.to_thread(call, rank) for rank in range(self.workers))))

    def strop_info(self, rank: int) -> dict[str, Any]:
        return {"link": self.links[rank].prefix if rank in self.links else None}

    def strop_join(self, rank: int, link: dict[str, Any]) -> dict[str, Any]:
        self.joins += rank == 0
        self.links[rank] = strop_wire.join(rank=rank, device=CPU, **link)
        return {"rank": rank}

    def strop_receive(self, rank: int, plan: dict[str, Any]) -> dict[str, Any]:
        assert json.loads(json.dumps(plan)) == plan
        num_bytes = 0
        try:
            for index, piece in enumerate(self.links[rank].receive(plan)):
                self.on_piece(rank, index)
                assert bool(piece.matches), f"bucket {index}: wrong checksum"
                self.weights[rank].update({name: tensor.clone() for name, tensor in piece.tensors})
                num_bytes += piece.num_bytes
                piece.release()
        except Exception as error:
            self.links.pop(rank).close()
            return {"error": str(error), "peer": getattr(error, "strop_peer", False), "rank": rank}
        return {"version": plan["version"], "bytes": num_bytes, "rank": rank, "phases": {"load": 0.25}}


def slow(seconds: float) -> Callable[[int, int], None]:
    return lambda worker, index: time.sleep(seconds)


def fails_at(bucket: int) -> Callable[[int, int], None]:
    def on_piece(worker: int, index: int) -> None:
        if index == bucket:
            raise ValueError(f"could not load bucket {bucket}")

    return on_piece
