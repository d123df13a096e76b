"""Digests of what all workers must have alike, for the master to compare.

Each follows from the script, which runs in every worker, and from files and libraries on every node.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator

from oobleck.control.nodes import Alike, version_of
from oobleck.control.protocol import Things
from oobleck.job import JobSpec
from oobleck.training.assembly import Assembly
from oobleck.training.data import Batch, Dataset, WholeBatch
from oobleck.training.model import ModelStructure

_PACKAGES = ("torch", "transformers", "peft", "datasets", "tokenizers", "numpy")
"""Packages on which results depend, if they are imported."""
_OF_A_NODE = ("_name_or_path", "transformers_version")
"""Keys of a configuration that depend on where it was read, and by what."""


def things_of_worker(assembly: Assembly) -> Things:
    """Return the digests of a worker before the first step; reads the first samples."""
    structure = assembly.structure
    weights = () if structure.weights is None else ((Alike.WEIGHTS, structure.weights.digest()),)
    return (
        *((version_of(name), version) for name, version in _versions()),
        (Alike.STRUCTURE, _digest_of_structure(structure)),
        *weights,
        (Alike.LOSS, str(structure.loss_rule)),
        *EpochThings(assembly.job, assembly.train).of(0),
    )


class EpochThings:
    """Digests of each epoch that a worker enters; none for records from shards."""

    def __init__(self, job: JobSpec, dataset: Dataset) -> None:
        self._job = job
        self._dataset = dataset
        self._entered = 0  # `things_of_worker` reports the first epoch

    def enter(self, step: int) -> tuple[int, Things] | None:
        """Return a step's epoch and its digests, once for each epoch after the first."""
        epoch = self._epoch_of(step)
        if epoch is None or epoch == self._entered:
            return None
        self._entered = epoch
        return epoch, self.of(epoch)

    def of(self, epoch: int) -> Things:
        """Return digests of an epoch's order and of its first microbatch. Raises ConfigError if reading that does."""
        dataset, job = self._dataset, self._job
        if dataset.records is not None:
            return ()
        order, size = dataset.order, job.global_batch_size
        step = epoch * dataset.num_samples // size + 1 if order is None else order.first_step(epoch)
        numbers = dataset.samples_of_step(job.seed, step, size)[: job.microbatch_size]
        first = (Alike.FIRST_SAMPLES, _digest_of_batch(dataset.batch(numbers, step=step)))
        return (first,) if order is None else ((Alike.ORDER, order.digest(epoch)), first)

    def _epoch_of(self, step: int) -> int | None:
        dataset = self._dataset
        if dataset.records is not None:
            return None
        if dataset.order is not None:
            return dataset.order.epoch_of(step)[0]
        return (step - 1) * self._job.global_batch_size // dataset.num_samples


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            yield name, str(version).partition("+")[0]  # the rest names the device that a build is for


def _digest_of_structure(structure: ModelStructure) -> str:
    config = {key: value for key, value in structure.config.to_dict().items() if key not in _OF_A_NODE}
    parts = (
        structure.layer_names,
        structure.sites,
        sorted((name, tuple(shape)) for name, shape in structure.shapes.items()),
        sorted(structure.frozen),
        sorted(structure.takes),
        structure.task,
        # An object counts by its type alone: its text may have its address, which differs between processes.
        json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__),
    )
    return _digest(repr(parts).encode())


def _digest_of_batch(batch: Batch) -> str:
    tensors = {"input_ids": batch.input_ids, "labels": batch.labels, **batch.others}
    if isinstance(batch, WholeBatch):
        tensors = {str(number): tensor for number, tensor in enumerate(batch.tensors)}
    return _digest(
        b"".join(
            f"{name}:{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes()
            for name, tensor in sorted(tensors.items())
        )
    )


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
