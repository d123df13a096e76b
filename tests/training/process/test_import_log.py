"""What ranks import is noted in memory, with what the script had set, and read line by whole line."""

from __future__ import annotations

import os

from oobleck.training.process.import_log import ImportLog, LogReader, Lookup, make_log


def test_a_log_has_what_was_looked_for_with_what_the_script_had_set() -> None:
    log = make_log()
    noting = ImportLog(log)
    assert noting.find_spec("first") is None
    os.environ["OOBLECK_TEST_MARK"] = "set"
    try:
        noting.find_spec("second.part")
    finally:
        del os.environ["OOBLECK_TEST_MARK"]
    reader = LogReader(log)
    assert list(reader.read(reader.size_bytes)) == [
        Lookup(name="first", environment={}),
        Lookup(name="second.part", environment={"OOBLECK_TEST_MARK": "set"}),
    ]


def test_what_was_read_is_not_read_again_and_a_line_that_is_not_whole_is_left() -> None:
    log = make_log()
    reader = LogReader(log)
    os.write(log, b'{"name": "one", "environment": {}}\n{"name": "tw')
    assert [each.name for each in reader.read(reader.size_bytes)] == ["one"]
    assert list(reader.read(reader.size_bytes)) == []
    os.write(log, b'o", "environment": {}}\n')
    assert [each.name for each in reader.read(reader.size_bytes)] == ["two"]


def open_files() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def inode_of(file: int) -> tuple[int, int] | None:
    try:
        stat = os.fstat(file)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def test_a_log_that_the_script_has_closed_is_written_no_more_nor_what_has_its_number_then(
    tmp_path: os.PathLike[str],
) -> None:
    log = make_log()
    noting = ImportLog(log)
    inode = inode_of(log)
    (number,) = (file for file in open_files() if file != log and inode_of(file) == inode)
    os.close(number)
    noting.find_spec("unheard")
    own = os.open(os.path.join(tmp_path, "own"), os.O_RDWR | os.O_CREAT)
    os.dup2(own, number)
    noting.find_spec("unheard")
    assert os.fstat(own).st_size == 0
    assert LogReader(log).size_bytes == 0
    for file in {own, number}:
        os.close(file)
    os.close(log)


def test_a_forked_process_of_the_script_notes_nothing() -> None:
    log = make_log()
    noting = ImportLog(log)
    if (pid := os.fork()) == 0:
        noting.find_spec("child")
        os._exit(0)
    os.waitpid(pid, 0)
    assert LogReader(log).size_bytes == 0
