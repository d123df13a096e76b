"""The pictures and traces that commands write: SVG as it is, PNG if its package is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from oobleck.errors import UsageError
from oobleck.host.writing import write_in_place

from .option_fields import option


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    panel: ClassVar[str] = "Output"

    plot: Path | None = option("--plot", "FILE", "Draw the result as .svg, or as .png with the plot extra.")
    chrome_trace: Path | None = option("--chrome-trace", "FILE", "Write the result as a trace for Perfetto.")

    def check(self) -> None:
        """Raise UsageError, before any work, if a picture of this name cannot be drawn."""
        suffix = self.plot.suffix.lower() if self.plot is not None else ".svg"
        if suffix not in (".svg", ".png"):
            raise UsageError(f"--plot is {self.plot}; its ending must be .svg or .png")
        if suffix == ".png":
            try:
                import cairosvg  # noqa: F401
            except ImportError as error:
                raise UsageError(
                    f"--plot {self.plot}: a PNG needs CairoSVG: pip install cairosvg, or name an .svg file"
                ) from error

    def write(self, svg: Callable[[], str], trace: Callable[[], str]) -> None:
        """Write the files that are named, of what these functions return. Raises UsageError."""
        if self.plot is not None:
            picture = svg().encode()
            if self.plot.suffix.lower() == ".png":
                import cairosvg

                picture = cairosvg.svg2png(bytestring=picture)
            write_output(self.plot, picture)
        if self.chrome_trace is not None:
            write_output(self.chrome_trace, trace().encode())


def write_output(path: Path, content: str | bytes, option: str = "") -> None:
    """Write a file that the command line names. Raises UsageError that names it, and the option."""
    try:
        write_in_place(path, content)
    except OSError as error:
        raise UsageError(f"{option}{': ' if option else ''}{path}: {error.strerror}") from error
