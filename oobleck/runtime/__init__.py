"""The real world: SSH, processes, files. It implements the ports of `roles`; `sim` is its twin."""
