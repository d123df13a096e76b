"""`python -m oobleck` is `oobleck`."""

from __future__ import annotations

import sys

from oobleck.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
