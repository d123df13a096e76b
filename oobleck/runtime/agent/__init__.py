"""The agent's process, and what it starts on its node: workers, ranks, and the servers that fork them.

No other process imports these modules; others start the agent by the module name below. It starts on every node before
training can begin, so it loads the wire's messages but no journal, planner or coordinator.
"""

from __future__ import annotations

__all__ = ["AGENT_MODULE"]

AGENT_MODULE = "oobleck.runtime.agent.agent_process"
