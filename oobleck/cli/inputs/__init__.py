"""What users write: hostfiles, job files and options, read and checked."""

from __future__ import annotations

from .cost_options import parse_costs
from .durations import duration_s
from .hostfile import parse_hostfile
from .job_file import changed_keys, load_job
from .job_sources import open_job, read_job
from .kinds_option import KindCount, parse_local, parse_nodes, parse_prices, parse_profiles
from .nearest import did_you_mean
from .node_source import DialIn, FromCommand, FromHostfile, FromRay, FromSlurm, NodeSource, VirtualOnes, read_source
from .numbers import real, whole
from .options import (
    MAX_BATCH,
    MAX_SEED,
    MAX_TOKENS,
    NUM_SPARE_NODES,
    SLOW_FACTOR,
    DialInOption,
    HostsEveryOption,
    HostsFromOption,
    KeysOption,
    KubernetesOption,
    NumNodesOption,
    PythonOption,
    RayOption,
    SlurmJobOption,
    SlurmOption,
    SSHConfigOption,
)
from .planning_options import (
    ChunksOption,
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
from .save_every import with_save_every
from .scaling_option import parse_scaling
from .schedule_option import parse_schedule_name

__all__ = [
    "MAX_BATCH",
    "MAX_SEED",
    "MAX_TOKENS",
    "NUM_SPARE_NODES",
    "SLOW_FACTOR",
    "ChunksOption",
    "DeviceOption",
    "DevicesPerNodeOption",
    "DialIn",
    "DialInOption",
    "FaultThresholdOption",
    "FromCommand",
    "FromHostfile",
    "FromRay",
    "FromSlurm",
    "GlobalBatchOption",
    "HostsEveryOption",
    "HostsFromOption",
    "KeysOption",
    "KindCount",
    "KubernetesOption",
    "MicrobatchOption",
    "ModelOption",
    "NodeSource",
    "NumNodesOption",
    "PipelinesOption",
    "PrecisionOption",
    "ProfileOption",
    "PythonOption",
    "RayOption",
    "RecomputeOption",
    "SSHConfigOption",
    "SequenceLengthOption",
    "SlurmJobOption",
    "SlurmOption",
    "VirtualOnes",
    "changed_keys",
    "did_you_mean",
    "duration_s",
    "load_job",
    "open_job",
    "parse_costs",
    "parse_hostfile",
    "parse_local",
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
