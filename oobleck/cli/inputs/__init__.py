"""What users write: hostfiles, job files and options, read and checked."""

from __future__ import annotations

from .hostfile import parse_hostfile
from .job_file import changed_keys, load_job
from .job_options import parse_scaling, with_save_every
from .job_sources import JobSource, open_job, read_job
from .kinds_option import KindCount, parse_nodes, parse_prices, parse_profiles
from .node_source import DialIn, FromCommand, FromHostfile, FromRay, FromSlurm, NodeSource, VirtualOnes, read_source
from .options import (
    MAX_BATCH,
    MAX_SEED,
    MAX_TOKENS,
    NUM_SPARE_NODES,
    SLOW_FACTOR,
    NodeOptions,
    PythonOption,
    SSHConfigOption,
)
from .planning_options import (
    BatchOptions,
    ChunksOption,
    DevicesPerNodeOption,
    FaultThresholdOption,
    ModelOptions,
    PipelinesOption,
    parse_schedule_name,
)
from .values import did_you_mean, duration_s, real, whole

__all__ = [
    "MAX_BATCH",
    "MAX_SEED",
    "MAX_TOKENS",
    "NUM_SPARE_NODES",
    "SLOW_FACTOR",
    "BatchOptions",
    "ChunksOption",
    "DevicesPerNodeOption",
    "DialIn",
    "FaultThresholdOption",
    "FromCommand",
    "FromHostfile",
    "FromRay",
    "FromSlurm",
    "JobSource",
    "KindCount",
    "ModelOptions",
    "NodeOptions",
    "NodeSource",
    "PipelinesOption",
    "PythonOption",
    "SSHConfigOption",
    "VirtualOnes",
    "changed_keys",
    "did_you_mean",
    "duration_s",
    "load_job",
    "open_job",
    "parse_hostfile",
    "parse_nodes",
    "parse_prices",
    "parse_profiles",
    "parse_scaling",
    "parse_schedule_name",
    "read_job",
    "read_source",
    "real",
    "whole",
    "with_save_every",
]
