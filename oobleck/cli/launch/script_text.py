"""Writes a job with the caller's functions as the text of a script that finds the same functions again.

Nothing is pickled. Workers run text: that of the function's file, as multiprocessing does too, or an import of its
module, or the text of the notebook's cells that it needs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from oobleck.errors import ConfigError
from oobleck.host.script import Job

from .cells import cell_text, is_of_a_cell

_HEAD = '''"""Made by oobleck.launch."""

import functools
import importlib
import json
import sys

from oobleck.host.script import Job, module_of

'''
_MAIN = "__main__"


def script_text(job: Job | Callable[[], Job]) -> tuple[str, tuple[str, ...]]:
    """Return the script, and the arguments of the program itself if its file is run again.

    Raises ConfigError that names a function that workers could not find.
    """
    sources = _Sources()
    if isinstance(job, Job):
        body = _job_call(job, sources)
    else:
        body = f"{sources.expression(job, 'the function that returns the job')}()"
    text = f"{_HEAD}{sources.text}\n\ndef job():\n    return {body}\n"
    return text, tuple(sys.argv[1:]) if sources.has_main_file else ()


def _job_call(job: Job, sources: _Sources) -> str:
    if job.callbacks:
        raise ConfigError(
            "callbacks: these objects live in this process alone; give launch() a function that makes them and returns "
            "the Job"
        )
    # The `Job` has added settings for its functions, which it will add again.
    own = {name: value for name, value in job.settings.items() if name not in job.made}
    if "data" in job.made and "data" in job.settings:
        own["streaming"] = True
    try:
        settings = json.dumps(own)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the Job given to launch(): a setting is not a plain value: {error}") from error
    made = "".join(f", {name}={sources.expression(value, name)}" for name, value in job.made.items())
    return f"Job(**json.loads({settings!r}){made})"


class _Sources:
    """The modules that functions come from, each once, as a variable of the script."""

    def __init__(self) -> None:
        self.has_main_file = False
        """Whether the file of the program itself is run again, with its arguments."""
        # It has the expression that makes each module, keyed by the module's variable.
        self._modules: dict[str, str] = {}
        self._roots: list[str] = []
        self._of_cells: list[object] = []

    @property
    def text(self) -> str:
        paths = [f"sys.path[:0] = [path for path in {self._roots!r} if path not in sys.path]"] if self._roots else []
        made = dict(self._modules)
        if self._of_cells:
            made["cells"] = f"module_of('notebook', {cell_text(self._of_cells)!r}, {os.getcwd()!r})"
        return "\n".join((*paths, *(f"{name} = {value}" for name, value in made.items())))

    def expression(self, value: object, role: str) -> str:
        """Return an expression for this function, once the modules are made. Raises ConfigError."""
        if isinstance(value, partial):
            try:
                bound = json.dumps([value.args, value.keywords])
            except (TypeError, ValueError) as error:
                problem = f"an argument of the partial function is not a plain value: {error}"
                raise ConfigError(f"{role}: {problem}") from error
            function = self.expression(value.func, role)
            return f"(lambda given: functools.partial({function}, *given[0], **given[1]))(json.loads({bound!r}))"
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            raise _lost(role, value, "an object of this process alone")
        if "<" in name or _found(sys.modules.get(module), name) is not value:
            raise _lost(role, value, "not at the top level of a file")
        return f"{self._variable(module, value, role)}.{name}"

    def _variable(self, module: str, value: object, role: str) -> str:
        if module != _MAIN:
            return self._imported(module, value, role)
        if is_of_a_cell(value):
            self._of_cells.append(value)
            return "cells"
        return self._main(value, role)

    def _main(self, value: object, role: str) -> str:
        main = sys.modules[_MAIN]
        if getattr(main, "__spec__", None) is not None:  # python -m package.module
            self.has_main_file = True
            return self._imported(str(main.__spec__.name), value, role)  # type: ignore[union-attr]
        file = Path(str(getattr(main, "__file__", ""))).absolute()
        if not file.is_file():
            raise _lost(role, value, "typed in, and in no file")
        self.has_main_file = True
        source = file.read_text(encoding="utf-8")
        self._modules["main"] = f"module_of({str(file)!r}, {source!r}, {str(file.parent)!r})"
        return "main"

    def _imported(self, module: str, value: object, role: str) -> str:
        spec = None
        with suppress(ImportError, ValueError):  # a module that was made by hand, and not imported
            spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise _lost(role, value, f"in {module}, which no file has")
        variable = "module_" + module.replace(".", "__")
        self._modules[variable] = f"importlib.import_module({module!r})"
        # A package's file, its `__init__`, lies one level deeper than its name says.
        levels = module.count(".") + (spec.submodule_search_locations is not None)
        root = Path(spec.origin).parents[levels]
        is_installed = any(root.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))
        if not is_installed and str(root) not in self._roots:  # nodes must have installed packages themselves
            self._roots.append(str(root))
        return variable


def _found(module: types.ModuleType | None, name: str) -> object:
    found: object = module
    for word in name.split("."):
        found = getattr(found, word, None)
    return found


def _lost(role: str, value: object, where: str) -> ConfigError:
    name = getattr(value, "__qualname__", None) or type(value).__name__
    code = getattr(value, "__code__", None)
    place = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if isinstance(code, types.CodeType) else ""
    return ConfigError(
        f"{role}: {name}{place} is {where}, so workers cannot find it; define it with `def` at the top level of a "
        "file, or give launch() a function that returns the Job and makes it (in a notebook: put all of it into a file "
        "with `%%writefile job.py`, and give launch() its path)"
    )
