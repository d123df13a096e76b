"""The gate of a frozen process or stream end."""

from __future__ import annotations

import trio


class Gate:
    def __init__(self) -> None:
        self._opened: trio.Event | None = None

    @property
    def is_closed(self) -> bool:
        return self._opened is not None

    def close(self) -> None:
        if self._opened is None:
            self._opened = trio.Event()

    def open(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set()

    async def passed(self) -> None:
        """Wait while the gate is closed; an open one is no checkpoint."""
        while self._opened is not None:
            await self._opened.wait()
