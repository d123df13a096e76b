"""Files and directories: a run's and an agent's own, inputs, files of lines, and ids of processes."""

from __future__ import annotations

from .agent_dir import (
    MEMORY_OWNER,
    ONLY_COPY,
    AgentDir,
    answer_command,
    clean_command,
    end_command,
    forget_command,
    is_alive_command,
    kill_command,
    signal_command,
    slow_command,
)
from .input_file import MAX_DATA_BYTES, read_input
from .line_file import LineFile
from .private_paths import private_directory
from .process_id import ProcessId
from .run_dir import (
    BASE_DIR_VARIABLE,
    LAUNCHED_DIRECTORY,
    MAX_SOCKET_PATH_BYTES,
    RunDirectory,
    default_base_dir,
    default_tag,
)

__all__ = [
    "BASE_DIR_VARIABLE",
    "LAUNCHED_DIRECTORY",
    "MAX_DATA_BYTES",
    "MAX_SOCKET_PATH_BYTES",
    "MEMORY_OWNER",
    "ONLY_COPY",
    "AgentDir",
    "LineFile",
    "ProcessId",
    "RunDirectory",
    "answer_command",
    "clean_command",
    "default_base_dir",
    "default_tag",
    "end_command",
    "forget_command",
    "is_alive_command",
    "kill_command",
    "private_directory",
    "read_input",
    "signal_command",
    "slow_command",
]
