"""Writes a file that grows, for `examples/stream.yaml`: rows of bytes, from the sources of Python's standard library.

python examples/feed.py /tmp/oobleck-stream.bin --rows 2000 --rows-per-second 100
"""

from __future__ import annotations

import argparse
import itertools
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

ROW = 64
"""Tokens in a row: `data.sequence_length` of the job."""


def rows() -> Iterator[bytes]:
    """Yield text for ever, in rows of 64 bytes; a token is two bytes long, as `data.token_dtype` says."""
    while True:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            content = path.read_bytes()
            for start in range(0, len(content) - ROW + 1, ROW):
                yield b"".join(byte.to_bytes(2, "little") for byte in content[start : start + ROW])


def main() -> None:
    """Append rows until there are enough, then say that the file is complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rows-per-second", type=float, default=100.0)
    arguments = parser.parse_args()
    end = arguments.file.with_name(arguments.file.name + ".end")
    end.unlink(missing_ok=True)
    with arguments.file.open("wb", buffering=0) as file:
        for row in itertools.islice(rows(), arguments.rows):
            file.write(row)
            time.sleep(1.0 / arguments.rows_per_second)
    end.touch()


if __name__ == "__main__":
    main()
