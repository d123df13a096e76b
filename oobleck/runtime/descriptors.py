"""How many files and sockets a process may have open at once."""

from __future__ import annotations

import resource

__all__ = ["raise_descriptor_limit"]

_ENOUGH = 1 << 20
"""More than anybody uses; some programs that inherit the limit walk through all that it allows."""


def raise_descriptor_limit() -> int:
    """Let this process, and those that it starts, have as many as it may allow itself; returns how many.

    The usual 1,024 (`ulimit -S -n`) are few for somebody who is connected with hundreds of others; what an
    administrator allows at most (`ulimit -H -n`) stays as it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft if soft != resource.RLIM_INFINITY else wanted
