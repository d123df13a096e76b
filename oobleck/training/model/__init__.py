"""Models: how an unmodified model comes apart into layers, and the part of it that a worker holds."""

from __future__ import annotations

from oobleck.training.randomness import MicrobatchKey

from .adapters import Adapters, add_adapters, plain_name, save_adapters, tied_parameters, unwrapped
from .configuration import build_model
from .flow import Flow, trace_flow
from .forward_passes import Precision, check_attention, require_compiler, use_attention
from .layer_trial import try_layers
from .live_model import LiveModel
from .loss_trial import BatchSizes, CapturedHead, made_up_weights, with_tried_loss
from .models import StageModel, separates_documents
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
from .stage_flow import prove_cuts
from .structure import LossOfInputs, ModelStructure
from .tensor_parallel import AllReduce, Share, initialize_share, install, sharded, share_of
from .weight_gradients import WeightGradients

__all__ = [
    "Adapters",
    "AllReduce",
    "BatchSizes",
    "CapturedHead",
    "Carried",
    "Flow",
    "LiveModel",
    "LossOfInputs",
    "MicrobatchKey",
    "ModelStructure",
    "Parcel",
    "Precision",
    "Share",
    "StageModel",
    "WeightGradients",
    "add_adapters",
    "build_model",
    "check_attention",
    "gradients_of",
    "header_length",
    "initialize_share",
    "install",
    "leaf_of",
    "made_up_weights",
    "num_bytes",
    "packed",
    "plain_name",
    "prove_cuts",
    "require_compiler",
    "run_backward",
    "save_adapters",
    "separates_documents",
    "sharded",
    "share_of",
    "size_of",
    "tied_parameters",
    "trace_flow",
    "try_layers",
    "unpacked",
    "unwrapped",
    "use_attention",
    "with_tried_loss",
]
