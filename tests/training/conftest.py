from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.training.autograd_thread import AutogradThreads

# The models here are so small that threads would spend their time waiting for one another.
torch.set_num_threads(1)


@pytest.fixture(params=["caller's thread", "thread of autograd"])
def backward_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where backward passes run: on the CPU, and on a GPU."""
    if request.param == "caller's thread":
        yield request.param
        return
    threads = AutogradThreads(monkeypatch)
    yield request.param
    threads.close()
