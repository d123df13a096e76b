"""Files: run directories, journals, metrics, profiles and checkpoints."""

from __future__ import annotations

from .agent_dir import (
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
from .journal_file import (
    JournalWriter,
    aside_of,
    put_back,
    read_entries,
    read_journal,
    read_losses,
    set_aside,
)
from .journal_image import read_image, remove_image, write_image
from .journal_reading import find_journal, follow_journal
from .line_file import LineFile
from .private_paths import private_directory
from .process_id import ProcessId
from .profile_files import ProfileFiles
from .run_dir import BASE_DIR_VARIABLE, MAX_SOCKET_PATH_BYTES, RunDirectory, default_base_dir

__all__ = [
    "BASE_DIR_VARIABLE",
    "MAX_DATA_BYTES",
    "MAX_SOCKET_PATH_BYTES",
    "ONLY_COPY",
    "AgentDir",
    "JournalWriter",
    "LineFile",
    "ProcessId",
    "ProfileFiles",
    "RunDirectory",
    "answer_command",
    "aside_of",
    "clean_command",
    "default_base_dir",
    "end_command",
    "find_journal",
    "follow_journal",
    "forget_command",
    "is_alive_command",
    "kill_command",
    "private_directory",
    "put_back",
    "read_entries",
    "read_image",
    "read_input",
    "read_journal",
    "read_losses",
    "remove_image",
    "set_aside",
    "signal_command",
    "slow_command",
    "write_image",
]
