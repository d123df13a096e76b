from __future__ import annotations

import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.training.comm.devices import Carrier, carrier_of, choose_device, device_identity, device_memory_bytes


def test_a_worker_computes_on_the_gpu_that_its_hostfile_names():
    assert choose_device("cuda", 5, num_devices=8) == torch.device("cuda:5")
    assert choose_device("cpu", 5) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"2 CUDA devices.*asks for 2"):
        choose_device("cuda", 2, num_devices=2)
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device("cuda", 0, num_devices=0)


@pytest.mark.parametrize(
    ("identities", "carrier"),
    [
        (["GPU-1", "GPU-2", "GPU-3"], Carrier.NCCL),
        (["GPU-1", "GPU-2", "GPU-1"], Carrier.GLOO),
        (["GPU-1", None], Carrier.GLOO),
        ([None, None], Carrier.GLOO),
        ([], Carrier.GLOO),
    ],
)
def test_nccl_carries_sums_where_each_member_has_a_gpu_of_its_own(identities: list[str | None], carrier: Carrier):
    assert carrier_of(identities) is carrier


def test_a_cpu_is_no_gpu():
    assert device_identity(torch.device("cpu")) is None
    assert device_memory_bytes(torch.device("cpu"), num_sharing=1) is None
