"""A process's own surroundings, which nobody decides about: its script, its streams, paths, writes and limits."""
