from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from oobleck.control.protocol import ErrorKind
from oobleck.errors import ConfigError
from oobleck.training.comm.devices import (
    NCCL_SETTINGS,
    can_use_nccl,
    choose_device,
    device_identity,
    device_memory_bytes,
    prepare_nccl,
)
from oobleck.training.process.errors import kind_of


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # so that it is put back
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")


def test_streams_of_a_gpu_have_as_many_queues_as_there_can_be(monkeypatch: pytest.MonkeyPatch):
    choose_device("cuda", 0, num_devices=1)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    choose_device("cuda", 0, num_devices=1)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1", "what the user sets stays"


def test_a_worker_computes_on_the_gpu_that_its_hostfile_names():
    assert choose_device("cuda", 5, num_devices=8) == torch.device("cuda:5")
    assert choose_device("cpu", 5) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"2 CUDA devices.*asks for number 2"):
        choose_device("cuda", 2, num_devices=2)
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device("cuda", 0, num_devices=0)


def test_a_worker_that_starts_again_keeps_its_gpu_although_its_number_has_changed():
    """GPU 1 has fallen off the bus, and those after it have moved up."""
    left = ["GPU-0", "GPU-2", "GPU-3"]
    chosen = partial(choose_device, "cuda", num_devices=3, id_of=left.__getitem__)
    assert chosen(2, gpu_id="GPU-2") == torch.device("cuda:1")
    assert chosen(3, gpu_id="GPU-3") == torch.device("cuda:2"), "although no GPU has its number any more"
    assert chosen(2) == torch.device("cuda:2"), "the first worker takes what the hostfile names"
    with pytest.raises(torch.AcceleratorError, match="GPU 1 of this machine was GPU-1, which is no longer") as gone:
        chosen(1, gpu_id="GPU-1")
    assert kind_of(gone.value) is ErrorKind.DEVICE


@pytest.mark.parametrize(
    ("identities", "can"),
    [
        (["GPU-1", "GPU-2", "GPU-3"], True),
        (["GPU-1", "GPU-2", "GPU-1"], False),
        (["GPU-1", None], False),
        ([None, None], False),
        ([], False),
    ],
)
def test_nccl_carries_sums_where_each_member_has_a_gpu_of_its_own(identities: list[str | None], can: bool):
    assert can_use_nccl(identities) is can


@pytest.mark.usefixtures("own_nccl")
def test_nccl_connects_over_the_interface_of_the_address_that_the_hostfile_gives(monkeypatch: pytest.MonkeyPatch):
    for address in ("127.0.0.1", "localhost", "lo"):
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        prepare_nccl(address)
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    prepare_nccl("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0,ib1", "what the user sets stays"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    prepare_nccl("192.0.2.1")  # RFC 5737: nobody has it
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.usefixtures("own_nccl")
def test_a_users_shell_does_not_decide_whether_a_worker_survives_its_peers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name in (*NCCL_SETTINGS, "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    dist.set_debug_level_from_env()  # as torch does on import
    prepare_nccl("127.0.0.1")
    assert {name: os.environ[name] for name in NCCL_SETTINGS} == NCCL_SETTINGS
    assert dist.get_debug_level() == dist.DebugLevel.OFF
    named = caplog.text
    assert all(f"sets {name}=0 in place of 1" in named for name in NCCL_SETTINGS)
    assert "turns TORCH_DISTRIBUTED_DEBUG off" in named
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ, "torch would warn of it for each communicator"
    assert "unsets TORCH_NCCL_TRACE_BUFFER_SIZE=1" in named
    caplog.clear()
    prepare_nccl("127.0.0.1")  # each communicator does so
    assert caplog.text == ""


def test_a_cpu_is_no_gpu():
    assert device_identity(torch.device("cpu")) is None
    assert device_memory_bytes(torch.device("cpu"), num_sharing=1) is None


GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free and all of the memory of a GPU, which a test may change."""
    memory = [80 * GIB, 80 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: tuple(memory))
    return memory


def test_what_others_hold_of_a_gpu_is_not_the_jobs(gpu: list[int]):
    device = torch.device("cuda", 3)
    assert device_memory_bytes(device, num_sharing=1) == 72 * GIB, "a tenth is left"
    gpu[0] -= 30 * GIB + 5
    assert device_memory_bytes(device, num_sharing=1) == 41 * GIB, "whole GiB"
    assert device_memory_bytes(device, num_sharing=4) == 18 * GIB, "peers and others cannot be told apart"
    assert device_memory_bytes(device, num_sharing=1, wanted_bytes=45 * GIB + 7) == 45 * GIB + 7


def test_a_gpu_that_others_have_filled_is_named(gpu: list[int]):
    gpu[0] = 8 * GIB
    with pytest.raises(ConfigError, match=r"no room for a model.*cuda:3.*of its 80.0 GiB, of which 8.0 GiB are free"):
        device_memory_bytes(torch.device("cuda", 3), num_sharing=1)
    with pytest.raises(ConfigError, match=r"device_memory_bytes asks for 9.0 GiB.*8.0 GiB are free"):
        device_memory_bytes(torch.device("cuda", 3), num_sharing=1, wanted_bytes=9 * GIB)
