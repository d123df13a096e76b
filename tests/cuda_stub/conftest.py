"""Tests over torch's own CUDA build and `ProcessGroupNCCL`, with the stub device of `tools/gpu/stub` below them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gpu.stub import device as stub

from .members import Members

_REASON = stub.why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _REASON is not None:
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip(reason=f"{_REASON} (make test-cuda-stub)"))


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path)
    yield members
    members.close()
