"""What of a job is secret: the one place that decides it, and that takes it out of what is written.

Journals, logs, reports and noted commands get digests, or `…`, in place of values; whoever starts the run again gives
the values again. A value is secret by its place (a variable, a header, the part of a URL before `@`), or by its name
(`--api-key`, `DB_PASSWORD`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from oobleck.errors import ConfigError

from .spec import ControlSpec, JobSpec

HIDDEN = "…"
_HIDDEN_IN_URL = "***"
_Value = TypeVar("_Value")
_WORDS = frozenset(
    (
        *("auth", "authorization", "cookie", "credential", "credentials", "dsn", "pass", "passphrase", "passwd"),
        *("password", "pat", "pw", "pwd", "secret", "secrets", "signature", "token"),
    )
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USERINFO = re.compile(r"(?<=://)[^/\s?#'\"]*@")
_SETTING = re.compile(r"(-{0,2}[A-Za-z_][\w.\[\]-]*)([=:]\s*)(.+)", re.DOTALL)
_QUERY = re.compile(r"(?<=[?&])([\w.-]+)=([^&#\s'\"]+)")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PATHS = frozenset(("PWD", "SSH_AUTH_SOCK"))  # variables with names like secrets: a shell's directory, a socket
_LEAST_CHARS = 6  # shorter values, such as `true`, are parts of other words


def secret_digest(words: Iterable[str]) -> str:
    """Return a digest that shows whether two texts are equal, but is too short to reveal them."""
    return f"sha256:{hashlib.sha256(chr(0).join(words).encode(errors='surrogateescape')).hexdigest()[:8]}"


def is_secret_name(name: str) -> bool:
    """Whether a variable, option or key of this name holds a secret, as API_KEY, --hub-token and dbPassword do."""
    words = [word.lower() for word in _WORD.findall(name)]
    return not _WORDS.isdisjoint(words) or words[-1:] in (["key"], ["apikey"])


def public_url(text: str) -> str:
    """Return a text whose URLs have no user, no password, and no secret values in their queries."""
    without = _USERINFO.sub("", text)
    return _QUERY.sub(lambda found: f"{found[1]}={_HIDDEN_IN_URL}" if is_secret_name(found[1]) else found[0], without)


def public_words(words: Sequence[str], hidden: Callable[[str], str] = lambda value: HIDDEN) -> tuple[str, ...]:
    """Return a command's words without the secret ones: `--token X`, `--token=X`, `TOKEN=X`."""
    return tuple(f"{shown}{hidden(secret)}" if secret else shown for shown, secret in _parts(words))


