"""Converting checkpoints without loading torch into this process: a process of its own does it."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from oobleck.errors import ConfigError, ResourceLost
from oobleck.host.writing import write_in_place
from oobleck.runtime.python_process import module_command

_TOKENIZER = "tokenizer.json"


def convert(what: str, source: Path, target: Path) -> str:
    """Run `hf` or `peft`, which export, or `import`, from one path to another; returns what it said.

    Takes as long as it takes.
    Raises ConfigError for input that cannot be used, ResourceLost when the process fails.
    """
    command = module_command("oobleck.training.checkpoint.conversion", what, str(source), str(target))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    last_line = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if done.returncode == 78:
        raise ConfigError(last_line)
    if done.returncode != 0:
        raise ResourceLost(f"the checkpoint could not be converted: {last_line}")
    return done.stdout.strip()


def find_tokenizer(cache_dir: Path, data_digest: str) -> Path | None:
    """Find the tokenizer that text of this digest was cut with, in a cache that training has filled."""
    for manifest in cache_dir.glob("*/manifest.json") if data_digest else ():
        with suppress(OSError, ValueError, KeyError, TypeError):  # another writes it, or it is of another version
            found = manifest.with_name(_TOKENIZER)
            if json.loads(manifest.read_bytes())["digest"] == data_digest and found.is_file():
                return found
    return None


def write_tokenizer(source: Path, target: Path) -> None:
    """Put a tokenizer where transformers' AutoTokenizer looks for it. Raises ResourceLost."""
    try:
        shutil.copyfile(source, target / _TOKENIZER)
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        write_in_place(target / "tokenizer_config.json", text + "\n")
    except OSError as error:
        raise ResourceLost(f"the tokenizer could not be written to {target}: {error.strerror}") from error
