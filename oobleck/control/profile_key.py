"""What a measured profile depends on, as a short key under which it is cached."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from oobleck import __version__
from oobleck.job import JobSpec

from .messages import Hello, WorkerReady

__all__ = ["profile_key"]


def profile_key(job: JobSpec, hello: Hello, ready: WorkerReady, *, torch_threads: int, memory_bytes: int) -> str:
    """Equal keys mean that a cached profile may be used: same model, shapes, precision, device and versions."""
    depends_on = {
        "model": asdict(job.model),
        "layers": ready.layer_names,
        "parameters": ready.parameters,
        "microbatch_size": job.microbatch_size,
        "sequence_length": job.data.sequence_length,
        "dtype": job.dtype,
        "activation_checkpointing": job.activation_checkpointing,
        "optim": [job.optimizer.optim, dict(job.optimizer.optim_args)],
        "device": [job.device, memory_bytes, torch_threads, hello.num_cores],
        "versions": [__version__, hello.python_version, ready.torch_version],
    }
    canonical = json.dumps(depends_on, sort_keys=True, default=str)
    return f"{job.model.type}-{hashlib.blake2s(canonical.encode(), digest_size=8).hexdigest()}"
