"""The agent's process, and what it starts on its node: workers, ranks, and the servers that fork them.

Nothing but this process is built of these modules: others start it, by the name that is given out here. It starts on
every node before anything can train there, so it loads the wire's messages and no journal, planner or coordinator.
"""

from __future__ import annotations

__all__ = ["AGENT_MODULE"]

AGENT_MODULE = "oobleck.runtime.agent.agent_process"
