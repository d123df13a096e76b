"""Pictures that commands write: SVG as it is, PNG where its package is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oobleck.errors import UsageError
from oobleck.host.writing import write_in_place


def picture_writer(path: Path) -> Callable[[str], None]:
    """Check before any work whether a picture can be drawn there; return what writes one, given its SVG."""
    suffix = path.suffix.lower()
    if suffix == ".svg":
        return lambda svg: write_output(path, svg.encode())
    if suffix != ".png":
        raise UsageError(f"--plot is {path}; its ending must be .svg or .png")
    try:
        import cairosvg
    except ImportError as error:
        raise UsageError(
            f"--plot {path}: a PNG needs CairoSVG: pip install 'oobleck[plot]', or name an .svg file"
        ) from error
    return lambda svg: write_output(path, cairosvg.svg2png(bytestring=svg.encode()))


def write_output(path: Path, content: bytes) -> None:
    """Write a file that the command line names. Raises UsageError that says why it cannot be."""
    try:
        write_in_place(path, content)
    except OSError as error:
        raise UsageError(f"{path}: {error}") from error
