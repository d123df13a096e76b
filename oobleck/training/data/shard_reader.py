"""What every shard answers, whatever it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Records that come one after the other: record i lies in [bounds[i], bounds[i + 1])."""

    bounds: tuple[int, ...]
    """The first is where it was asked from. Positions are whole numbers of at most 63 bits."""
    items: tuple[int, ...] = ()
    """Tokens that each record predicts; empty where all are as long as samples are."""
    is_end: bool = False
    """Nothing comes after them, ever."""


class ShardReader(Protocol):
    """A shard. What was said of a position stays true as long as records are read from there, or gone back to."""

    def survey(self, start: int, limit: int) -> Extent:
        """Return the records that begin at `start`, at most `limit`; 0 is the beginning. Raises ShardUnreadable."""
        ...

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return one record, [length], with -1 where it has no token any more. Raises ShardUnreadable."""
        ...
