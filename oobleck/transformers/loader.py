"""The loaders of a trainer's data: workers read their samples by number, and the script may make that of training."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from oobleck.errors import ConfigError
from oobleck.training.data import EvaluationBatches
from oobleck.training.randomness import derive_seed, drawing_alike

from .checks import overrider_of

_MAKERS = ("get_train_dataloader", "_get_dataloader")


def training_loader(trainer: Any) -> tuple[Any, int]:
    """Return a trainer's loader, and how many samples it puts into a batch.

    Raises ConfigError for one of the script's own that does more than its parts do.
    """
    loader = trainer.get_train_dataloader()
    maker = next((name for name in _MAKERS if overrider_of(trainer, name) is not None), None)
    if maker is None:
        return loader, trainer.args.per_device_train_batch_size
    if fault := _fault_of(loader):
        raise ConfigError(
            f"Trainer.{maker} returns {type(loader).__name__}, {fault}: workers read samples by their numbers, as its "
            "dataset, batch_sampler and collate_fn give them; return a torch.utils.data.DataLoader of these"
        )
    return loader, loader.batch_size or loader.batch_sampler.batch_size


def evaluation_batches(trainer: Any, loader: Any) -> EvaluationBatches:
    """Return the batches of a trainer's evaluations, which all workers draw alike."""
    with drawing_alike(derive_seed(trainer.args.seed, "evaluated")):
        batches = [list(map(int, batch)) for batch in loader.batch_sampler]
    return EvaluationBatches(batches=batches, leaves_out_nan=trainer.args.logging_nan_inf_filter)


def _fault_of(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return "which is no DataLoader"
    base = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
    if type(base).__iter__ is not DataLoader.__iter__:
        return "which has an __iter__ of its own"
    if base.batch_size is None and (base.batch_sampler is None or isinstance(base.dataset, IterableDataset)):
        return "which makes no batches"
    if not isinstance(base.batch_size or getattr(base.batch_sampler, "batch_size", None), int):
        return f"whose {type(base.batch_sampler).__name__} has no batch_size"
    return ""
