"""Files and directories: a run's and an agent's own, inputs, files of lines, and ids of processes."""

from __future__ import annotations

from .agent_dir import (
    MEMORY_OWNER,
    ONLY_COPY,
    RUN_ENVIRONMENT,
    AgentCommands,
    AgentDir,
    end_here,
    remove_states,
)
from .input_file import MAX_DATA_BYTES, read_input
from .line_file import MAX_WAITING_BYTES, LineFile
from .node_logs import NodeLogs, agent_log, parse_list, path_in_shell
from .private_paths import private_directory
from .process_id import ProcessId, stat_fields
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
    "MAX_WAITING_BYTES",
    "MEMORY_OWNER",
    "ONLY_COPY",
    "RUN_ENVIRONMENT",
    "AgentCommands",
    "AgentDir",
    "LineFile",
    "NodeLogs",
    "ProcessId",
    "RunDirectory",
    "agent_log",
    "default_base_dir",
    "default_tag",
    "end_here",
    "parse_list",
    "path_in_shell",
    "private_directory",
    "read_input",
    "remove_states",
    "stat_fields",
]
