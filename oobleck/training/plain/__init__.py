"""The same training without Oobleck: one process, the whole model, torch's own optimizer, and a note of each step.

What `oobleck verify` compares a run with. Of Oobleck it takes what a job says by definition (samples, initial values,
learning rates), and nothing of how models are split, losses divided and gradients summed.
"""

from __future__ import annotations

from .host import serve
from .job_loop import train_job
from .recorder import Recorder, gradient_norm

__all__ = ["Recorder", "gradient_norm", "serve", "train_job"]
