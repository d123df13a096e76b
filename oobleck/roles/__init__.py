"""The roles: master and agent as short trio coroutines.

They feed events to the pure machines and carry out what comes back. They touch the world only through the ports
in `master_ports.py` and `agent_ports.py`, which `runtime` and `sim` implement; they cannot tell which they have.
"""
