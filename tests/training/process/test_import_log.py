"""Later ranks are forked from a server that has imported what the first ones did: installed packages, and safe ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from oobleck.training.process.import_log import ImportLog

LEARN = """
import sys
from pathlib import Path
from oobleck.training.process.import_log import Learner
learner = Learner(Path(sys.argv[1]), Path(sys.argv[2]))
learner.learn_all()
import os
print(*[name for name in sys.argv[3:] if name in sys.modules], os.environ.get("MARK"))
"""


def learned(tmp_path: Path, *names: str, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Learn what a log in a directory has, in a process of its own; it prints which of the names are there then."""
    command = [sys.executable, "-c", LEARN, str(tmp_path / "fork.imports"), str(tmp_path / "fork.warm"), *names]
    path = os.pathsep.join([str(Path(__file__).parents[3]), *([str(site)] if site else [])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def log(tmp_path: Path, *names: str, **environment: str) -> None:
    lines = [json.dumps({"name": name, "environment": environment}) for name in names]
    (tmp_path / "fork.imports").write_text("".join(f"{line}\n" for line in lines))


def test_a_log_has_what_was_looked_for_with_what_the_script_had_set(tmp_path: Path) -> None:
    noting = ImportLog(str(tmp_path / "fork.imports"))
    assert noting.find_spec("first") is None
    os.environ["OOBLECK_TEST_MARK"] = "set"
    try:
        noting.find_spec("second.part")
    finally:
        del os.environ["OOBLECK_TEST_MARK"]
    said = [json.loads(line) for line in (tmp_path / "fork.imports").read_text().splitlines()]
    assert said == [
        {"name": "first", "environment": {}},
        {"name": "second.part", "environment": {"OOBLECK_TEST_MARK": "set"}},
    ]


def test_what_is_installed_is_imported_and_what_is_not_there_is_passed_over(tmp_path: Path) -> None:
    log(tmp_path, "no_such_module", "wave", "msgpack.fallback", MARK="during")
    done = learned(tmp_path, "wave", "msgpack.fallback", "no_such_module")
    assert done.stdout == "wave msgpack.fallback None\n", done.stderr
    assert (tmp_path / "fork.warm").exists()


def test_a_scripts_own_modules_are_left_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    log(tmp_path, "own")
    assert learned(tmp_path, "own", site=tmp_path).stdout == "None\n"


def test_a_line_that_is_not_whole_is_not_read_yet(tmp_path: Path) -> None:
    log(tmp_path, "wave")
    with (tmp_path / "fork.imports").open("a") as file:
        file.write('{"name": "chu')
    assert learned(tmp_path, "wave").stdout == "wave None\n"


def test_a_package_that_starts_a_thread_ends_the_server_and_the_next_one_skips_it(tmp_path: Path) -> None:
    """It cannot be forked any more; it says why, and what it has not imported is imported by the next."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "threading_package.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, args=(9,), daemon=True).start()\n"
    )
    log(tmp_path, "threading_package", "wave")
    learn = LEARN.replace(
        "learner = ",
        f"import oobleck.training.process.import_log as log\nlog._installed = lambda: ['{site}/']\nlearner = ",
    )
    command = [sys.executable, "-c", learn, str(tmp_path / "fork.imports"), str(tmp_path / "fork.warm")]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3]}:{site}"}
    first, second = (
        subprocess.run(
            [*command, "wave", "threading_package"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for _ in range(2)
    )
    assert first.returncode == 1
    assert "threading_package has started what no fork takes along" in first.stderr
    assert not (tmp_path / "fork.warm").exists() or second.returncode == 0
    assert second.stdout == "wave None\n", second.stderr
