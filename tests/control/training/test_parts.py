"""Parts of the coordinators change what is theirs, and call those alone that the table says; none keeps the time."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from oobleck.control import training
from oobleck.control.nodes import Member, Membership
from oobleck.control.training.parts import Parts
from oobleck.job import NodeSpec

CONTROL = Path(training.__file__).parents[1]
HAVE_ALL = {
    *(f"training/{name}.py" for name in ("coordinator", "reports", "takeover", "parts")),
    "nodes/coordinator.py",
    "scripts/coordinator.py",
}
"""The modules of the coordinators themselves, which may call every part."""
CHANGES = {
    # Who is there is the one table that all read; who comes is the lifecycles' to say.
    "NodeLifecycle": {"Membership", "NodeRetry"},
    "WorkerLifecycle": {"Membership", "NodeLifecycle"},
    "Replanning": {"PlanHistory", "Scaling", "SlowNodeRetry", "SpeedTracker"},
    "Decider": {"NodeLifecycle", "Restoring"},
    "Reconfiguration": {
        "Decider", "NodeLifecycle", "PlanHistory", "Progress", "Replanning", "Restoring", "Saving", "Scaling",
        "Sharding", "Consent",
    },
    "Startup": {"LinkTiming", "Reconfiguration", "Replanning", "Restoring", "Saving", "StartupFailures"},
    "HangWatch": {"Progress"},
    "Sharding": {"Progress"},
    "Consent": {"Progress"},
    "Shutdown": {"Progress"},
}  # fmt: skip
"""By part: the others that it changes, by calling them. To decide to finish a step deals the step's microbatches: so
`Replanning` changes the history of plans that it is given."""
REMEMBERED = {"in_state", "living_names", "ready_names", "all_save", "without_part", "_near"}
"""Methods of `Membership` that keep an answer for the next time, which changes nothing."""
PARTS = {
    node.value.func.id
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(Parts.__init__))))
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
}.union(CHANGES, *CHANGES.values()) - {"partial"}
CHANGING = {"add", "append", "appendleft", "clear", "discard", "extend", "pop", "remove", "setdefault", "update"}
"""What changes a container."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(CONTROL)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(CONTROL.rglob("*.py"))
    }


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in modules().items():
        yield from ((name, node) for node in tree.body if isinstance(node, ast.ClassDef))


def methods(kind: ast.ClassDef) -> list[Function]:
    return [node for node in kind.body if isinstance(node, Function)]


def parameters(function: Function) -> dict[str, str]:
    """The parts that a function is given, by parameter."""
    arguments = (*function.args.args, *function.args.kwonlyargs)
    return {
        each.arg: name
        for each in arguments
        for name in [ast.unparse(each.annotation) if each.annotation else ""]
        if name in PARTS | {"Parts"}
    }


def held(kind: ast.ClassDef) -> dict[str, str]:
    """The parts that a class keeps, by attribute: `self._x = x` in its constructor, or `self._x = Part(...)`.

    A dataclass declares them as its fields: `_x: Part`.
    """
    found = {
        node.target.id: ast.unparse(node.annotation)
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if ast.unparse(node.annotation) in PARTS and (kind.name in PARTS or node.target.id.startswith("_"))
    }
    for init in (each for each in methods(kind) if each.name == "__init__"):
        given = parameters(init)
        for node in ast.walk(init):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)], value=ast.Name(id=name)):
                    found |= {attr: given[name]} if name in given else {}
                case ast.Assign(
                    targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)],
                    value=ast.Call(func=ast.Name(id=name)),
                ):
                    found |= {attr: name} if name in PARTS else {}
                    found |= {attr: "Parts"} if name == "Parts" else {}
    return found


