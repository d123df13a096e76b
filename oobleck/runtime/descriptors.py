"""How many files and sockets a process may have open at once."""

from __future__ import annotations

import resource

from oobleck.errors import ConfigError

_ENOUGH = 1 << 20  # more than anybody uses; some programs that inherit the limit walk through all that it allows
_OF_ITS_OWN = 48  # what a master has open beside its nodes: files, pipes, and some to spare
_A_NODE = 2
_A_VIRTUAL_NODE = 10  # both ends of its connections are here, and a command's pipes now and then


def raise_descriptor_limit() -> int:
    """Let this process, and those that it starts, have as many as it may allow itself; returns how many.

    The usual 1,024 (`ulimit -S -n`) are few for somebody who is connected with hundreds of others; what an
    administrator allows at most (`ulimit -H -n`) stays as it is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def require_descriptors(limit: int, num_nodes: int, *, are_virtual: bool) -> None:
    """Raise ConfigError where a master that may open `limit` files cannot be connected with all of its nodes."""
    needed = _OF_ITS_OWN + num_nodes * (_A_VIRTUAL_NODE if are_virtual else _A_NODE)
    if limit < needed:
        raise ConfigError(
            f"{num_nodes} nodes need {needed} open files in this process, and its limit (RLIMIT_NOFILE) is {limit}; "
            f"raise it by `ulimit -n {needed}`, or LimitNOFILE={needed} of the service that starts this (the hard one, "
            "`ulimit -Hn`, is set by the machine's administrator)"
        )
