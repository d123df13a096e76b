"""The same training without Oobleck: one process, the whole model, torch's own optimizer, and a record of each step.

`oobleck verify` compares a run with it. It shares what a job defines (samples, initial values, learning rates), and
none of the code that splits models, divides losses and sums gradients.
"""

from __future__ import annotations

from .host import serve
from .recorder import Recorder, gradient_norm

__all__ = ["Recorder", "gradient_norm", "serve"]
