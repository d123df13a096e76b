"""Hostfiles, job files and options, as users write them: read and checked."""

from __future__ import annotations

from .environment import EnvironmentOptions, read_variables, read_workdir
from .hostfile import parse_hostfile
from .job_file import changed_keys, load_job
from .job_schema import job_schema
from .job_sources import JobSource, check_local_files, check_resume, open_job, read_job
from .kinds_option import KindCount, parse_nodes, parse_prices, parse_profiles
from .node_source import DialIn, FromCommand, FromHostfile, FromRay, FromSlurm, NodeSource, VirtualOnes, read_source
from .options import (
    MAX_SEED,
    NUM_SPARE_NODES,
    SCHEDULE_NAMES,
    SLOW_FACTOR,
    JobOptions,
    NodeOptions,
    PlanningOptions,
    ReachOptions,
    parse_schedule_name,
)
from .values import did_you_mean, duration_s, parse_scaling, racks, real, whole, with_save_every

__all__ = [
    "MAX_SEED",
    "NUM_SPARE_NODES",
    "SCHEDULE_NAMES",
    "SLOW_FACTOR",
    "DialIn",
    "EnvironmentOptions",
    "FromCommand",
    "FromHostfile",
    "FromRay",
    "FromSlurm",
    "JobOptions",
    "JobSource",
    "KindCount",
    "NodeOptions",
    "NodeSource",
    "PlanningOptions",
    "ReachOptions",
    "VirtualOnes",
    "changed_keys",
    "check_local_files",
    "check_resume",
    "did_you_mean",
    "duration_s",
    "job_schema",
    "load_job",
    "open_job",
    "parse_hostfile",
    "parse_nodes",
    "parse_prices",
    "parse_profiles",
    "parse_scaling",
    "parse_schedule_name",
    "racks",
    "read_job",
    "read_source",
    "read_variables",
    "read_workdir",
    "real",
    "whole",
    "with_save_every",
]
