"""Writer and reader for `torch.distributed.checkpoint`, in memory under `oobleck run`; see `docs/scripts.md`."""

from __future__ import annotations

from oobleck.training.dcp import Reader, Writer

__all__ = ["Reader", "Writer"]
