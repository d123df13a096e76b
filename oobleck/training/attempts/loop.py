"""The loop over attempts, and what is fenced off between them.

    training ── a rank is lost: its process is gone, or a collective fails ──> leaving: groups are torn down
       ^                                                                              │
       └── the place in the next attempt: environment, output, random state ── waiting ┘

What an attempt has computed comes into the next one only through `oobleck.checkpoint`: a state counts if all ranks of
one attempt have saved it. A rank that has heard of its attempt's end saves nothing any more (`check_attempt`), nor does
a thread that was started in an earlier one.
"""

from __future__ import annotations

import functools
import gc
import inspect
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from oobleck.errors import UsageError

from . import groups
from .line import Line, the_line

P = ParamSpec("P")
T = TypeVar("T")

_REST_S = 0.05

_old_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_on_next: list[Callable[[], None]] = []


class Interrupted(RuntimeError):
    """The attempt has ended for all ranks: one was lost, or the nodes change."""


class Attempt:
    """One entry of this process into the loop; a context manager that ends with it."""

    def __init__(self, line: Line | None, number: int) -> None:
        self.number = number
        """Counts the attempts of this process, from 0."""
        self._line = line
        self.is_interrupted = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Swallow what a lost rank makes fail, and nothing else."""
        line = self._line
        if line is None or not (error is None or isinstance(error, Exception)):
            return False
        # Only collectives fail before their rank hears why.
        if not line.is_over and not isinstance(error, Interrupted) and not line.groups.may_have_raised(error):
            return False
        # Where nodes change, it has heard why.
        if line.asked_s is None and not line.wait_until_over(line.hears_within_s):
            return False
        self.is_interrupted = True
        if error is not None:
            # Its frames hold the model, for which there would be no room beside the next one.
            _forget(error)
        return True


def attempts() -> Iterator[Attempt]:
    """Yield an attempt; under `oobleck run`, another one after each loss, in the same process::

        for attempt in oobleck.attempts():
            with attempt:
                train()

    Process groups are made within the attempt, as is all that depends on RANK or WORLD_SIZE: those are other ones in
    the next attempt. Random numbers continue as at the first. Under other launchers there is one attempt, and so there
    is in each loop of a process after its first.

    Raises UsageError if a process group exists already.
    """
    line = the_line()
    # A new rank runs the script from its start. In its first loop, it would meet the groups of others' later ones.
    if line is None or line.is_opened:
        yield Attempt(None, 0)
        return
    if groups.are_made():
        raise UsageError(
            "oobleck.attempts: torch.distributed.init_process_group was called before; call it in the attempt, for "
            "each attempt has other ranks"
        )
    states, threads, hook = _RandomStates(), set(threading.enumerate()), sys.excepthook
    line.groups.watch()
    # Else each later search goes through what was made before the attempts, for 0.1 s where torch is imported.
    gc.collect()
    gc.freeze()
    line.open()
    number = 0
    try:
        if line.is_spare:
            line.take_place()
            states.restore()
        while True:
            attempt = Attempt(line, number)
            yield attempt
            if not attempt.is_interrupted:
                return
            number += 1
            _old_threads.update(set(threading.enumerate()) - threads)
            line.groups.leave(within_s=_REST_S)
            if not line.is_over:  # others that go on after their save wait for this rank, until its connections end
                line.groups.forget()
            del attempt
            gc.collect()
            sys.excepthook = hook  # `init_process_group` puts another one around it each time
            line.take_place()
            for each in _on_next:
                each()
            states.restore()
    finally:
        gc.unfreeze()
        line.close()


def resilient(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function called again after each loss, in the same process: a decorator around a loop over `attempts`.

    Raises UsageError for a coroutine or a generator, whose body runs only after its call.
    """
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UsageError(
            f"@oobleck.resilient: {function.__qualname__} runs only after its call, where nothing would call it again; "
            "decorate the plain function that runs it to its end"
        )

    @functools.wraps(function)
    def again_and_again(*args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in attempts():
            with attempt:
                result = function(*args, **kwargs)
            if not attempt.is_interrupted:
                break
        return result

    return again_and_again


def check_attempt() -> None:
    """Raise Interrupted if what this thread has computed belongs to an attempt that is over."""
    line = the_line()
    if line is not None and (line.is_over or threading.current_thread() in _old_threads):
        raise Interrupted("a rank was lost: nothing of this attempt is used from now on")


def note_saved() -> None:
    """Note that a state is whole in this rank. Raises Interrupted if that was waited for."""
    line = the_line()
    if line is not None and line.asked_s is not None:
        raise Interrupted("the nodes change: the next attempt continues from this state")


def asked_s() -> float | None:
    """Return when this attempt was asked to end after its next save, by the monotonic clock; None if it was not."""
    line = the_line()
    return None if line is None else line.asked_s


def on_next_attempt(forget: Callable[[], None]) -> None:
    """Have a function called before each later attempt, which forgets what belongs to a place."""
    _on_next.append(forget)


class _RandomStates:
    """The generators that libraries keep for a whole process, as they are at the first attempt."""

    def __init__(self) -> None:
        numpy: Any = sys.modules.get("numpy.random")
        torch: Any = sys.modules.get("torch")
        self._restores: list[Callable[[], object]] = [functools.partial(random.setstate, random.getstate())]
        if numpy is not None:
            self._restores.append(functools.partial(numpy.set_state, numpy.get_state()))
        if torch is not None:
            self._restores.append(functools.partial(torch.set_rng_state, torch.get_rng_state()))
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                states = torch.cuda.get_rng_state_all()
                self._restores.append(functools.partial(torch.cuda.set_rng_state_all, states))

    def restore(self) -> None:
        for each in self._restores:
            each()


def _forget(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__
