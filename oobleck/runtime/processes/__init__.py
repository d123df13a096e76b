"""Processes next to the master: scripts, profilers and model readers; and the restart of a killed master."""

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
