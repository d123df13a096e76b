"""The surroundings of a process: its script, its streams, paths, writes and limits. Nothing here decides anything."""
