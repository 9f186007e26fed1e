"""Weight sync without a server: buckets, links over gloo and shared memory, folders, choice of backend."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rollout.servers.loop import Loop
from rollout.servers.worker import strop_wire
from rollout.sync import filesystem as folder_module
from rollout.sync.base import SyncError, TensorSpec, make_buckets, time_limit
from rollout.sync.choose import host_for, pick_backend, wants_adapters
from rollout.sync.filesystem import FilesystemSync, WeightFolder, make_file, write_files
from rollout.sync.ipc import IpcSync, check_allocator
from rollout.sync.lora import LoraSync
from rollout.sync.process_group import ProcessGroupSync
from tests.rollout.sync.receiver import CPU, Receiver, Source, fails_at, random_source, slow

LINKS = {"process_group": ProcessGroupSync, "ipc": IpcSync}


@pytest.fixture(scope="module")
def loop():
    loop = Loop()
    yield loop
    loop.close()


def assert_received(server: Receiver, source: Source, worker: int = 0) -> None:
    received = server.weights[worker]
    assert received.keys() == source.weights.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in source.tensors())


@pytest.fixture(params=LINKS)
def make_sync(request, loop):
    """make_sync(source): a sync over a link, with several small buckets."""
    syncs = []

    def make(source, bucket_bytes=256):
        syncs.append(LINKS[request.param](source, loop, device=CPU, bucket_bytes=bucket_bytes))
        return syncs[-1]

    yield make
    for sync in syncs:
        sync.close()


def specs_of(*sizes: int) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", (n,), torch.float32) for i, n in enumerate(sizes)]


def test_buckets_are_ordered_and_aligned_and_a_large_tensor_is_alone():
    buckets = make_buckets(specs_of(3, 4, 100, 1, 1), max_bytes=64)
    assert [[(t[0], t[3]) for t in bucket["tensors"]] for bucket in buckets] == [
        [("t0", 0), ("t1", 16)],  # 12 bytes rounded up to 16
        [("t2", 0)],
        [("t3", 0), ("t4", 16)],
    ]
    assert [bucket["size"] for bucket in buckets] == [32, 400, 32]


def test_buckets_store_mixed_dtypes():
    specs = [
        TensorSpec("a", (3,), torch.bfloat16),
        TensorSpec("b", (2, 2), torch.float32),
        TensorSpec("c", (), torch.int64),
    ]
    (bucket,) = make_buckets(specs, 1000)
    buffer = torch.zeros(bucket["size"] + strop_wire.SUM_BYTES, dtype=torch.uint8)
    views = dict(strop_wire.views(bucket, buffer))
    views["a"].copy_(torch.tensor([1.0, 2.0, 3.0]))
    views["b"].fill_(4.0)
    views["c"].fill_(5)
    copies = dict(strop_wire.views(bucket, buffer.clone()))
    assert copies["a"].tolist() == [1.0, 2.0, 3.0] and copies["c"].item() == 5
    assert copies["b"].tolist() == [[4.0, 4.0], [4.0, 4.0]]


def test_the_checksum_detects_a_flipped_bit_and_swapped_blocks():
    data = torch.randint(0, 256, (4 * strop_wire.BLOCK * 3 + 16,), dtype=torch.uint8)
    expected = strop_wire.checksum(data)
    flipped, swapped, block = data.clone(), data.clone(), 4 * strop_wire.BLOCK
    flipped[7] ^= 1
    swapped[:block], swapped[block : 2 * block] = data[block : 2 * block], data[:block]
    assert strop_wire.checksum(data.clone()) == expected
    assert strop_wire.checksum(flipped) != expected and strop_wire.checksum(swapped) != expected


def test_the_transfer_timeout_is_60_s_plus_2_s_per_gb():
    assert time_limit(0) == 60.0 and time_limit(10**9) == 62.0


def test_the_store_listens_only_on_the_given_address():
    store, port = strop_wire.new_store("127.0.0.1", "p", "secret", 5.0)
    store.set("a")
    assert store.has(["a"]) and not store.has(["a", "b"])
    with socket.socket() as other, pytest.raises(OSError):
        other.connect(("127.0.0.2", port))


def test_another_process_can_list_the_store_keys_but_not_forge_one():
    store, port = strop_wire.new_store("127.0.0.1", "p", "secret", 5.0)
    store.set("0/ready/0")
    stranger = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    (listed,) = stranger.list_keys()
    assert "ready" not in listed
    stranger.set("p/0/ready/1", b"1")
    stranger.set(f"p/{strop_wire.code('guess', b'key', b'0/ready/1').hex()}", b"1")
    assert store.has(["0/ready/0"]) and not store.has(["0/ready/1"])


def test_a_process_without_the_secret_gets_no_weights(loop):
    class Intruder(Receiver):
        """Knows the address and prefix, and enters the group after the worker has announced itself."""

        def strop_join(self, rank, link):
            tcp = dist.TCPStore(link["host"], link["port"], None, False, wait_for_workers=False)
            strop_wire.Store(tcp, link["prefix"], link["secret"]).set("here/1")
            return super().strop_join(rank, {**link, "secret": "guess"})

    server = Intruder()
    sync = ProcessGroupSync(random_source(), loop, device=CPU, bucket_bytes=256)
    started = time.monotonic()
    with pytest.raises(SyncError, match=r"rank [01] .*secret"):
        sync.push([server], 1)
    assert server.weights == [{}] and time.monotonic() - started < 20
    sync.close()


def test_every_worker_of_every_server_gets_every_weight(make_sync):
    source = random_source(dtype=torch.bfloat16)
    servers = [Receiver(workers=2), Receiver(workers=1)]
    sync = make_sync(source)
    for version in (1, 2):
        source.weights.update(random_source(seed=version).weights)
        report = sync.push(servers, version)
        for server, worker in ((servers[0], 0), (servers[0], 1), (servers[1], 0)):
            assert_received(server, source, worker)
    assert [server.joins for server in servers] == [1, 1]  # the link is reused
    assert report.version == 2 and report.phases["server_load"] == 0.25
    assert report.num_bytes == sum(-(-spec.num_bytes // 16) * 16 for spec in source.specs())


def test_a_slow_reader_never_sees_an_overwritten_buffer(make_sync):
    """The reader pauses before each bucket, so an unsynchronized sender could run two buckets ahead."""
    source = random_source(count=15)
    server = Receiver(on_piece=slow(0.03))
    make_sync(source, bucket_bytes=64).push([server], 1)
    assert_received(server, source)


def test_without_servers_the_sending_side_runs_alone(make_sync):
    report = make_sync(random_source()).push([], 3)
    assert report.version == 3 and report.num_bytes > 0


def test_a_failed_worker_is_reported_and_a_retry_succeeds(make_sync):
    source = random_source(count=15)
    servers = [Receiver(), Receiver(on_piece=fails_at(3)), Receiver()]
    sync = make_sync(source, bucket_bytes=64)
    started = time.monotonic()
    with pytest.raises(SyncError, match="server 1: .*could not load bucket 3") as caught:
        sync.push(servers, 1)
    assert caught.value.failed.keys() == {1}
    assert time.monotonic() - started < 30
    servers[1].on_piece = slow(0)
    sync.push(servers, 1)
    for server in servers:
        assert_received(server, source)
    assert [server.joins for server in servers] == [2, 2, 2]


def test_a_server_that_is_gone_during_the_join_is_reported(make_sync):
    class Gone(Receiver):
        def strop_join(self, rank, link):
            raise ConnectionError("connection refused")

    started = time.monotonic()
    with pytest.raises(SyncError, match="server 1: connection refused") as caught:
        make_sync(random_source()).push([Receiver(), Gone()], 1)
    assert caught.value.failed.keys() == {1}
    assert time.monotonic() - started < 30  # the other server does not wait for it in the group


def test_new_or_restarted_servers_need_a_new_link(make_sync):
    first, second = Receiver(), Receiver()
    sync = make_sync(random_source())
    sync.push([first], 1)
    sync.push([first, second], 2)
    assert (first.joins, second.joins) == (2, 1)
    second.links.clear()  # restarted
    sync.push([first, second], 3)
    assert (first.joins, second.joins) == (3, 2)


def test_a_worker_that_reports_wrong_bytes_is_rejected(make_sync):
    class Forgetful(Receiver):
        def strop_receive(self, rank, plan):
            return {**super().strop_receive(rank, plan), "bytes": 1}

    with pytest.raises(SyncError, match="version 1 and 1 bytes"):
        make_sync(random_source()).push([Forgetful()], 1)


def test_ipc_leaves_no_file(loop, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)  # no /dev/shm here
    sync = IpcSync(random_source(), loop, device=CPU, bucket_bytes=256)
    sync.push([Receiver()], 1)
    assert list(tmp_path.iterdir()) == []
    sync.close()


def test_ipc_rejects_expandable_segments(monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments: True")
        with pytest.raises(ValueError, match=f"{name}=.*expandable_segments"):
            check_allocator()
        monkeypatch.setenv(name, "expandable_segments:False")
        check_allocator()


def test_files_store_mixed_dtypes(tmp_path):
    tensors = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": torch.arange(2),
        "c": torch.full((), 7.0),
        "d": torch.ones(0, 4),
    }
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    files = [make_file(tmp_path, i, bucket) for i, bucket in enumerate(make_buckets(specs, 1000))]
    write_files(files, iter(tensors.items()), None)
    loaded = load_file(tmp_path / "model-00001.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], x) and loaded[name].dtype == x.dtype for name, x in tensors.items())


class Reader(Receiver):
    """A server that loads files instead of buckets."""

    def strop_reload(self, rank, path, version):
        tensors = {name: t for file in sorted(Path(path).iterdir()) for name, t in load_file(file).items()}
        self.weights[rank] = tensors
        return {"version": version, "bytes": sum(tensor.nbytes for tensor in tensors.values()), "rank": rank}


def test_the_folder_contains_only_the_newest_version_and_is_deleted_at_the_end(loop, tmp_path):
    source, server = random_source(), Reader()
    sync = FilesystemSync(source, loop, folder=str(tmp_path), bucket_bytes=128)
    for version in (1, 2, 3):
        sync.push([server], version)
        names = sorted(path.name for path in sync.folder.path.iterdir())
        assert names == ["owner.lock", f"v{version:06d}"]
    assert_received(server, source)
    sync.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_leaves_no_partial_file(loop, tmp_path, monkeypatch):
    source, server = random_source(), Reader()
    sync = FilesystemSync(source, loop, folder=str(tmp_path), bucket_bytes=128)
    calls = []

    def full(*_):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ValueError, match="sync.folder=.*not enough space.*--sync.folder"):
            sync.push([server], 1)
    assert [path.name for path in sync.folder.path.iterdir()] == ["owner.lock"]
    sync.push([server], 2)
    monkeypatch.setattr(os, "posix_fallocate", full)  # later versions need no more space
    sync.push([server], 3)
    assert sorted(path.name for path in sync.folder.path.iterdir()) == ["owner.lock", "v000003"]
    sync.close()


def test_files_of_a_failed_push_are_not_overwritten(loop, tmp_path, monkeypatch):
    source, server = random_source(), Reader()
    sync = FilesystemSync(source, loop, folder=str(tmp_path), bucket_bytes=128)
    sync.push([server], 1)
    monkeypatch.setattr(server, "rpc", failing_rpc)
    with pytest.raises(SyncError, match="it hangs"):
        sync.push([server], 2)
    monkeypatch.undo()
    (old,) = (sync.folder.path / "v000002").glob("model-00001*")
    inode = old.stat().st_ino
    with old.open("rb") as reader:  # a slow server may still read them
        before = reader.read()
        for name in source.weights:
            source.weights[name] = source.weights[name] + 1
        sync.push([server], 3)
        reader.seek(0)
        assert reader.read() == before
    assert all(path.stat().st_ino != inode for path in (sync.folder.path / "v000003").iterdir())
    assert_received(server, source)
    sync.close()


async def failing_rpc(method, **_):
    raise RuntimeError("it hangs")


def test_the_next_run_deletes_folders_of_killed_runs_only(tmp_path):
    living = WeightFolder(str(tmp_path), "strop-weights-")
    dead = tmp_path / "strop-weights-dead"
    dead.mkdir()
    (dead / "owner.lock").touch()
    (dead / "v000001").mkdir()
    foreign = tmp_path / "strop-weights-unlocked"  # no lock file: not created by strop
    foreign.mkdir()
    new = WeightFolder(str(tmp_path), "strop-weights-")
    assert not dead.exists() and living.path.exists() and foreign.exists() and new.path.exists()
    living.close()
    new.close()


def test_a_folder_is_deleted_even_if_it_is_never_closed(tmp_path):
    folder = WeightFolder(str(tmp_path), "strop-")
    path, at_exit = folder.path, folder._end.atexit
    assert path.parent == tmp_path and at_exit  # even at interpreter exit
    del folder
    assert list(tmp_path.iterdir()) == []


def test_dev_shm_is_used_only_if_it_has_enough_space(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "MEMORY", tmp_path)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert folder_module.folder_with_space(1000) == tmp_path
    assert folder_module.folder_with_space(free) != tmp_path


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="sync.folder=.*/file/x: "):
        WeightFolder(str(tmp_path / "file" / "x"), "strop-weights-")


def server_on(
    *uuids: str, lora: bool = False, extension: bool = True, url: str = "http://127.0.0.1:1", host_id: str | None = None
) -> SimpleNamespace:
    info = SimpleNamespace(device_uuids=uuids, lora=lora, extension=extension, host_id=host_id)
    return SimpleNamespace(url=url, info=info)


def test_auto_selects_the_fastest_backend_that_works():
    for servers, is_lora, device_uuid, expected in (
        ([server_on()], False, None, "process_group"),
        ([server_on(lora=True)], True, None, "lora"),
        ([server_on(lora=True)], False, None, "process_group"),  # a LoRA server, but full training
        ([server_on(lora=True), server_on()], True, None, "process_group"),  # merged
        ([server_on("G0")], False, "G0", "ipc"),
        ([server_on("G1"), server_on("G2", "G3")], False, "G0", "process_group"),
        ([server_on("G0"), server_on("G1")], False, "G0", "filesystem"),
        ([server_on("G0", lora=True)], True, "G0", "lora"),
        ([server_on()], False, "G0", "filesystem"),
    ):
        backend = pick_backend("auto", servers, is_lora=is_lora, device_uuid=device_uuid)
        assert backend == expected, (servers, is_lora, device_uuid)


def test_servers_start_with_lora_only_if_they_get_adapters():
    assert wants_adapters("auto") and wants_adapters("lora")
    assert not any(map(wants_adapters, ("ipc", "filesystem", "process_group")))


def test_backends_that_cannot_work_are_rejected(loop):
    for name, servers, is_lora, device_uuid, message in (
        ("lora", [server_on(lora=True)], False, None, "sync.backend=lora: .*--lora.r"),
        ("lora", [server_on()], True, None, "sync.backend=lora: http://127.0.0.1:1 "),
        ("filesystem", [server_on(extension=False)], False, None, "sync.backend=filesystem: .*extension"),
        ("process_group", [server_on("G0")], False, "G0", "sync.backend=process_group: .*--sync.backend ipc"),
        ("process_group", [server_on("G1")], False, None, "sync.backend=process_group: .*--sync.backend filesystem"),
    ):
        with pytest.raises(ValueError, match=message):
            pick_backend(name, servers, is_lora=is_lora, device_uuid=device_uuid)
    other_host = [server_on("G0", host_id="server")]
    assert pick_backend("process_group", other_host, is_lora=False, device_uuid="G0") == "process_group"
    remote, other_device = Receiver(url="http://10.0.0.2:8000"), Receiver()
    other_device.info.device_uuids = ("GPU-1",)
    ipc, files = IpcSync(random_source(), loop, device=CPU), FilesystemSync(random_source(), loop)
    for sync, server, message in (
        (ipc, other_device, "sync.backend=ipc: .*GPU-1.*--sync.backend process_group"),
        (ipc, remote, "sync.backend=ipc: http://10.0.0.2:8000 .*--sync.backend process_group"),
        (files, remote, "sync.backend=filesystem: http://10.0.0.2:8000 .*--sync.folder"),
    ):
        with pytest.raises(ValueError, match=message):
            sync.push([server], 1)
    files.close()


def test_a_server_that_fails_to_load_files_is_reported(loop):
    class Broken(Reader):
        def strop_reload(self, rank, path, version):
            return {"error": "disk on fire", "rank": rank}

    sync = FilesystemSync(random_source(), loop)
    with pytest.raises(SyncError, match="server 1: worker 0: disk on fire") as caught:
        sync.push([Reader(), Broken(), Reader()], 1)
    assert caught.value.failed.keys() == {1}
    sync.close()


class Adapters(Receiver):
    """Keeps the names of loaded adapters, as vLLM does."""

    def __post_init__(self):
        super().__post_init__()
        self.names: dict[str, str] = {}

    async def load_adapter(self, name, path):
        if name in self.names:
            raise ValueError(f"The lora adapter '{name}' has already been loaded.")
        assert (Path(path) / "adapter_config.json").exists()
        self.names[name] = path

    async def unload_adapter(self, name):
        del self.names[name]


def test_adapter_names_are_unique_per_run_and_two_versions_stay_loaded(loop, tmp_path):
    source, server = random_source(), Adapters()
    sync, other = (LoraSync(source, loop, folder=str(tmp_path)) for _ in range(2))
    assert sync.model_name(1) != other.model_name(1)
    for version in range(1, 13):
        source.weights = random_source(seed=version).weights
        sync.push([server], version)
        assert list(server.names) == [sync.model_name(v) for v in (version - 1, version) if v > 0]
    folders = sorted(path.name for path in sync.folder.path.iterdir() if path.is_dir())
    assert folders == [f"v{version:06d}" for version in range(5, 13)]
    sync.close()
    other.close()
    assert server.names == {} and list(tmp_path.iterdir()) == []


def test_adapters_named_by_requests_in_flight_stay_loaded(loop, tmp_path):
    source, server = random_source(), Adapters()
    sync = LoraSync(source, loop, folder=str(tmp_path))
    sync.in_use = lambda: {1}
    for version in range(1, 13):
        source.weights = random_source(seed=version).weights
        sync.push([server], version)
    assert list(server.names) == [sync.model_name(v) for v in (1, 11, 12)]
    assert (sync.folder.path / "v000001").exists() and not (sync.folder.path / "v000002").exists()
    sync.close()


def test_a_version_pushed_twice_must_have_the_same_weights(loop, tmp_path):
    source = random_source()
    sync = LoraSync(source, loop, folder=str(tmp_path))
    first, second = Adapters(), Adapters()
    sync.push([first], 1)
    sync.push([first, second], 1)  # the second was restarted
    assert first.names == second.names
    source.weights = random_source(seed=1).weights
    with pytest.raises(AssertionError, match="version 1 "):
        sync.push([first], 1)
    sync.close()


def test_a_server_that_rejects_an_adapter_is_reported_and_the_others_load_it(loop, tmp_path):
    class Full(Adapters):
        async def load_adapter(self, name, path):
            raise ValueError("max_lora_rank is 8")

    source = random_source()
    sync = LoraSync(source, loop, folder=str(tmp_path))
    servers = [Adapters(), Full()]
    with pytest.raises(SyncError, match="server 1: max_lora_rank is 8") as caught:
        sync.push(servers, 1)
    assert caught.value.failed.keys() == {1} and list(servers[0].names) == [sync.model_name(1)]
    sync.close()


def test_local_servers_use_the_loopback_address():
    assert host_for([server_on(), server_on(url="http://localhost:2")]) == "127.0.0.1"
