"""What jobs of these tests are made of."""

from __future__ import annotations

from oobleck import Job


def layers(number: int = 0, *, name: str = "") -> tuple[int, str]:
    return number, name


class Samples:
    @staticmethod
    def make() -> None: ...

    def get(self) -> None: ...


class Callback:
    pass


def make_job() -> Job:
    half = 0.5
    return Job(lr_lambda=lambda step: step * half, callbacks=[Callback()])
