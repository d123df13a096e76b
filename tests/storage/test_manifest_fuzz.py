"""Whatever stands in a manifest's file: it is read, or named as damaged; no reader fails, and none runs for ever."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oobleck.storage import CheckpointDirectory, Manifest, Shard, checkpoint_name
from oobleck.storage.directory import MANIFEST_NAME
from oobleck.wire import to_builtins
from tests.examples import examples

RUN = "5f3a9c1e"
NAME = checkpoint_name(RUN, step=120, generation=2)
WHOLE = Manifest(
    version=1,
    name=NAME,
    tag="fuzz",
    run=RUN,
    saved_at="2026-01-02T03:04:05+00:00",
    step=120,
    generation=2,
    loss=1.5,
    seed=1,
    global_batch_size=16,
    samples_seen=1920,
    data_digest="d",
    layer_names=("first", "last"),
    shards=tuple(
        Shard(layer=layer, file=f"layer-{layer:04d}.safetensors", size_bytes=4, sha256="0" * 64) for layer in (0, 1)
    ),
)

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1 << 31, 1 << 63, 10**400, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", ".", "..", "/", "a\0b", "../../etc/passwd", "x" * 5000, "\ud800", "2026-13-45"]),
    st.integers(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.fixture(name="directory", scope="module")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> CheckpointDirectory:
    directory = CheckpointDirectory(tmp_path_factory.mktemp("checkpoints"))
    (directory.path / NAME).mkdir()
    return directory


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A manifest in which some values are others, or are gone; then, maybe, cut off, or with other bytes in it."""
    root = {"manifest": json.loads(json.dumps(to_builtins(WHOLE)))}
    for _ in range(draw(st.integers(0, 3))):
        *parents, key = draw(st.sampled_from([place for place in places(root) if place]))
        holder: Any = root
        for each in parents:
            holder = holder[each]
        if draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = draw(odd)
        if "manifest" not in root:
            return b""
    text = json.dumps(root["manifest"]).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        text = text[: draw(st.integers(0, len(text)))] + draw(st.binary(max_size=4))
    return text


def read(directory: CheckpointDirectory, text: bytes) -> bool:
    """Have a manifest read by all that read one; returns whether it can be used. One that cannot is named."""
    (directory.path / NAME / MANIFEST_NAME).write_bytes(text)
    (found,) = directory.find()
    assert found.name == NAME
    if found.manifest is None:
        assert found.problem is not None
        assert str(directory.path / NAME / MANIFEST_NAME) in found.problem
        return False
    assert directory.layers_here(found.manifest) == ()
    assert len(list(directory.faults(found.manifest))) >= len(found.manifest.layer_names)
    return True


@settings(examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=damaged())
def test_a_damaged_manifest_is_named_and_nothing_fails(directory: CheckpointDirectory, text: bytes) -> None:
    read(directory, text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_parts", 10**9),
        *(("file", name) for name in ("a\0b", "\ud800", "x" * 5000, "", "..", "a/b", "a\nb")),
    ],
)
def test_a_manifest_that_no_file_system_can_follow_is_damaged(
    directory: CheckpointDirectory, key: str, value: object
) -> None:
    manifest = json.loads(json.dumps(to_builtins(WHOLE)))
    assert read(directory, json.dumps(manifest).encode())
    (manifest if key in manifest else manifest["shards"][0])[key] = value
    assert not read(directory, json.dumps(manifest).encode())
