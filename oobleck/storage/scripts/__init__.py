"""States that a script saves by itself under `oobleck run`: each rank's part, and the choice of the state to load.

A *part* is what one rank saves of a state: a tree of values, the replicated tensors, and its own pieces of sharded
ones. Nothing here loads torch.
"""

from __future__ import annotations

from .choice import Chosen, Holding, LostState, Source, choose, sources
from .identity import SCRIPT_VARIABLE, ScriptIdentity, identity_of
from .kept import SLOTS_TO_COPY, Kept, bad_in, kept_in, note_bad, note_kept
from .part import (
    COPIES_VARIABLE,
    DIRECTORY_VARIABLE,
    GRACE_VARIABLE,
    LOCAL_RANK_VARIABLE,
    MEMORY_VARIABLE,
    SAVED_VARIABLE,
    START_VARIABLE,
    TREE,
    Part,
    PartNote,
    Tensors,
    copy_start,
    copy_stem,
    find_parts,
    is_taken,
    make_room_for_taken,
    memory_stem,
    note_of,
    note_taken,
    remove_old,
    start_name,
    start_number,
    state_name,
    write_part,
)
from .shards import Box, Sharding, is_covered, overlap, resharded
from .values import TreeNode, from_tree, to_tree

__all__ = [
    "COPIES_VARIABLE",
    "DIRECTORY_VARIABLE",
    "GRACE_VARIABLE",
    "LOCAL_RANK_VARIABLE",
    "MEMORY_VARIABLE",
    "SAVED_VARIABLE",
    "SCRIPT_VARIABLE",
    "SLOTS_TO_COPY",
    "START_VARIABLE",
    "TREE",
    "Box",
    "Chosen",
    "Holding",
    "Kept",
    "LostState",
    "Part",
    "PartNote",
    "ScriptIdentity",
    "Sharding",
    "Source",
    "Tensors",
    "TreeNode",
    "bad_in",
    "choose",
    "copy_start",
    "copy_stem",
    "find_parts",
    "from_tree",
    "identity_of",
    "is_covered",
    "is_taken",
    "kept_in",
    "make_room_for_taken",
    "memory_stem",
    "note_bad",
    "note_kept",
    "note_of",
    "note_taken",
    "overlap",
    "remove_old",
    "resharded",
    "sources",
    "start_name",
    "start_number",
    "state_name",
    "to_tree",
    "write_part",
]
