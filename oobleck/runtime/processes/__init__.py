"""Processes beside the master: scripts, profilers, readers of models; and how to start a master that was killed."""

from __future__ import annotations

from .master_process import restart_master
from .script_process import CallbackProcess, DescribedScript, ScriptProcess, describe_script, read_script
from .torch_process import (
    LayerOutline,
    ModelOutline,
    convert,
    find_tokenizer,
    outline_of,
    run_profiler,
    write_tokenizer,
)
from .trainer_process import TrainerProcess

__all__ = [
    "CallbackProcess",
    "DescribedScript",
    "LayerOutline",
    "ModelOutline",
    "ScriptProcess",
    "TrainerProcess",
    "convert",
    "describe_script",
    "find_tokenizer",
    "outline_of",
    "read_script",
    "restart_master",
    "run_profiler",
    "write_tokenizer",
]
