"""What follows from a journal's entries up to a place, as a value: it stands for all of them.

`RunBooks.of_image(image)` and the entries after the image's place come to what all entries come to.
"""

from __future__ import annotations

from .books import BooksImage, RunBooks
from .finished import FinishedRun

__all__ = ["BooksImage", "FinishedRun", "RunBooks"]
