from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from oobleck.training.comm.devices import NCCL_SETTINGS


@pytest.fixture
def own_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what NCCL and torch are told."""
    for name in ("NCCL_SOCKET_IFNAME", *NCCL_SETTINGS):
        monkeypatch.setenv(name, "as it was")  # so that it is put back
        monkeypatch.delenv(name)
    level = dist.get_debug_level()
    yield
    dist.set_debug_level(level)
