from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from oobleck.errors import ConfigError
from oobleck.job import DataSpec
from oobleck.training.data.data import Dataset, prepare_dataset
from oobleck.training.data.samples import ModelInputs
from oobleck.training.data.script_data import ScriptSamples
from oobleck.training.data.text import read_documents
from oobleck.training.data.tokenizer import END_OF_TEXT_ID
from tests.examples import examples

TEXT = "It was the best of times, it was the worst of times; naïve 東京 _private 42\n\n    indented\t\n" * 40


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    directory = tmp_path / "text"
    (directory / "b").mkdir(parents=True)
    (directory / "b" / "one.txt").write_text(TEXT)
    (directory / "a.txt").write_text("The first one by name. " * 30)
    (directory / ".hidden").write_text("not this one")
    return DataSpec(paths=(str(directory),), sequence_length=16, vocab_size=400)


def test_samples_hold_the_text_and_nothing_else(spec: DataSpec, tmp_path: Path):
    dataset = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(dataset.source.tokenizer_path))
    tokens = dataset.source.samples.reshape(-1).tolist()
    documents, start = [], 0
    for position, token in enumerate(tokens):
        if token == END_OF_TEXT_ID:
            documents.append(tokenizer.decode(tokens[start:position]))
            start = position + 1
    rest = tokenizer.decode(tokens[start:])
    expected = [TEXT, "The first one by name. " * 30]
    assert documents[0] == read_documents(spec)[0]
    assert sorted(read_documents(spec)) == sorted(expected)
    assert read_documents(spec)[-1].startswith(rest)
    assert dataset.vocab_size == tokenizer.get_vocab_size() <= 400


def test_what_is_stored_is_what_the_saved_tokenizer_says(spec: DataSpec, tmp_path: Path):
    dataset = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(dataset.source.tokenizer_path))
    expected = [i for document in read_documents(spec) for i in [*tokenizer.encode(document).ids, END_OF_TEXT_ID]]
    assert dataset.source.samples.reshape(-1).tolist() == expected[: dataset.source.samples.size]
    assert len(expected) - dataset.source.samples.size < spec.sequence_length


def test_batches_are_the_samples_asked_for(spec: DataSpec, tmp_path: Path):
    dataset = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    batch = dataset.batch([2, 0])
    assert batch.input_ids.tolist() == [dataset.source.samples[2].tolist(), dataset.source.samples[0].tolist()]
    assert batch.labels.tolist() == batch.input_ids.tolist()
    assert batch.num_items == 2 * (spec.sequence_length - 1)


def test_a_second_call_reads_the_cache(spec: DataSpec, tmp_path: Path):
    first = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    written = first.source.tokenizer_path.stat().st_mtime_ns
    second = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    assert second.source.tokenizer_path.stat().st_mtime_ns == written
    assert second.digest == first.digest


def test_any_change_of_what_it_is_made_from_makes_another(spec: DataSpec, tmp_path: Path):
    cache = tmp_path / "cache"
    specs = [spec, replace(spec, sequence_length=17), replace(spec, vocab_size=300), replace(spec, max_bytes=2000)]
    datasets = [prepare_dataset(each, cache_dir=cache) for each in specs]
    Path(spec.paths[0], "a.txt").write_text("The first one by name! " * 30)
    datasets.append(prepare_dataset(spec, cache_dir=cache))
    assert len({dataset.digest for dataset in datasets}) == len(datasets)


def test_damage_is_noticed_and_repaired(spec: DataSpec, tmp_path: Path):
    cache = tmp_path / "cache"
    dataset = prepare_dataset(spec, cache_dir=cache)
    path = dataset.source.tokenizer_path.with_name("tokens.npy")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert prepare_dataset(spec, cache_dir=cache).digest == dataset.digest
    path.with_name("manifest.json").unlink()
    assert prepare_dataset(spec, cache_dir=cache).digest == dataset.digest


def _prepare(spec: DataSpec, cache: Path, results: multiprocessing.Queue[tuple[str, int]]) -> None:
    dataset = prepare_dataset(spec, cache_dir=cache)
    results.put((dataset.digest, dataset.source.tokenizer_path.stat().st_ino))


