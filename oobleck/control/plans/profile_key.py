"""What a measured profile depends on, as a short key under which it is cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from oobleck import __version__
from oobleck.job import JobSpec

_MEASURES = 5
"""Raise it when profiles measure more, or otherwise. 5: the updates of parameters."""


def profile_key(
    job: JobSpec, *, layer_names: Sequence[str], parameters: int, device: Sequence[str | int], versions: Sequence[str]
) -> str:
    """Return the key of a profile: the same for the same model, shapes, precision, device and versions.

    `device` is its name, the memory and the threads of one worker, the host's cores, and the workers of the machine;
    `versions` are those of Python and torch.
    """
    script = job.script
    # A script that makes neither model nor optimizer may change without changing what was measured.
    counts = script is not None and not {"model", "optimizer"}.isdisjoint(script.provides)
    depends_on = {
        "model": {key: value for key, value in asdict(job.model).items() if (key, value) != ("whole_loss", None)},
        "script": [script.source, script.arguments] if script is not None and counts else None,
        "layers": list(layer_names),
        "parameters": parameters,
        "microbatch_size": job.microbatch_size,
        "sequence_length": job.data.sequence_length,
        "dtype": job.dtype,
        # Keys stay those of profiles that knew two of the words.
        "activation_checkpointing": job.recompute == "all",
        **({"recompute": job.recompute} if job.recompute not in ("none", "all") else {}),
        # Options that came later are written only where they are set, so the keys of other jobs stay the same.
        **({"compile": True} if job.compile else {}),
        **({"compile_mode": job.compiles} if job.compiles not in (None, "default") else {}),
        **({"attention": job.attn_implementation} if job.attn_implementation else {}),
        **({"split": True} if job.may_split_backward else {}),
        **({"experts": job.sharding_devices} if job.expert_parallel else {}),
        **({"contexts": job.context_parallel} if job.context_parallel > 1 else {}),
        "optim": [job.optimizer.optim, dict(job.optimizer.optim_args)],
        "device": [job.device, *device],
        "versions": [__version__, *versions, _MEASURES],
    }
    canonical = json.dumps(depends_on, sort_keys=True, default=str)
    return f"{job.model.type}-{hashlib.blake2s(canonical.encode(), digest_size=8).hexdigest()}"
