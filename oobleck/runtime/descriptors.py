"""The limit on the files and sockets that a process may have open."""

from __future__ import annotations

import resource

from oobleck.errors import ConfigError

_ENOUGH = 1 << 20  # more than any run needs; some programs that inherit the limit close every number below it
_OF_MASTER = 48
_PER_NODE = 2
_PER_VIRTUAL_NODE = 10  # both ends of its connections, and at times a command's pipes


def raise_descriptor_limit() -> int:
    """Raise the soft limit (`ulimit -S -n`) of this process and its children to the hard one; return the limit."""
    # The usual 1,024 are too few for connections to hundreds of nodes.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return soft if soft != resource.RLIM_INFINITY else limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def require_descriptors(limit: int, num_nodes: int, *, are_virtual: bool) -> None:
    """Raise ConfigError if `limit` open files are too few for a master of `num_nodes` nodes."""
    needed = _OF_MASTER + num_nodes * (_PER_VIRTUAL_NODE if are_virtual else _PER_NODE)
    if limit < needed:
        raise ConfigError(
            f"{num_nodes} nodes need {needed} open files in this process, and its limit (RLIMIT_NOFILE) is {limit}; "
            f"raise it by `ulimit -n {needed}`, or LimitNOFILE={needed} of the service that starts this (the hard one, "
            "`ulimit -Hn`, is set by the machine's administrator)"
        )
