"""Models: how an unmodified model comes apart into layers, and the part of it that a worker holds."""

from __future__ import annotations

from oobleck.training.randomness import MicrobatchKey

from .adapters import Adapters, add_adapters, plain_name, save_adapters, tied_parameters, unwrapped
from .configuration import auto_class, build_model
from .contexts import ContextShare, share_contexts
from .experts import experts_per_token
from .forward_passes import Precision, check_attention, require_compiler, use_attention
from .layer_trial import separates_documents, try_layers
from .live_model import LiveModel
from .loss_trial import BatchSizes, CapturedHead, made_up_weights, with_tried_loss
from .models import StageModel
from .structure import LossOfInputs, ModelStructure, default_dtype
from .tensor_parallel import Share, initialize_share, install, share_for

__all__ = [
    "Adapters",
    "BatchSizes",
    "CapturedHead",
    "ContextShare",
    "LiveModel",
    "LossOfInputs",
    "MicrobatchKey",
    "ModelStructure",
    "Precision",
    "Share",
    "StageModel",
    "add_adapters",
    "auto_class",
    "build_model",
    "check_attention",
    "default_dtype",
    "experts_per_token",
    "initialize_share",
    "install",
    "made_up_weights",
    "plain_name",
    "require_compiler",
    "save_adapters",
    "separates_documents",
    "share_contexts",
    "share_for",
    "tied_parameters",
    "try_layers",
    "unwrapped",
    "use_attention",
    "with_tried_loss",
]
