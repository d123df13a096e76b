"""The floors: who may import whom, what may be imported where, and what the quick ways in load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "oobleck"

_VALUES = {"errors", "job", "json_table", "plan"}
_PURE = _VALUES | {"planner", "schedule", "control"}
_WORLD = _PURE | {"wire", "roles"}

MAY_IMPORT = {
    "errors": set(),
    "job": {"errors"},
    "json_table": {"errors"},
    "plan": {"errors", "json_table"},
    "planner": _VALUES,
    "schedule": _VALUES | {"planner"},
    "control": _VALUES | {"planner", "schedule"},
    "host": {"errors", "job", "control"},
    "wire": _PURE,
    "storage": _PURE | {"wire"},
    "checkpoint": {"training"},
    "dcp": {"training"},
    "roles": _PURE | {"wire"},
    "training": _PURE | {"host", "wire", "storage"},
    "runtime": _WORLD | {"host", "storage"},
    "transformers": _PURE | {"host", "training"},
    "trl": {"errors", "transformers"},
    "sim": _WORLD,
    "ui": _PURE | {"host", "sim"},
    "cli": _WORLD | {"host", "storage", "runtime", "sim", "ui"},
    "__main__": {"cli"},
    # Once a run is started, or a script comes to its attempts: a test below holds that nothing is loaded before.
    "__init__": {"cli", "host", "training"},
}

MOST_LINES, MOST_LINES_OF_A_COMMAND = 80, 60
"""Of a function, with its signature and docstring; those of `cli` are mostly lists of what a command was given."""

MOST_MODULES = 23
"""Side by side in one folder, its `__init__` counted."""

PURE_FLOORS = ("errors", "job", "json_table", "plan", "planner", "schedule", "control")

# The world, as far as the standard library reaches into it.
IMPURE = {
    "asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets",
    "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time",
}  # fmt: skip

FLOORS_OF = {
    "torch": {"training", "transformers"},
    "transformers": {"training", "transformers", "trl"},
    "trl": {"trl"},
    "tokenizers": {"training"},
    "safetensors": {"training"},
    "datasets": {"training"},
    "peft": {"training"},
    "pynvml": {"training", "runtime"},
    "confluent_kafka": {"training"},
    "fsspec": {"host"},
    "redis": {"training"},
    "huggingface_hub": {"training"},
    "upath": {"host"},
    "kubernetes": {"runtime"},
    "opentelemetry": {"runtime"},
    "ray": {"runtime"},
    "trio": {"roles", "runtime", "sim", "ui", "cli"},
    "asyncssh": {"runtime"},
    "cryptography": {"runtime"},
    "trio_asyncio": {"runtime"},
    "urllib3": {"runtime"},
    "numpy": {"planner", "training", "sim", "transformers", "runtime"},
    "rich": {"ui", "cli"},
    "typer": {"cli"},
    "msgpack": {"wire"},
    "tensorboard": {"runtime"},
    "cairosvg": {"cli"},
    "yaml": {"cli", "sim"},
}
"""Third-party packages, and the floors that may import them; any that is not listed may be imported nowhere."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Everything in a module's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, absolute name) of everything that a module imports, inside functions as well."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[int, str]]:
    package = ("oobleck", *path.relative_to(PACKAGE).parent.parts)
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module == "oobleck":
                yield from ((node.lineno, f"oobleck.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def imported() -> Iterator[tuple[str, str, str]]:
    """(floor, place, name) of every import of the package."""
    for floor, path in modules():
        for line, name in imports_of(path):
            yield floor, f"{path.relative_to(PACKAGE.parent)}:{line}", name


def test_the_walk_sees_relative_and_absolute_imports_inside_functions_too():
    names = {name for _, _, name in imported()}
    assert {
        "oobleck.control.journal.entries",
        "oobleck.ui.formatting",
        "oobleck.cli.up.run_job",
        "trio",
        "trio_asyncio",
    } <= names
    assert len(list(modules())) > 40


def test_every_floor_is_known():
    assert {floor for floor, _ in modules()} - {"__init__"} <= MAY_IMPORT.keys()


def test_imports_go_down_only():
    upward = [
        f"{place}: {floor} imports {name}"
        for floor, place, name in imported()
        if name.startswith("oobleck.")
        and name.split(".")[1] not in ({floor, "__version__"} | MAY_IMPORT.get(floor, set()))
    ]
    assert not upward, "\n".join(upward)


@cache
def rooms() -> set[str]:
    """The packages below the floors, by their absolute names: each `__init__` gives out what is its room's to give."""
    return {".".join(("oobleck", *path.parent.relative_to(PACKAGE).parts)) for path in PACKAGE.glob("*/*/__init__.py")}


def past_a_door(importer: str, name: str) -> bool:
    """Whether a module imports a module of somebody else's room."""
    room = next((room for room in rooms() if name.startswith(f"{room}.")), None)
    return room is not None and not f"{importer}.".startswith(f"{room}.")


def test_nobody_imports_past_a_door():
    strayed = [
        f"{place} imports {name}"
        for _, place, name in imported()
        if past_a_door(place.split(":")[0].removesuffix(".py").replace("/", "."), name)
    ]
    assert not strayed, "\n".join(strayed)


def test_every_room_has_a_door_that_says_what_it_is_for_and_gives_things_out():
    for room in sorted(rooms()):
        tree = ast.parse((PACKAGE.parent / room.replace(".", "/") / "__init__.py").read_text())
        assert ast.get_docstring(tree), room
        given = [
            node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        assert len(given) == 1, room


MOST_NAMES = 6
"""Of one module in an import; more are taken by its own name (`protocol.StopAgent`)."""


def test_where_many_names_of_a_module_are_needed_the_module_is_imported():
    crowded = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {len(node.names)} names of {node.module}"
        for _, path in modules()
        if path.name != "__init__.py"
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("oobleck"))
        if len(node.names) > MOST_NAMES
    ]
    assert not crowded, "\n".join(crowded)


def functions() -> Iterator[tuple[str, int, bool]]:
    """(place, lines, whether it is of a command) of every function."""
    for floor, path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                yield f"{path.relative_to(PACKAGE)}:{node.name}", lines, floor == "cli"


def test_functions_are_short():
    long = {
        place for place, lines, is_cli in functions() if lines > (MOST_LINES_OF_A_COMMAND if is_cli else MOST_LINES)
    }
    assert long == set()


def test_doors_alone_list_what_they_give_out():
    """Everywhere else a leading underscore says what a module keeps to itself."""
    doors = {path for _, path in modules() if path.name == "__init__.py"} | {
        PACKAGE / "checkpoint.py",
        PACKAGE / "dcp.py",
        PACKAGE / "trl.py",
    }
    listing = {path for _, path in modules() if "\n__all__" in path.read_text()}
    assert {str(path.relative_to(PACKAGE)) for path in listing - doors} == set()


def test_no_folder_has_more_modules_than_one_can_take_in():
    sizes = {folder: len(list(folder.glob("*.py"))) for folder in (PACKAGE, *PACKAGE.rglob("*")) if folder.is_dir()}
    assert not {str(folder): size for folder, size in sizes.items() if size > MOST_MODULES}


def test_pure_floors_import_nothing_of_the_world():
    impure = [
        f"{place}: {floor} imports {name}"
        for floor, place, name in imported()
        if floor in PURE_FLOORS and name.split(".")[0] in IMPURE
    ]
    assert not impure, "\n".join(impure)


def test_third_party_packages_stay_on_their_floors():
    known = sys.stdlib_module_names | {"oobleck", "__future__"}
    strayed = [
        f"{place}: {floor} imports {name}"
        for floor, place, name in imported()
        if (top := name.split(".")[0]) not in known and floor not in FLOORS_OF.get(top, set())
    ]
    assert not strayed, "\n".join(strayed)


def test_asyncio_appears_where_libraries_need_it_only():
    places = {place.split(":")[0] for _, place, name in imported() if name.split(".")[0] in ("asyncio", "trio_asyncio")}
    asyncssh, fsspec = "oobleck/runtime/ssh/asyncssh_adapter.py", "oobleck/host/places.py"
    assert places == {asyncssh, fsspec}


PROGRAMS = {"training", "scripts"}
"""The rooms of `control` that decide what the nodes of a run carry out: for `oobleck up`, and for `oobleck run`."""


def test_programs_stand_on_the_other_rooms_of_control_and_do_not_know_each_other():
    control = ("oobleck", "control")
    imports = [(place.split(":")[0].removesuffix(".py").split("/"), name.split(".")) for _, place, name in imported()]
    known = {
        (place[2], name[2])
        for place, name in imports
        if tuple(place[:2]) == tuple(name[:2]) == control and len(name) > 2 and place[2] != name[2]
    }
    assert {("training", "nodes"), ("scripts", "nodes"), ("recovery", "nodes")} <= known
    # A replay follows the journal of a run of either program, for the master that takes it over.
    assert {(room, other) for room, other in known if other in PROGRAMS} == {
        ("replay", "training"),
        ("replay", "scripts"),
    }


def names_from(module: str) -> Iterator[tuple[str, str]]:
    """(file, name) of every name that is taken from a module of ours: imported, or as its attribute."""
    for _, path in modules():
        file = str(path.relative_to(PACKAGE))
        package = ("oobleck", *path.relative_to(PACKAGE).parent.parts)
        nodes = nodes_of(path)
        called: set[str] = set()
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
                source = ".".join(filter(None, (base, node.module)))
                if source == module:
                    yield from ((file, alias.name) for alias in node.names)
                called |= {alias.asname or alias.name for alias in node.names if f"{source}.{alias.name}" == module}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in called:
                yield file, node.attr


def test_one_file_knows_which_launchers_there_are():
    are_launchers = "(name for name in door.__all__ if {'connect', 'follow', 'named'} <= {*dir(getattr(door, name))})"
    code = f"import oobleck.runtime.launchers as door; print(*{are_launchers})"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    launchers = {*done.stdout.split()} - {"Launcher"}
    assert "ListedNodes" in launchers
    knowing = {file for file, name in names_from("oobleck.runtime.launchers") if name in launchers}
    assert knowing == {"cli/wiring/launching.py"}


def test_launchers_alone_connect_to_nodes():
    connecting = {file for file, name in names_from("oobleck.runtime.ssh") if name == "connect"}
    assert connecting
    assert {file for file in connecting if not file.startswith("runtime/launchers/")} == set()


def modules_after(code: str) -> set[str]:
    """The modules that are loaded after running `code` in a fresh interpreter."""
    show = "import sys; print('\\nLOADED', *sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    return set(done.stdout.rsplit("LOADED ", 1)[1].split())


def loaded_after(code: str) -> set[str]:
    """The top-level packages that are loaded after running `code` in a fresh interpreter."""
    return {name.split(".")[0] for name in modules_after(code)}


def rooms_after(code: str) -> set[str]:
    """The rooms, and the modules beside them, that are loaded after running `code`."""
    return {".".join(name.split(".")[1:3]) for name in modules_after(code) if name.startswith("oobleck.")}


def test_importing_a_pure_floor_loads_neither_torch_nor_trio():
    floors = "oobleck, oobleck.planner, oobleck.schedule, oobleck.control, oobleck.storage"
    assert not loaded_after(f"import {floors}") & {"torch", "trio", "transformers", "asyncssh", "rich"}


def test_what_starts_runs_is_loaded_once_it_is_asked_for():
    assert not loaded_after("from oobleck import Job") & {"typer", "rich"}
    assert not loaded_after("from oobleck import launch") & {"torch", "transformers", "asyncssh"}
    assert not loaded_after("import oobleck; dir(oobleck)") & {"typer", "rich"}


def test_a_script_that_saves_loads_torch_and_little_else():
    """Each of its ranks would, whenever they start again."""
    assert not loaded_after("import oobleck.checkpoint; oobleck.checkpoint.save") & (HEAVY | {"rich"}) - {
        "torch",
        "numpy",
    }


def test_planning_loads_neither_torch_nor_trio():
    assert not loaded_after("from oobleck.planner import Planner") & {"torch", "trio", "transformers", "asyncssh"}


HEAVY = {"torch", "transformers", "tokenizers", "asyncssh", "trio", "numpy", "scipy"}


def loaded_by(*lines: list[str]) -> set[str]:
    """The top-level packages that command lines load, one after the other in one fresh interpreter."""
    return loaded_after(f"from oobleck.cli.main import main\nfor line in {lines}: main(line)")


def test_the_ways_into_the_command_line_load_nothing_heavy():
    assert not loaded_by(["--help"], ["--version"], [], ["no-such-command"]) & (HEAVY | {"rich", "yaml"})


def test_commands_that_only_ask_load_nothing_heavy():
    commands = ("status", "kill", "stop", "version", "trace")
    assert not loaded_by(*([command, "--help"] for command in commands)) & HEAVY


def test_the_help_of_a_command_that_trains_loads_no_torch():
    commands = ("up", "run", "verify", "plan", "check", "sim")
    assert not loaded_by(*([command, "--help"] for command in commands)) & {"torch", "transformers", "asyncssh"}


def test_a_master_loads_numpy_when_it_plans_and_not_before():
    """Another one takes over within two seconds; it has nothing to plan then."""
    assert not loaded_after("import oobleck.cli.up.run_job") & {
        "torch",
        "transformers",
        "numpy",
        "scipy",
    }


def test_an_agent_loads_what_it_says_and_nothing_that_a_master_decides_by():
    """It starts on every node before anything can train there, and again wherever a node comes back."""
    rooms = rooms_after("import oobleck.runtime.agent.agent_process")
    assert {name for name in rooms if name.startswith("control.")} == {
        "control.node_ranks",
        "control.protocol",
        "control.relaying",
    }
    assert {name for name in rooms if name.startswith("roles.")}.isdisjoint({"roles.master", "roles.master_ports"})
    assert {name for name in rooms if name.startswith("runtime.")} == {
        "runtime.agent",
        "runtime.descriptors",
        "runtime.files",
        "runtime.listening",
        "runtime.patient_clock",
        "runtime.python_process",
        "runtime.script_command",
        "runtime.shell_command",
        "runtime.relay_network",
    }
    assert not {name.split(".")[0] for name in rooms} & {"planner", "schedule", "cli", "sim", "ui", "training"}


def test_an_agent_loads_nothing_heavy_but_trio():
    assert not loaded_after("import oobleck.runtime.agent.agent_process") & (HEAVY | {"rich", "typer"}) - {"trio"}


@pytest.mark.parametrize("command", ["add", "drain", "kill", "stop"])
def test_commands_that_steer_a_run_load_its_socket_and_little_else(command):
    modules = modules_after(f"from oobleck.cli.main import main; main(['{command}', '--help'])")
    floors = {name.split(".")[1] for name in modules if name.startswith("oobleck.")}
    assert not floors & {"control", "planner", "roles", "schedule", "ui"}
    assert not {"oobleck.cli.inputs", "oobleck.runtime.journals", "yaml"} & modules


def test_a_run_that_trains_loads_no_generations_of_ranks():
    assert not rooms_after("import oobleck.cli.up.run_job") & {
        "control.generations",
        "control.node_ranks",
    }


def test_help_is_quick():
    """Best of five, in CPU seconds: the machine may be busy with something else."""
    command = [sys.executable, "-m", "oobleck", "--help"]
    best_s = float("inf")
    for _ in range(5):
        before = os.times()
        wall_s = time.monotonic()
        subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, check=True)
        after = os.times()
        used_s = after.children_user - before.children_user + after.children_system - before.children_system
        best_s = min(best_s, used_s, time.monotonic() - wall_s)
    assert best_s < 0.3
