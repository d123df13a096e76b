"""What flows between the modules of a model with a loss of its own: traced, cut into stages, carried as parcels."""

from .flow import Flow
from .parcels import (
    Carried,
    Parcel,
    gradients_of,
    header_length,
    leaf_of,
    num_bytes,
    packed,
    run_backward,
    size_of,
    unpacked,
)
from .stages import FlowModules, StageIsDone, prove_cuts
from .trace import trace_flow
from .units import constant_parameters, persistent_buffers

__all__ = [
    "Carried",
    "Flow",
    "FlowModules",
    "Parcel",
    "StageIsDone",
    "constant_parameters",
    "gradients_of",
    "header_length",
    "leaf_of",
    "num_bytes",
    "packed",
    "persistent_buffers",
    "prove_cuts",
    "run_backward",
    "size_of",
    "trace_flow",
    "unpacked",
]
