"""`mooncake.engine` of compat/mooncake: the original's Transfer Engine API between two engines."""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mooncache.auth import create_cluster_token
from mooncache.dropin import transfer_engine
from tests.conditions import wait_until
from tests.dropin.conftest import COMPAT

BATCH = 100


@pytest.fixture(scope="module")
def module() -> ModuleType:
    sys.path.insert(0, str(COMPAT))
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        if "Uninstall both" not in str(error):
            raise
        pytest.skip(f"the original is installed here: {error}")
    finally:
        sys.path.remove(str(COMPAT))


@pytest.fixture
def engines(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any, str]]:
    """An initiator, a target, and the target's name."""
    create_cluster_token(tmp_path / "cluster.token")
    monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path))
    pair = module.TransferEngine(), module.TransferEngine()
    for engine in pair:
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    yield *pair, f"127.0.0.1:{pair[1].get_rpc_port()}"
    for engine in pair:
        engine.close()


def test_batches_go_both_ways(engines: tuple[Any, Any, str]) -> None:
    initiator, target, name = engines
    here = initiator.get_first_buffer_address(f"127.0.0.1:{initiator.get_rpc_port()}")
    there = initiator.get_first_buffer_address(name)
    assert there == target.get_first_buffer_address(name)
    data = [random.Random(i).randbytes(32 + i) for i in range(BATCH)]
    addresses = [here + 1024 * i for i in range(BATCH)], [there + 1024 * i for i in range(BATCH)]
    sizes = [len(item) for item in data]
    for address, item in zip(addresses[0], data, strict=True):
        assert initiator.write_bytes_to_buffer(address, item, len(item)) == 0
    assert initiator.batch_transfer_sync_write(name, *addresses, sizes) == 0
    assert [target.read_bytes_from_buffer(a, s) for a, s in zip(addresses[1], sizes, strict=True)] == data
    for address, size in zip(addresses[0], sizes, strict=True):
        initiator.write_bytes_to_buffer(address, bytes(size), size)
    batch = initiator.batch_transfer_async_read(name, *addresses, sizes)
    assert batch != 0
    assert initiator.get_batch_transfer_status([batch]) == 0
    assert [initiator.read_bytes_from_buffer(a, s) for a, s in zip(addresses[0], sizes, strict=True)] == data
    assert initiator.get_batch_transfer_status([batch]) == -1


def test_memory_of_the_caller(engines: tuple[Any, Any, str]) -> None:
    initiator, target, name = engines
    ours, theirs = (ctypes.create_string_buffer(4096) for _ in range(2))
    here, there = ctypes.addressof(ours), ctypes.addressof(theirs)
    assert initiator.transfer_sync_write(name, here, there, 16) == -1  # not registered here
    assert initiator.batch_register_memory([here], [4096]) == 0
    assert initiator.transfer_sync_write(name, here, there, 16) == -1  # nor there
    assert target.register_memory(there, 4096) == 0
    assert target.register_memory(there + 8, 8) == -1
    ours.raw = b"k" * 4096
    assert initiator.transfer_sync_write(name, here, there, 16) == 0
    assert theirs.raw[:17] == b"k" * 16 + b"\0"
    assert initiator.transfer_sync_write(name, here, there + 4090, 16) == -1
    batch = initiator.transfer_submit_write(name, here, there + 100, 4)
    wait_until(lambda: initiator.transfer_check_status(batch) == 1, "the write to be done")
    assert theirs.raw[100:105] == b"kkkk\0"
    assert initiator.transfer_check_status(batch) == -1
    assert target.batch_unregister_memory([there]) == 0
    assert initiator.transfer_sync_read(name, here, there, 16) == -1
    assert target.unregister_memory(there) == -1


def test_memory_that_is_not_the_programs_is_not_registered(
    engines: tuple[Any, Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers would be served from it, and the first one would end this process."""
    _, target, _ = engines
    ours = ctypes.create_string_buffer(4096)
    here = ctypes.addressof(ours)
    assert target.register_memory(4096, 4096) == -1
    assert target.batch_register_memory([here, here + 8192], [4096, 1 << 40]) == -1
    assert target.register_memory(here, 4096) == 0, "a batch is registered as a whole or not at all"
    assert target.unregister_memory(here) == 0
    monkeypatch.setattr(transfer_engine, "gpu_of", lambda _: 0)
    assert target.register_memory(here, 4096) == -1, "a GPU's"


def test_managed_buffers_and_notifications(engines: tuple[Any, Any, str], module: ModuleType) -> None:
    initiator, target, name = engines
    here, there = initiator.allocate_managed_buffer(4096), target.allocate_managed_buffer(4096)
    assert here and there
    initiator.write_bytes_to_buffer(here, b"page", 4)
    notify = module.TransferNotify("request-7", "layer 3")
    assert initiator.transfer_sync(name, here, there, 4, module.TransferOpcode.Write, notify) == 0
    assert target.read_bytes_from_buffer(there, 4) == b"page"
    assert [(one.name, one.msg) for one in target.get_notifies()] == [("request-7", "layer 3")]
    assert target.free_managed_buffer(there, 4096) == 0
    assert target.free_managed_buffer(there, 4096) == -1
    assert initiator.transfer_sync_read(name, here, there, 4) == -1
    assert initiator.send_probe(name) == 0
    assert initiator.send_probe("127.0.0.1:1") == -1


def test_without_a_token_or_twice_it_is_not_initialised(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path / "nowhere"))
    engine = module.TransferEngine()
    asked = [name for name in module.__all__ if name.startswith("SUPPORT_")]
    assert len(asked) == 7
    assert not any(getattr(module, name) for name in asked), "what callers ask before they name a protocol"
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    assert engine.get_rpc_port() == 0
    assert engine.register_memory(4096, 1) == -1
    create_cluster_token(tmp_path / "cluster.token")
    monkeypatch.setenv("MOONCACHE_CLUSTER_STATE_DIR", str(tmp_path))
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "nvlink", "") == -1
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
    engine.close()
