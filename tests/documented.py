"""The commands that a user is shown: in README.md, in docs/, and as examples of `--help`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from oobleck.cli.main import COMMANDS, CliCommand

__all__ = ["PAGES", "command_path", "documented_commands"]

_ROOT = Path(__file__).parents[1]
PAGES = (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:oobleck|python|make) [^`]+)`")
_PROGRAMS = ("oobleck ", "python ", "make ", "pip ")


def documented_commands() -> tuple[str, ...]:
    """Every command line, without its comment, once; `…` stands for words that the page leaves out."""
    found = [line for path in PAGES for line in _of_page(path.read_text(encoding="utf-8"))]
    found += [line for command in COMMANDS for line in _of_help(command)]
    return tuple(sorted({shlex.join(shlex.split(line, comments=True)) for line in found}))


def command_path(words: Sequence[str]) -> tuple[str, ...]:
    """Those of the words after `oobleck` that name the command: `trace generate`, for instance."""
    path: list[str] = []
    commands = COMMANDS
    for word in words[1:]:
        named = next((command for command in commands if command.name == word), None)
        if named is None:
            break
        path.append(word)
        commands = named.subcommands
    return tuple(path)


def _of_page(text: str) -> Iterator[str]:
    for block in _FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip().startswith(_PROGRAMS):
                yield line.strip()
    yield from _INLINE.findall(_FENCE.sub("", text).replace("\n", " "))


def _of_help(command: CliCommand) -> Iterator[str]:
    yield from (line for line, _ in command.examples)
    for each in command.subcommands:
        yield from _of_help(each)