def _parts(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the part of each word that may be shown, and the secret part after it."""
    is_value = False
    for word in words:
        setting = _SETTING.fullmatch(word)
        if is_value and not word.startswith("--"):
            yield "", word
        elif setting is not None and is_secret_name(setting[1]):
            yield f"{setting[1]}{setting[2]}", setting[3]
        else:
            yield public_url(word), ""
        is_value = setting is None and word.startswith("-") and is_secret_name(word)


def public_control(control: ControlSpec) -> ControlSpec:
    """Return it for the journal."""
    headers = {name: secret_digest((name, str(value))) for name, value in control.notice_headers.items()}
    command = None if control.notice_command is None else secret_digest((control.notice_command,))
    url = None if control.notice_url is None else public_url(control.notice_url)
    hook = control.webhook_url
    if hook is not None:
        hook = f"{'/'.join(public_url(hook).split('/')[:3])}/{secret_digest((hook,))}"
    return replace(control, notice_headers=headers, notice_command=command, notice_url=url, webhook_url=hook)


def public_job(job: JobSpec) -> JobSpec:
    """Return a job for the journal. Equal jobs stay equal; a change of a password alone changes no URL."""
    script = job.script
    if script is not None:
        arguments = public_words(script.arguments, lambda value: secret_digest((value,)))
        script = replace(script, arguments=arguments)
    return replace(with_urls(job, public_url), control=public_control(job.control), script=script)


def with_urls(job: JobSpec, change: Callable[[str], str]) -> JobSpec:
    """Return a job with each value changed that may be a URL, but for `control.notice_url`."""

    def changed(value: str | None) -> str | None:
        return change(value) if value is not None and "://" in value else value

    data = replace(
        job.data,
        paths=tuple(change(path) if "://" in path else path for path in job.data.paths),
        shards=tuple(change(shard) if "://" in shard else shard for shard in job.data.shards),
    )
    checkpoint = replace(job.checkpoint, directory=changed(job.checkpoint.directory))
    return replace(job, data=data, checkpoint=checkpoint, model=replace(job.model, path=changed(job.model.path)))


def with_variables(job: JobSpec, environment: Mapping[str, str]) -> JobSpec:
    """Return a job with `${NAME}` in URLs and headers replaced by variables. Raises ConfigError for an unset one."""

    def filled(text: str, place: str) -> str:
        for name in _VARIABLE.findall(text):
            if name not in environment:
                raise ConfigError(f"{place}: ${{{name}}} is not set here; set it, or give it by --env {name}=VALUE")
        return _VARIABLE.sub(lambda found: environment[found[1]], text)

    headers = {
        name: filled(value, f"control.notice_headers.{name}") if isinstance(value, str) else value
        for name, value in job.control.notice_headers.items()
    }
    url = None if job.control.notice_url is None else filled(job.control.notice_url, "control.notice_url")
    hook = None if job.control.webhook_url is None else filled(job.control.webhook_url, "control.webhook_url")
    control = replace(job.control, notice_headers=headers, notice_url=url, webhook_url=hook)
    return replace(with_urls(job, lambda text: filled(text, "a URL of the job")), control=control)


def without_secrets(settings: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
    """Return a job's settings with `${NAME}` for secrets of headers and URLs, and the variables; undone when read."""
    found: dict[str, str] = {}

    def variable(value: str) -> str:
        name = f"OOBLECK_SECRET_{len(found) + 1}"
        found[name] = value
        return f"${{{name}}}"

    def in_query(match: re.Match[str]) -> str:
        return f"{match[1]}={variable(match[2])}" if is_secret_name(match[1]) else match[0]

    def of(value: object, place: str) -> object:
        match value:
            case str() if place == "notice_headers":
                return variable(value)
            case str() if place == "webhook_url":  # its path is its password
                *server, path = value.split("/", 3)
                return "/".join((*server, variable(path))) if len(server) == 3 else value
            case str():
                return _QUERY.sub(in_query, _USERINFO.sub(lambda match: f"{variable(match[0][:-1])}@", value))
            case Mapping():
                inner = place if place == "notice_headers" else ""
                return {key: of(item, inner or key) for key, item in value.items()}
            case list() | tuple():
                return [of(item, place) for item in value]
        return value

    return {key: of(value, key) for key, value in settings.items()}, found


class Hiding:
    """Takes known values, and what looks like a password in a URL, out of texts."""

    def __init__(self, job: JobSpec | None, environment: Mapping[str, str]) -> None:
        """The values are those of the job, and of variables with secret names."""
        found = {value for name, value in environment.items() if is_secret_name(name) and name not in _PATHS}
        if job is not None:
            found |= set(_values_of(job)) | {environment.get(name, "") for name in job.env if is_secret_name(name)}
        # A value may be the beginning of another one, which comes first.
        values = sorted((value for value in found if len(value) >= _LEAST_CHARS), key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, values))) if values else None

    def __call__(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(HIDDEN, text)
        return _USERINFO.sub("", text) if "@" in text else text

    def value(self, given: _Value) -> _Value:
        """Return a dataclass without secrets in its texts, however deep."""
        # A name, as of a node, recurs in other values and has to stay the same; it has no spaces.
        match given:
            case str():
                return self(given) if " " in given else given  # type: ignore[return-value]  # a str too
            case tuple():
                new = tuple(map(self.value, given))
                return given if new == given else new  # type: ignore[return-value]  # a tuple too
        if not is_dataclass(given) or isinstance(given, type):
            return given
        old = {part.name: getattr(given, part.name) for part in fields(given)}
        changes = {name: new for name, each in old.items() if (new := self.value(each)) is not each and new != each}
        return replace(given, **changes) if changes else given


def _values_of(job: JobSpec) -> Iterator[str]:
    for name, value in job.control.notice_headers.items():
        if is_secret_name(name):
            yield from str(value).split()
    urls = (*job.data.shards, *job.data.paths, job.checkpoint.directory, job.model.path, job.control.notice_url)
    for url in filter(None, urls):
        for userinfo in _USERINFO.findall(url):
            yield userinfo[:-1].rpartition(":")[2]
    if job.control.webhook_url is not None:
        yield job.control.webhook_url
    if job.script is not None:
        yield from (secret for _, secret in _parts(job.script.arguments) if secret)
