"""A worker that cannot begin says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleck.job import JobSpec
from oobleck.planner import WorkerId
from tools.bench.local_workers import LocalWorkers, fork_context

_OPENED = []


def _open_driver(_: WorkerId) -> None:
    _OPENED.append(Path("nvidia-uvm").open("w"))  # noqa: SIM115  for as long as the process lives


@pytest.mark.slow
def test_a_worker_forked_from_a_process_that_has_initialized_cuda_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="initializes CUDA on import, so no forked process can use a GPU"):
        LocalWorkers(
            JobSpec(device="cuda"),
            (WorkerId(node="node0", device=0),),
            context=fork_context(),
            cache_dir=tmp_path,
            threads=1,
            beside=_open_driver,
        )
