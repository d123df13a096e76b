"""Posts what happens in a run to a URL, as Slack's incoming webhooks take it: `{"text": "…"}`.

Nothing that the other side does ends a run, or delays it by more than some seconds at its end: messages wait in a queue
of its own, and those that it refuses are dropped after some tries.
"""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from collections import deque
from http.client import HTTPException

import trio

from oobleck.control import journal

_log = logging.getLogger("oobleck.up")

_MOST_WAITING = 100
_TIMEOUT_S = 5.0
_WAITS_S = (1.0, 5.0)
_LAST_WORDS_S = 10.0
_MOST_CHARS = 2000
_TOLD = journal.JobStarted | journal.JobEnded | journal.RecoveryDone | journal.MasterResumed


class Webhook:
    """Tells one URL of a run's start, end, recoveries, warnings and errors; `run` must be running."""

    def __init__(self, url: str, tag: str) -> None:
        self._url = url
        self._tag = tag
        self._waiting: deque[str] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._failed = False
        self._is_ending = False
        self._posting = trio.CancelScope(shield=True)

    def tell(self, entry: journal.JournalEntry) -> None:
        """Queue an entry, without waiting."""
        if not isinstance(entry, _TOLD) and entry.level not in ("warning", "error"):
            return
        if len(self._waiting) == _MOST_WAITING:
            self._complain("it takes messages too slowly")
            return
        self._waiting.append(f"{self._tag}: {entry.sentence}"[:_MOST_CHARS])
        self._lot.unpark_all()

    async def run(self) -> None:
        """Post until cancelled, and then what still waits, for some seconds."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._post)
            try:
                await trio.sleep_forever()
            finally:
                self._is_ending = True
                self._posting.deadline = trio.current_time() + _LAST_WORDS_S
                self._lot.unpark_all()

    async def _post(self) -> None:
        # A delivery that is under way as the run ends goes on: given up then, it would be lost, or sent twice.
        with self._posting:
            while True:
                while self._waiting:
                    await self._deliver(self._waiting[0])
                    self._waiting.popleft()
                if self._is_ending:
                    break
                await self._lot.park()
        if self._posting.cancelled_caught:
            self._complain("it took too long as the run ended")

    async def _deliver(self, text: str) -> None:
        for wait_s in (*_WAITS_S, None):
            problem = await trio.to_thread.run_sync(_posted, self._url, text, abandon_on_cancel=True)
            if problem is None:
                return
            if wait_s is not None:
                await trio.sleep(wait_s)
        self._complain(problem or "")

    def _complain(self, problem: str) -> None:
        # Once: the journal has all that it misses. The URL is a secret.
        if not self._failed:
            self._failed = True
            _log.warning("control.webhook_url: messages are not delivered: %s", problem)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would follow it without the message, and take the answer for a delivery."""

    def redirect_request(self, *_: object) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)


def _posted(url: str, text: str) -> str | None:
    """Post a text; return what went wrong."""
    body = json.dumps({"text": text}).encode()
    try:
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})  # noqa: S310  http or https, as `ControlSpec` has checked
        with _opener.open(request, timeout=_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}" + (", a redirect: name its target" if 300 <= error.code < 400 else "")
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
