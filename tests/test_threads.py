"""A cancelled task waits for no thread: each call that runs in one is abandoned, or listed with what ends it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import oobleck

PACKAGE = Path(oobleck.__file__).parent
WAITED_FOR = {
    "runtime/agent/ranks.py": "removes logs, of which the next agent writes new ones",
    "runtime/control_socket.py": "binds a socket, which is then closed; its question has a timeout",
    "ui/terminal.py": "sets the terminal, which is then set back",
}
"""Files with one call that is waited for. Anything else may hang in a driver or on a lost network disk."""


def threads_waited_for(path: Path) -> int:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    # `partial(trio.to_thread.run_sync, …)` names it too.
    run = [
        call
        for call in calls
        if any(ast.unparse(named).endswith("to_thread.run_sync") for named in (call.func, *call.args[:1]))
    ]
    return sum(not any(keyword.arg == "abandon_on_cancel" for keyword in call.keywords) for call in run)


def test_a_thread_that_a_cancelled_task_waits_for_is_listed_with_what_ends_it() -> None:
    found = {str(path.relative_to(PACKAGE)): threads_waited_for(path) for path in PACKAGE.rglob("*.py")}
    assert Counter(found) == Counter(WAITED_FOR.keys())
