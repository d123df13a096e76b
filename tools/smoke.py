"""One word for all scripts here: `--smoke` does everything that a script does, once, as small as it can be.

What it prints then measures nothing. It shows that the script still runs, and a test runs each of them so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["parse_arguments"]


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, **smallest: object
) -> argparse.Namespace:
    """Parse a command line whose options have `smallest` for defaults where it says `--smoke`."""
    parser.add_argument("--smoke", action="store_true", help="do everything once, as small as it can be: for tests")
    given = parser.parse_args(arguments)
    if not given.smoke:
        return given
    assert smallest.keys() <= vars(given).keys(), (
        f"no options are called {sorted(smallest.keys() - vars(given).keys())}"
    )
    parser.set_defaults(**smallest)
    return parser.parse_args(arguments)
