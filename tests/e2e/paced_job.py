"""The rest of a job whose steps take their time: a pause in each, in which the machine is left to others.

Tests wait for much that is no step: processes that start, commands, leases. Steps as fast as the processors allow would
only delay it, and the tests that run beside.
"""

from __future__ import annotations

import time
from typing import Any

from oobleck import Job

PAUSE_S = 0.3
TRIED = 1000
"""Elements, at most, of the parameters that an optimizer is tried on, in many steps."""


def optimizer(groups: list[dict[str, Any]]) -> Any:
    """What the job files of the harness ask for."""
    from torch.optim import AdamW  # not where `oobleck up` asks for the settings alone

    class Paced(AdamW):
        def step(self, closure: None = None) -> None:
            if sum(each.numel() for group in self.param_groups for each in group["params"]) > TRIED:
                time.sleep(PAUSE_S)
            super().step()

    return Paced(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)


def job() -> Job:
    return Job(optimizer=optimizer)
