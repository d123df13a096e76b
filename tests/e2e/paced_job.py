"""The rest of a job whose steps take their time: a pause in each, in which the machine is left to others.

Tests wait for much that is no step: processes that start, commands, leases. Steps as fast as the processors allow would
only delay it, and the tests that run beside.
"""

from __future__ import annotations

import time
from typing import Any

from oobleck import Job

PAUSE_S = 0.15


def optimizer(groups: list[dict[str, Any]]) -> Any:
    """What the job files of the harness ask for."""
    from torch.optim import AdamW  # not where `oobleck up` asks for the settings alone

    class Paced(AdamW):
        def step(self, closure: None = None) -> None:
            time.sleep(PAUSE_S)
            super().step()

    return Paced(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)


def job() -> Job:
    return Job(optimizer=optimizer)
