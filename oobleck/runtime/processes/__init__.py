"""Processes beside the master: scripts, profilers, readers of models; and how to start a master that was killed."""

from __future__ import annotations

from .conversion import convert, find_tokenizer, write_tokenizer
from .master_process import restart_master
from .model_outline import LayerOutline, ModelOutline, outline_of
from .profile_process import run_profiler
from .script_process import CallbackProcess, DescribedScript, ScriptProcess, describe_script, read_script
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