def path_of(node: ast.expr) -> list[str]:
    """`self._a.b[0].c` as its names, without indices; empty for what begins with no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []


def targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to or deletes."""
    match node:
        case ast.Assign(targets=found) | ast.Delete(targets=found):
            return [each for target in found for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
        case _:
            return []


def kept_as(function: Function) -> set[str]:
    """The names under which a function has what its object keeps: `heard_s` after `heard_s = self._heard_s`."""
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            named = zip(targets(node), values, strict=False)
            found |= {name.id for name, value in named if isinstance(name, ast.Name) and path_of(value)[:1] == ["self"]}
    return found


def calls(function: Function) -> Iterator[list[str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield path_of(node.func)


@cache
def changing() -> dict[str, frozenset[str]]:
    """By part: the methods that change it, themselves or by what they call."""
    kinds = {kind.name: kind for _, kind in classes() if kind.name in PARTS}
    found = {name: frozenset[str]() for name in kinds}
    before = None
    while found != before:
        before = found
        found = {
            name: frozenset(
                each.name
                for each in methods(kind)
                if each.name not in REMEMBERED and changes(each, name, held(kind), before)
            )
            for name, kind in kinds.items()
        }
    return found


def changes(function: Function, name: str, parts: dict[str, str], known: dict[str, frozenset[str]]) -> bool:
    own = {"self", *kept_as(function)}
    for target in (target for node in ast.walk(function) for target in targets(node)):
        if not isinstance(target, ast.Name) and own.intersection(path_of(target)[:1]):
            return True
    for path in calls(function):
        match path:
            case ["self", method] if method in known[name]:
                return True
            case ["self", attr, method] if attr in parts and method in known.get(parts[attr], ()):
                return True
            case ["self", attr, *_, method] if attr not in parts and method in CHANGING:
                return True
    return False


@cache
def used() -> set[tuple[str, str]]:
    """The rows of the table that were needed, as (part, the other)."""
    return set()


def written(module: str, name: str, function: Function, parts: dict[str, str]) -> Iterator[str]:
    """Where a function changes what is inside of a part, or calls one to change it that the table does not have."""
    given = {("self", attr): kind for attr, kind in parts.items()} | {
        (argument,): kind for argument, kind in parameters(function).items()
    }
    for node in ast.walk(function):
        paths = [path_of(target) for target in targets(node)]
        paths += [path_of(node.func)] if isinstance(node, ast.Call) else []
        for path in paths:
            for prefix, kind in given.items():
                size = len(prefix) + (kind == "Parts")
                if tuple(path[: len(prefix)]) != prefix or len(path) <= size:
                    continue
                is_call, is_inside = isinstance(node, ast.Call), len(path) > size + 1
                is_told = is_call and not is_inside and path[size] in changing().get(kind, ())
                if is_told and (module in HAVE_ALL or kind in CHANGES.get(name, ())):
                    used().add((name, kind))
                elif not is_call or path[size] in changing().get(kind, ()) or (is_inside and path[-1] in CHANGING):
                    yield f"{module}:{node.lineno}: {name} changes {kind}: {ast.unparse(node)}"


def written_anywhere(trees: dict[str, ast.Module]) -> Iterator[str]:
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                for method in methods(node):
                    yield from written(module, node.name, method, held(node))
            elif isinstance(node, Function):
                yield from written(module, node.name, node, {})


def changed_members(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Where anything but `Membership` changes a member in its place, however it came by it."""
    fields = {each.name for each in dataclasses.fields(Member)}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            paths = [path_of(target) for target in targets(node)]
            if isinstance(node, ast.Call) and (path := path_of(node.func)) and path[-1] in CHANGING:
                paths.append(path[:-1])
            if any(path[0] != "self" and fields.intersection(path[1:]) for path in paths if path):
                yield f"{module}:{node.lineno}: a member is changed: {ast.unparse(node)}"


def test_a_part_is_changed_by_itself_or_by_those_that_may_call_it():
    assert list(written_anywhere(modules())) == []


def test_the_table_has_what_is_called_and_nothing_else():
    assert not list(written_anywhere(modules()))
    assert {(name, kind) for name, kinds in CHANGES.items() for kind in kinds} <= used()


def test_calls_go_one_way():
    """Only a program is called back, and by the lifecycles of nodes and workers alone."""
    left = {name: set(kinds) for name, kinds in CHANGES.items()}
    while ready := [name for name, kinds in left.items() if not kinds & left.keys()]:
        for name in ready:
            del left[name]
    assert not left


def test_a_member_is_a_value_that_nobody_changes():
    member = Membership.of((NodeSpec(name="n0", host="n0"),))["n0"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        member.is_draining = True
    assert list(changed_members(modules())) == []


@pytest.mark.parametrize(
    "line",
    [
        "member.is_draining = True",
        "member.shutdown.discard(0)",
        "member.ready[0] = worker",
        "del members['n0'].gone[0]",
        "parts.members['n0'].gone.pop(0)",
    ],
)
def test_a_member_that_is_changed_is_found(line: str):
    (found,) = changed_members({"other.py": ast.parse(line)})
    assert found.startswith("other.py:1: a member is changed")


def test_the_coordinator_alone_has_all_parts():
    users = {
        module
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, Function) and "Parts" in parameters(node).values()
    }
    assert users <= HAVE_ALL


def kept_times(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Where anything but a turn has the time, or anything keeps a turn."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=attr) if attr.strip("_") in ("now_s", "turn"):
                    is_turns = path_of(node)[0] == "turn" or (module, path_of(node)[0]) == ("events.py", "self")
                    if not is_turns or attr != "now_s":
                        yield f"{module}:{node.lineno}: {ast.unparse(node)}"
                case ast.Assign(targets=[ast.Attribute()], value=ast.Name(id="turn")):
                    yield f"{module}:{node.lineno}: {ast.unparse(node)}"
                case _:
                    pass


def test_nobody_keeps_the_time_of_the_event():
    assert list(kept_times(modules())) == []


@pytest.mark.parametrize("line", ["self._now_s = turn.now_s", "self._cause = turn", "part.turn.do(())"])
def test_a_time_that_is_kept_is_found(line: str):
    assert list(kept_times({"other.py": ast.parse(line)}))


def test_what_changes_a_part_is_found():
    found = changing()
    assert {"commit", "evaluate", "expect", "go_back"} <= found["Progress"]
    assert not {"last_step", "owes_evaluation"} & found["Progress"]
    assert {"node_lost", "keep", "know", "handle_deadline"} <= found["Saving"], "what it calls changes it"
    assert not {"is_enabled", "lacking"} & found["Saving"]
    assert {"note_pace", "rescale"} <= found["Replanning"], "what it alone changes is its own"
    assert not {"choose", "replan", "wants_more"} & found["Replanning"]
    assert {"meet", "note_ready", "lose", "hear", "hear_nodes", "forgive"} <= found["Membership"]
    assert not {"living", "took_part", "first_ready_worker", "share"} & found["Membership"]


@pytest.mark.parametrize(
    "line",
    [
        "self._progress.expect(1.0, now_s)",
        "self._saving.complete.append(1)",
        "self._progress.hangs_s = 1.0",
        "self._saving.handle_deadline(turn)",
        "progress.allow(1.0)",
        "self._members.note_restart(worker_id, 7, now_s=now_s, step=1)",
        "self._members.hear_node('n0', now_s)",
        "self._members['n0'].is_draining = True",
        "self._scaling.look_soon(now_s)",
    ],
)
def test_a_part_that_changes_another_is_found(line: str):
    source = f"""
class Other:
    _scaling: Scaling

    def __init__(self, progress: Progress, saving: Saving, members: Membership) -> None:
        self._progress = progress
        self._saving = saving
        self._members = members
    def act(self, progress: Progress, now_s: float) -> None:
        self._progress.owes_evaluation(self._progress.last_step, self._members.living)
        {line}
"""
    (found,) = written_anywhere({"other.py": ast.parse(source)})
    assert found.startswith("other.py:11: Other changes")
