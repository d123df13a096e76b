"""transformers' `Trainer` on the nodes of a run: one import of a script changes, and its `train()` trains there.

    from oobleck.transformers import Trainer

In a worker the script ends at `train()`, and the trainer's parts are the job's. Where `oobleck up` is, it waits there
for the run's end, and continues with the weights. It knows transformers, and what a job is; it knows nothing of nodes.
"""

from __future__ import annotations

from .trainer import Trainer

__all__ = ["Trainer"]
