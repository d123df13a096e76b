"""transformers' `Trainer` on the nodes of a run: one import of a script changes, and its `train()` trains there.

    from oobleck.transformers import Trainer

In a worker the script ends at `train()`, and the trainer's parts become the job's. On the machine of `oobleck up` it
waits there for the run's end, and continues with the trained weights. This package knows transformers and jobs, and
nothing of nodes.
"""

from __future__ import annotations

from .trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
