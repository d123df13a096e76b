"""Where nodes live: each launcher lists nodes, connects to them, and reports which join and leave."""

from __future__ import annotations

from .command import HostsCommand
from .dial_in import (
    INTRODUCTION,
    DialedInNodes,
    Introduction,
    listen,
    make_key_files,
    read_keys,
    read_pass,
    settle_keys,
)
from .kubernetes import KubernetesAPI, PodFollower
from .launcher import Arrived, Launcher, Leaving, NodeChange, OutOfMemory, Reported
from .listed import Hostfile, ListedNodes, VirtualNodes
from .ray import RayActors, ray_nodes
from .slurm import SlurmAllocation, SlurmJobs, SlurmTasks

__all__ = [
    "INTRODUCTION",
    "Arrived",
    "DialedInNodes",
    "Hostfile",
    "HostsCommand",
    "Introduction",
    "KubernetesAPI",
    "Launcher",
    "Leaving",
    "ListedNodes",
    "NodeChange",
    "OutOfMemory",
    "PodFollower",
    "RayActors",
    "Reported",
    "SlurmAllocation",
    "SlurmJobs",
    "SlurmTasks",
    "VirtualNodes",
    "listen",
    "make_key_files",
    "ray_nodes",
    "read_keys",
    "read_pass",
    "settle_keys",
]