def test_of_processes_that_start_at_once_one_does_the_work(spec: DataSpec, tmp_path: Path):
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[str, int]] = context.Queue()
    processes = [context.Process(target=_prepare, args=(spec, tmp_path / "cache", results)) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert len(outcomes) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == [
        p.stem for p in (tmp_path / "cache").glob("*.lock")
    ]


def test_a_process_without_torch_can_make_it(spec: DataSpec, tmp_path: Path):
    fields = json.dumps({"paths": spec.paths, "sequence_length": 16, "vocab_size": 400})
    code = (
        "import runpy, sys; runpy.run_module('oobleck.training.data.corpus', run_name='__main__'); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "cache"), fields], check=True)
    made = {path.name for path in (tmp_path / "cache").iterdir()}
    dataset = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == made
    assert dataset.num_samples > 10


def test_the_last_document_is_cut_at_the_limit(spec: DataSpec):
    documents = read_documents(replace(spec, max_bytes=1000))
    assert sum(len(document.encode()) for document in documents) == pytest.approx(1000, abs=3)


def test_mistakes_are_named(spec: DataSpec, tmp_path: Path):
    with pytest.raises(ConfigError, match="/nowhere"):
        prepare_dataset(replace(spec, paths=("/nowhere",)), cache_dir=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="no text"):
        prepare_dataset(replace(spec, paths=(str(empty),)), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"100000"):
        prepare_dataset(replace(spec, sequence_length=100_000), cache_dir=tmp_path)


def test_the_standard_library_is_read_without_tests_and_packages():
    documents = read_documents(DataSpec(max_bytes=2_000_000))
    assert sum(len(document.encode()) for document in documents) >= 1_900_000
    assert not any("import pytest" in document for document in documents)


def test_json_lines_are_documents(tmp_path: Path):
    lines = [{"text": f"line {number}", "other": 1} for number in range(3)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_documents(DataSpec(paths=(str(path),))) == ["line 0", "line 1", "line 2"]
    with pytest.raises(ConfigError, match=r"text\.jsonl:1: .*'content'.*data\.text_column"):
        read_documents(DataSpec(paths=(str(path),), text_column="content"))
    path.write_text('{"text": "good"}\n{bad')
    with pytest.raises(ConfigError, match=r"text\.jsonl:2: not JSON"):
        read_documents(DataSpec(paths=(str(path),)))


def test_token_files_are_mapped_and_cut_into_samples(tmp_path: Path):
    np.arange(40, dtype="<u2").tofile(tmp_path / "one.bin")
    np.save(tmp_path / "two.npy", np.arange(100, 127, dtype=np.int32))
    data = DataSpec(paths=(str(tmp_path / "one.bin"), str(tmp_path / "two.npy")), sequence_length=8, vocab_size=300)
    dataset = prepare_dataset(data, cache_dir=tmp_path / "cache")
    assert dataset.num_samples == 5 + 3
    assert dataset.vocab_size == 300
    assert dataset.batch([6, 0, 4]).input_ids.tolist() == [
        list(range(108, 116)),
        list(range(8)),
        list(range(32, 40)),
    ]
    assert not (tmp_path / "cache").exists(), "nothing is copied"
    assert dataset.digest == prepare_dataset(data, cache_dir=tmp_path).digest
    assert dataset.digest != prepare_dataset(replace(data, sequence_length=4), cache_dir=tmp_path).digest


def test_mistakes_about_token_files_are_named(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    np.arange(2000, dtype="<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "floats.npy", np.ones(100))

    def prepare(*names: str, **options: Any) -> Dataset:
        return prepare_dataset(
            DataSpec(paths=tuple(str(tmp_path / name) for name in names), **options), cache_dir=tmp_path
        )

    with pytest.raises(ConfigError, match=r"text and tokens"):
        prepare("a.txt", "a.bin")
    with pytest.raises(ConfigError, match=r"floats\.npy.*float64"):
        prepare("floats.npy")
    with pytest.raises(ConfigError, match=r"2000 tokens.*5000"):
        prepare("a.bin", sequence_length=5000)
    with pytest.raises(ConfigError, match=r"token 1023.*data\.vocab_size is 1000"):
        prepare("a.bin", vocab_size=1000).batch([15])
    with pytest.raises(ConfigError, match=r"none\.bin"):
        prepare("none.bin")


@examples(40)
@given(num_samples=st.integers(2, 400), share=st.floats(0.001, 0.9), step=st.integers(0, 9))
def test_the_split_keeps_every_sample_on_one_side(num_samples: int, share: float, step: int):
    source = ScriptSamples(
        lambda: np.arange(num_samples)[:, None] + np.zeros((1, 3), np.int64), sequence_length=3, vocab_size=500
    )
    if max(1, int(share * num_samples)) >= num_samples:
        return
    train, validation = Dataset(source).split(share)
    assert validation is not None
    sides = [side.batch(range(side.num_samples), step=step).input_ids[:, 0].tolist() for side in (train, validation)]
    assert sorted(sides[0] + sides[1]) == list(range(num_samples))
    assert len(sides[1]) == max(1, int(share * num_samples))


def test_masked_samples_are_a_function_of_seed_step_and_sample_with_a_fixed_number_of_labels(
    spec: DataSpec, tmp_path: Path
):
    dataset = prepare_dataset(spec, cache_dir=tmp_path).with_masking(probability=0.25, seed=3)
    plain = prepare_dataset(spec, cache_dir=tmp_path)
    assert dataset.vocab_size == plain.vocab_size + 1, "the mask is a token of its own"
    assert dataset.items_per_sample == 4
    samples = list(range(40))
    batch, original = dataset.batch(samples, step=5), plain.batch(samples).input_ids
    chosen = batch.labels != -100
    assert chosen.sum(dim=1).tolist() == [4] * 40
    assert batch.num_items == 160
    assert torch.equal(batch.labels[chosen], original[chosen])
    assert torch.equal(batch.input_ids[~chosen], original[~chosen])
    is_mask = batch.input_ids[chosen] == plain.vocab_size
    assert 0.7 < is_mask.float().mean() < 0.9
    assert (batch.input_ids[chosen] == original[chosen]).any(), "some stay as they are"
    one = dataset.batch([17], step=5)
    assert torch.equal(one.input_ids[0], batch.input_ids[17])
    assert not torch.equal(dataset.batch(samples, step=6).labels, batch.labels)


def test_a_tokenizer_from_a_file_is_taken_with_its_own_special_tokens(spec: DataSpec, tmp_path: Path):
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "</s>", "[MASK]"], vocab_size=300, show_progress=False)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    own = replace(spec, tokenizer=str(tmp_path))
    dataset = prepare_dataset(own, cache_dir=tmp_path / "cache")
    expected = [token for text in read_documents(own) for token in [*tokenizer.encode(text).ids, 1]]
    assert dataset.source.rows(range(dataset.num_samples)).reshape(-1).tolist() == expected[: dataset.num_samples * 16]
    assert dataset.vocab_size == tokenizer.get_vocab_size()
    assert dataset.with_masking(probability=0.2, seed=0).vocab_size == dataset.vocab_size, "it has a mask already"
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        prepare_dataset(replace(spec, tokenizer=str(tmp_path / "none")), cache_dir=tmp_path)


def test_a_torn_tokenizer_is_named_with_what_is_wrong(spec: DataSpec, tmp_path: Path):
    torn = tmp_path / "tokenizer.json"
    torn.write_text('{"version": "1.0", "model": {"type": "BPE"')
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*tokenizer\.json.*EOF"):
        prepare_dataset(replace(spec, tokenizer=str(torn)), cache_dir=tmp_path / "cache")


def test_a_script_whose_data_fails_is_told_so_with_its_error():
    with pytest.raises(ConfigError, match=r"the script's data: KeyError: 'train'"):
        ScriptSamples(lambda: {}["train"], sequence_length=2, vocab_size=10)


def test_what_a_script_makes_is_checked():
    def source(value: Any) -> ScriptSamples:
        return ScriptSamples(lambda: value, sequence_length=2, vocab_size=10)

    batch = Dataset(source([{"input_ids": [1, 2]}, {"input_ids": torch.tensor([3, 4])}])).batch([1, 0])
    assert batch.input_ids.tolist() == [[3, 4], [1, 2]]
    for value, message in [([], "it has no samples"), (5, "it has no length; say streaming=True")]:
        with pytest.raises(ConfigError, match=message):
            source(value)


def test_a_sample_that_cannot_be_had_is_told_by_its_number():
    class Broken:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> list[int]:
            if index == 2:
                raise RuntimeError("gone")
            return [1, 2]

    for samples, words in (
        (Broken(), "sample 2: RuntimeError: gone"),
        ([{"tokens": [1, 2]}], "sample 0: KeyError: 'input_ids'"),
    ):
        with pytest.raises(ConfigError, match=words):
            Dataset(ScriptSamples(lambda samples=samples: samples, sequence_length=2, vocab_size=10)).with_inputs(
                ModelInputs()
            )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"labels": [1, 2]}, r"a\.jsonl:2: its column 'labels' would be dropped"),
        ({"attention_mask": [1, 0]}, r"a\.jsonl:2: its column 'attention_mask'"),
        ({"label": [0, 1]}, r"a\.jsonl:2: its column 'label'"),
        ({"label": 1, "labels": "spam"}, None),
    ],
)
def test_labels_for_each_token_of_a_line_are_refused_and_those_of_a_text_are_not(
    row: dict[str, object], words: str | None, tmp_path: Path
):
    rows = ({"text": "one"}, {"text": "two"} | row)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    spec = DataSpec(paths=(str(path),))
    if words is None:
        assert read_documents(spec) == ["one", "two"]
    else:
        with pytest.raises(ConfigError, match=words):
            read_documents(spec)


@pytest.mark.slow
def test_eight_megabytes_take_seconds(tmp_path: Path):
    start = time.process_time()
    dataset = prepare_dataset(DataSpec(), cache_dir=tmp_path)
    elapsed = time.process_time() - start
    assert dataset.vocab_size == DataSpec().vocab_size
    assert dataset.num_samples > 10_000
    assert elapsed < 20, f"{elapsed:.1f} s of CPU"
    manifest = json.loads(dataset.source.tokenizer_path.with_name("manifest.json").read_text())
    assert manifest["digest"] == dataset.digest
    assert int(np.max(dataset.source.samples)) < dataset.vocab_size
