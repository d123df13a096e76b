"""Processes: the agent's and the master's own, workers, scripts and profilers."""

from __future__ import annotations

from .conversion import convert, find_tokenizer, write_tokenizer
from .master_process import restart_master
from .model_outline import LayerOutline, ModelOutline, outline_of
from .patient_clock import PatientClock
from .profile_process import run_profiler
from .script_process import CallbackProcess, DescribedScript, describe_script, read_script
from .trainer_process import TrainerProcess

__all__ = [
    "CallbackProcess",
    "DescribedScript",
    "LayerOutline",
    "ModelOutline",
    "PatientClock",
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
