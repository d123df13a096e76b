"""Trains a job without Oobleck: `python -m oobleck.training.plain.job_host`."""

from __future__ import annotations

import sys

from .host import serve
from .job_loop import train_job

if __name__ == "__main__":
    sys.exit(serve(train_job))
