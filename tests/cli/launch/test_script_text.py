"""Jobs with functions: the script that finds the same functions again, in a process that has nothing of this one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from oobleck import Job
from oobleck.cli.launch.script_text import script_text
from oobleck.errors import ConfigError
from oobleck.host.script import run_script
from oobleck.job import ScriptSpec

from . import functions_of_jobs as functions


def again(job: object) -> Job:
    """What a worker makes of a job, but for the process."""
    text, arguments = script_text(job)  # type: ignore[arg-type]
    return run_script(ScriptSpec(name="job.py", source=text, arguments=arguments, directory="/nowhere"))


def test_functions_and_classes_of_a_module_are_imported_again():
    job = again(Job(model=functions.layers, data=functions.Samples, optimizer=functions.Samples.make, max_steps=7))
    assert job.made == {
        "model": functions.layers,
        "data": functions.Samples,
        "optimizer": functions.Samples.make,
    }
    assert job.settings == {"max_steps": 7, "model": {"type": "script"}}


def test_a_stream_stays_one():
    first = Job(data=functions.layers, streaming=True)
    job = again(first)
    assert (job.settings, job.provides) == (first.settings, ("data",))


def test_a_partial_function_has_its_arguments_again():
    job = again(Job(model=partial(functions.layers, 3, name="it's")))
    assert job.made["model"]() == (3, "it's")


def test_a_function_that_returns_the_job_may_make_what_it_likes():
    job = again(functions.make_job)
    assert job.made["lr_lambda"](4) == 2.0
    assert [type(each).__name__ for each in job.callbacks] == ["Callback"]


def inner() -> object:
    def nested() -> None: ...

    return nested


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            Job(model=lambda: [0]),
            r"model: .*<lambda> \(test_script_text.py:\d+\) is not at the top level of a file.*`def`",
        ),
        (Job(data=inner()), r"data: inner.<locals>.nested \(.*\) is not at the top level"),  # type: ignore[arg-type]
        (Job(data=[].copy), "data: list.copy is an object of this process alone"),
        (Job(data=functions.Samples().get), r"data: Samples.get.* is not at the top level"),
        (Job(callbacks=[object()]), "callbacks: these objects live in this process alone"),
        (
            Job(model=partial(functions.layers, object())),
            "model: an argument of the partial function is not a plain value",
        ),
        (Job(model=functions.layers, seed=object()), "a setting is not a plain value"),
    ],
)
def test_what_workers_could_not_find_is_named(job: Job, text: str):
    with pytest.raises(ConfigError, match=text):
        script_text(job)


MAIN = """
    import sys
    from beside import NUMBER
    from oobleck import Job
    from oobleck.cli.launch.script_text import script_text

    def layers():
        return NUMBER, __name__, sys.argv[1:]

    if __name__ == "__main__":
        print(repr(script_text(Job(model=layers))))
"""


def test_functions_of_a_program_are_found_by_running_its_file_again(tmp_path: Path):
    (tmp_path / "beside.py").write_text("NUMBER = 5\n")
    (tmp_path / "main.py").write_text(textwrap.dedent(MAIN))
    done = subprocess.run(
        [sys.executable, "main.py", "--fast"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    text, arguments = eval(done.stdout)
    assert arguments == ("--fast",)
    job = run_script(ScriptSpec(name="job.py", source=text, arguments=arguments, directory="/nowhere"))
    assert "beside" in sys.modules
    sys.modules.pop("beside")
    sys.path.remove(str(tmp_path))
    assert job.made["model"]()[:2] == (5, "__oobleck_main__")


def test_an_error_of_the_file_is_said_with_its_line(tmp_path: Path):
    source = "import sys\n\nnumber = 1 // 0\n"
    text = f"from oobleck.host.script import module_of\nmodule_of({'main.py'!r}, {source!r}, '/nowhere')\n"
    with pytest.raises(ConfigError, match=r"main.py:3: ZeroDivisionError"):
        run_script(ScriptSpec(name="job.py", source=text))


UNGUARDED = """
    import oobleck

    def layers(): ...

    oobleck.launch(oobleck.Job(model=layers), local=2, base_dir="base")
"""


def test_a_launch_without_a_guard_is_refused(tmp_path: Path):
    (tmp_path / "main.py").write_text(textwrap.dedent(UNGUARDED))
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ConfigError: " in done.stderr
    assert 'put the call below `if __name__ == "__main__":`' in done.stderr


def test_a_program_that_is_a_module_is_imported_again_with_its_arguments(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(
        textwrap.dedent(MAIN).replace("from beside import NUMBER", "NUMBER = 6")
    )
    command = [sys.executable, "-m", "package.program", "--fast"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    text, arguments = eval(done.stdout)
    job = run_script(ScriptSpec(name="job.py", source=text, arguments=arguments, directory="/nowhere"))
    sys.path.remove(str(tmp_path))
    del sys.modules["package.program"], sys.modules["package"]
    assert (arguments, job.made["model"]()[:2]) == (("--fast",), (6, "package.program"))


def test_what_is_installed_is_imported_by_its_name_alone():
    from json import loads

    text, _ = script_text(Job(data=loads))
    assert "sys.path" not in text
    assert again(Job(data=loads)).made["data"] is loads
