"""Takes secrets out of a process's log."""

from __future__ import annotations

import logging
from collections.abc import Callable


class _Filter(logging.Filter):
    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__()
        self._hide = hide

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._hide(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.exc_text = record.exc_text and self._hide(record.exc_text)
        return True


def hide_in_log(hide: Callable[[str], str]) -> None:
    """Have all handlers of the root logger write records as `hide` returns them."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Filter(hide))
