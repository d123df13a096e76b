"""Checkpoints as bytes: slots of shared memory, layer files and manifests on disk. No torch, no trio, no decisions.

    worker ── copies its layers ──> memory slot ── agent persists ──> layer files ── complete ──> manifest
                                    (`memory`)                        (`layer_file`)              (`directory`)

A `Layout` describes a slot or a file: named tensors, each with a type, a shape and a place. Workers view the same bytes
as torch's tensors (`oobleck.training.checkpoint.state`).
"""

from __future__ import annotations

from oobleck.control.protocol import MANIFEST_VERSION, Manifest, SavedState, Shard, checkpoint_name, run_of

from .directory import CheckpointDirectory, FileFault, FoundManifest
from .layer_file import read_layer_file
from .layout import Layout, TensorSpec
from .memory import CHUNK_BYTES, FlashMemory, MappedFiles, Slot, find_slots, memory_files, next_memory_file

__all__ = [
    "CHUNK_BYTES",
    "MANIFEST_VERSION",
    "CheckpointDirectory",
    "FileFault",
    "FlashMemory",
    "FoundManifest",
    "Layout",
    "Manifest",
    "MappedFiles",
    "SavedState",
    "Shard",
    "Slot",
    "TensorSpec",
    "checkpoint_name",
    "find_slots",
    "memory_files",
    "next_memory_file",
    "read_layer_file",
    "run_of",
]
