"""What keys do on a dashboard: scroll, help, and requests to the run, of which those that end something are confirmed.

    watching ── ? ──> help ── any key ──> watching
        ├── k, d ──> choosing a node ── Enter ──> confirming ── y ──> request, watching
        └── s ─────────────────────────────────────^    └── any other key, and Esc anywhere ──> watching

Pure: a key and the nodes' names lead to the next state, and perhaps to a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_NAMED_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1b[F": "end", "\x1b[4~": "end", "\x1b": "escape", "\r": "enter", "\n": "enter", "\t": "down", "\x7f": "erase",
    "\b": "erase",
}  # fmt: skip
_PAGE = 10
_QUESTIONS = {
    "kill": "kill {} at once, as if its power failed?",
    "drain": "drain {}: it hands its state over, and leaves?",
    "stop": "stop the run after the step in flight?{}",
}

HELP = (
    ("↑ ↓, Page Up, Page Down", "earlier and later events; End: the newest again"),
    ("k, d", "kill a node, to see a recovery; drain a node"),
    ("s", "stop the run after the step in flight"),
    ("q", "leave this screen; the run continues"),
    ("Ctrl-C", "`oobleck up`: stop; otherwise leave this screen"),
    ("Ctrl-Z", "suspend this process; `fg` returns to it"),
)
LEGEND = (
    ("×N", "microbatches of a pipeline; devices of a node"),
    ("… ~ ✗", "a stage starts, waits for a new plan, is lost"),
    ("f", "nodes that may be lost together without loss of state"),
    ("generation", "plans so far; each loss or join makes a new one"),
    ("recoveries", "changes that a fault caused, and no planned ones"),
    ("goodput", "share of the time in which steps were computed"),
    ("cpu, mem, gpu", "what a node's processes use of what it has"),
    ("seconds after a node", "when it was last heard"),
)
"""Short enough for a page of 80 columns and 24 lines."""


class Mode(StrEnum):
    WATCHING = "watching"
    HELP = "help"
    CHOOSING = "choosing"
    CONFIRMING = "confirming"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user wants of the run: to `kill` or `drain` a node, or to `stop`, which concerns no node."""

    what: str
    node: str = ""


class Quit:
    """The user leaves the dashboard; the run continues."""


def keys_in(text: str) -> list[str]:
    """Split what a terminal sends into keys: characters, and names for those that have none."""
    keys: list[str] = []
    while text:
        named = max((each for each in _NAMED_KEYS if text.startswith(each)), key=len, default=None)
        # A sequence of another key, such as F5, is no key here, and not Escape followed by letters.
        if named == "\x1b" and len(text) > 1:
            return keys
        keys.append(_NAMED_KEYS[named] if named else text[0])
        text = text[len(named or text[0]) :]
    return keys


@dataclass(slots=True)
class Controls:
    """What the user is doing at a dashboard."""

    mode: Mode = Mode.WATCHING
    what: str = ""
    """kill, drain or stop, while a node is chosen or the request confirmed."""
    typed: str = ""
    node: str = ""
    """The chosen node."""
    scrolled: int = 0
    """How many of the newest events are below the screen."""
    message: str = ""
    """What the last request came to; the next key removes it."""

    def press(self, key: str, nodes: Sequence[str], num_events: int) -> Wish | Quit | None:
        """Take a key; `nodes` are those that can be chosen."""
        self.message = ""
        match self.mode:
            case Mode.WATCHING:
                return self._watch(key, num_events)
            case Mode.HELP:
                self.mode = Mode.WATCHING
            case Mode.CHOOSING:
                self._choose(key, nodes)
            case Mode.CONFIRMING:
                self.mode = Mode.WATCHING
                return Wish(self.what, self.node) if key in ("y", "Y") else None
        return None

    def matching(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes that what was typed fits."""
        return [node for node in nodes if self.typed in node]

    @property
    def question(self) -> str:
        return _QUESTIONS[self.what].format(self.node)

    def _watch(self, key: str, num_events: int) -> Quit | None:
        match key:
            case "q":
                return Quit()
            case "?" | "h":
                self.mode = Mode.HELP
            case "k" | "d":
                self.mode, self.what = Mode.CHOOSING, "kill" if key == "k" else "drain"
                self.typed = self.node = ""
            case "s":
                self.mode, self.what, self.node = Mode.CONFIRMING, "stop", ""
            case "up" | "down" | "page up" | "page down":
                by = (_PAGE if key.startswith("page") else 1) * (1 if key.endswith("up") else -1)
                self.scrolled = max(0, min(num_events - 1, self.scrolled + by))
            case "end":
                self.scrolled = 0
        return None

    def _choose(self, key: str, nodes: Sequence[str]) -> None:
        found = self.matching(nodes)
        if key == "escape":
            self.mode = Mode.WATCHING
        elif key in ("up", "down") and found:
            place = found.index(self.node) if self.node in found else 0
            self.node = found[(place + (1 if key == "down" else -1)) % len(found)]
        elif key == "enter" and found:
            self.node = self.node if self.node in found else found[0]
            self.mode = Mode.CONFIRMING
        elif key == "erase":
            self.typed = self.typed[:-1]
        elif len(key) == 1 and key.isprintable():
            self.typed += key
