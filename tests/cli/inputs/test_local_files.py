"""Files that a job names are missed before virtual nodes start, and only those that this machine would have to have."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleck.cli.inputs import check_local_files
from oobleck.errors import ConfigError
from oobleck.job import CheckpointSpec, DataSpec


def test_what_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.paths: /nowhere does not exist on this machine"):
        check_local_files(DataSpec(paths=(str(tmp_path), "/nowhere")), CheckpointSpec())
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: \./nowhere does not exist"):
        check_local_files(DataSpec(tokenizer="./nowhere"), CheckpointSpec())


@pytest.mark.parametrize("tokenizer", ["gpt2", "org/name", "s3://bucket/tokenizer"])
def test_a_tokenizer_of_the_hub_or_at_a_url_is_left_to_the_nodes(tokenizer: str) -> None:
    check_local_files(DataSpec(paths=("s3://bucket/text",), tokenizer=tokenizer), CheckpointSpec())


@pytest.mark.parametrize(
    ("directory", "problem"),
    [("s3:/bucket/x", "a URL of s3 begins with s3://"), ("nosuch://a/b", "is no URL that fsspec knows")],
)
def test_a_place_of_checkpoints_that_cannot_be_one_is_refused_before_the_run(directory: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^checkpoint.directory: {directory}:? {problem}"):
        check_local_files(DataSpec(), CheckpointSpec(directory=directory))
    check_local_files(DataSpec(), CheckpointSpec(directory=directory, enabled=False))
