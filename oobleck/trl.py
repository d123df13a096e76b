"""TRL's trainers on the nodes of a run: one import of a script changes.

    from oobleck.trl import DPOTrainer, RewardTrainer, SFTTrainer

Their losses take the model as a whole, so each node has a copy of it, and of a reference model: docs/trainer.md.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, ClassVar

import trl as theirs
from transformers import TrainingArguments

from oobleck.errors import ConfigError
from oobleck.transformers import Trainer

__all__ = ["DPOTrainer", "RewardTrainer", "SFTTrainer"]

_REFUSED = {
    "sync_ref_model": "the reference model stays as it is: its weights and the policy's are on the nodes",
    "activation_offloading": "nodes keep their activations; set gradient_checkpointing",
    "label_smoothing_factor": "it needs the logits, which TRL computes by the script's own copy of the model",
}


class _OnNodes(Trainer):
    counts_for_logs: ClassVar[frozenset[str]] = frozenset({"_total_train_tokens"})
    _metrics: MutableMapping[str, MutableMapping[str, Any]]

    def __init__(self, *args: Any, **named: Any) -> None:
        """All arguments are TRL's own. Raises ConfigError for those that no node could follow."""
        settings = named.get("args", next((each for each in args if isinstance(each, TrainingArguments)), None))
        for name, why in _REFUSED.items():
            if value := getattr(settings, name, None):
                raise ConfigError(f"{type(settings).__name__}({name}={value!r}): leave it out: {why}")
        super().__init__(*args, **named)
        if self.compute_loss_func is not None:
            raise ConfigError(f"{type(self).__name__}(compute_loss_func=…): override compute_loss in a subclass")

    def metrics_for_logs(self) -> Iterable[MutableMapping[str, Any]]:
        """Return the metrics of batches, which nodes cannot log: evaluations have them."""
        return self._metrics.values()


class SFTTrainer(_OnNodes, theirs.SFTTrainer):  # type: ignore[misc]  # as above
    """TRL's trainer for supervised fine-tuning, which trains on the nodes."""

    arguments_kind: ClassVar[type[TrainingArguments]] = theirs.SFTConfig


class DPOTrainer(_OnNodes, theirs.DPOTrainer):  # type: ignore[misc]  # as above
    """TRL's trainer for direct preference optimization, which trains on the nodes."""

    arguments_kind: ClassVar[type[TrainingArguments]] = theirs.DPOConfig

    def __init__(self, model: Any, ref_model: Any = None, args: TrainingArguments | None = None, **named: Any) -> None:
        """All arguments are TRL's own."""
        super().__init__(model, args, ref_model=ref_model, **named)


class RewardTrainer(_OnNodes, theirs.RewardTrainer):  # type: ignore[misc]  # as above
    """TRL's trainer for reward models, which trains on the nodes."""

    arguments_kind: ClassVar[type[TrainingArguments]] = theirs.RewardConfig
