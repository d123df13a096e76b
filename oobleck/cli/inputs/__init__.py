"""What users write: hostfiles, job files and options, read and checked."""

from __future__ import annotations

from .cost_options import parse_costs
from .durations import duration_s
from .hostfile import parse_hostfile
from .job_file import changed_keys
from .numbers import real, whole
from .options import (
    MAX_BATCH,
    MAX_SEED,
    MAX_TOKENS,
    NUM_SPARE_NODES,
    SLOW_FACTOR,
    BaseDirOption,
    JsonOption,
    PythonOption,
    SSHConfigOption,
    TagArgument,
    TagOption,
    base_dir_of,
)
from .planning_options import (
    DeviceOption,
    DevicesPerNodeOption,
    FaultThresholdOption,
    GlobalBatchOption,
    MicrobatchOption,
    ModelOption,
    PipelinesOption,
    PrecisionOption,
    ProfileOption,
    RecomputeOption,
    SequenceLengthOption,
)
from .read_job import read_job
from .save_every import with_save_every
from .scaling_option import parse_scaling
from .schedule_option import parse_schedule_name

__all__ = [
    "MAX_BATCH",
    "MAX_SEED",
    "MAX_TOKENS",
    "NUM_SPARE_NODES",
    "SLOW_FACTOR",
    "BaseDirOption",
    "DeviceOption",
    "DevicesPerNodeOption",
    "FaultThresholdOption",
    "GlobalBatchOption",
    "JsonOption",
    "MicrobatchOption",
    "ModelOption",
    "PipelinesOption",
    "PrecisionOption",
    "ProfileOption",
    "PythonOption",
    "RecomputeOption",
    "SSHConfigOption",
    "SequenceLengthOption",
    "TagArgument",
    "TagOption",
    "base_dir_of",
    "changed_keys",
    "duration_s",
    "parse_costs",
    "parse_hostfile",
    "parse_scaling",
    "parse_schedule_name",
    "read_job",
    "real",
    "whole",
    "with_save_every",
]
