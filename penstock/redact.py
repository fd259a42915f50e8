"""What must not be seen in a log, an error or a record, and how is it hidden?

Texts of our own are redacted where they are made. Those of other libraries and of user code pass one of three places: a log
record, an exception that leaves a block of `hiding_secrets`, or a line that is printed in one. A secret is known by its form
(`user:password@` in a URL, an AWS key, a signature, a login's header) or, wherever it turns up, because this environment holds
it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO
from urllib.parse import quote, unquote

__all__ = ["first_line", "hiding_secrets", "holds_own_secret", "holds_secret", "redact", "redact_text"]

HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(^|[._\-])([a-z]*password|passwd|pwd|pass|passphrase|secrets?(_id)?|credentials?|creds|auth_?string|conn(ection)?_?str(ing)?|dsn"
    r"|pat|jwt|sas|cookie|webhook(_url)?|authorization|(basic|proxy|http)_auth"
    r"|(secret|api|access|secret_?access|private|account|storage|shared|encryption|signing)_?key(_?id)?"
    r"|(auth|access|api|session|bearer|refresh|secret|hf|github|gitlab|npm|bot|sas)_token)$"
    # Not `pad_token`, `eos_token`: models have those.
    r"|(^|[.\-])token$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(
    r"(passwo?r?d|passphrase|_pwd?|(^|_)pass|secrets?(_id|_key_base)?|token|_pat|(^|_|api|access|secret|private|account)key(_?id|_pem)?"
    r"|auth_?string|conn(ection)?_?str(ing)?s?(__\w+)?|(^|_)dsn|creds|credentials?|(^|_)(jwt|sas|cookie|bearer|auth)|authorization"
    r"|webhook(_url)?)(_?\d+)?$"
    r"|(passwo?r?d|passphrase|secret|token|(api|access|secret|private|account|encryption|signing)_?key)_"
    # Not `TOKEN_URL` or `API_KEY_FILE`, which say where one is, or which, and not `TOKEN_LIMIT`, a rule for them.
    r"(?!(\w+_)?(files?|paths?|dir|folder|url|uri|endpoint|host|names?|type|header|provider|issuer|audience|scopes?|arn"
    r"|namespace|store|limit|policy|project|bucket|mode|ttl(_\w+)?|version|validation)$)\w+$",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/\s\"'<>]+@")  # to the last @, as URLs are split: a password may hold one
_PASSWORD = re.compile(r"://[^/\s@\"':]*:[^/\s\"']+@")
_AWS_KEY_ID = re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b")
_PARAMETER = re.compile(
    r"(?i)(?:(?<![a-z0-9_])|(?<=%3B|%26))(X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|X-Goog-Signature"
    r"|sig|signature|(?:access_?|auth_?|id_?|refresh_?)?token|api_?key|(?:ssl_?)?password|passwd|passcode|(?<!-)pass|pwd|(?<!-)auth"
    r"|(?:private_key_)?passphrase|(?:client[_-]?)?secret|account_?key|shared_?access_?(?:key|signature))(?:=|%3D)(?!=)"
    r"(?:'((?:\\.|[^'\\\n])+)'|\"((?:\\.|[^\"\\\n])+)\"|\{((?:\}\}|[^}\n])+)\}[^&;\s\"'<>*,)\]}]*"
    r"|['\"{]?((?:(?!%3B|%26)[^&;\s\"'<>*])+))"
)
"""A secret in a URL's query or a connection string, which may stand in a query itself, quoted. The last group that matched is
the secret, the whole of one in quotes or braces. `google-auth==2.0` is a version."""
_NO_VALUE = ("auth", "pass")
"""Parameters whose values may be harmless words (`auth=disabled`), which other texts hold, too."""
_WEBHOOK = re.compile(
    r"(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/|webhook\.office\.com/webhookb2/)[^\s\"'<>]+"
)
_LOGIN = re.compile(r"(?i)\b(basic|bearer)\s+[a-z0-9+/=._~-]{16,}")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^\"]*?-----END [A-Z ]*PRIVATE KEY-----")
_PART = 8192
"""Characters of a printed line that are kept back until its end comes."""
_BEGINNING = 3
"""Characters of a line's end that are kept back at a flush where a secret begins with them."""
_MIN_LENGTH = 8
"""Characters of a secret from the environment; a shorter one is found in harmless words."""


def holds_secret(name: str, value: str) -> bool:
    """Return whether a setting looks like a secret: by its name or dotted path (`api_key`, `db.password`), or by its text."""
    if not value:
        return False
    text = _PASSWORD.search(value) or _AWS_KEY_ID.search(value) or _PARAMETER.search(value) or _WEBHOOK.search(value)
    return bool(text or _SECRET_NAME.search(name))


def holds_own_secret(text: str) -> bool:
    """Return whether a text looks like a secret, or holds one of this environment."""
    return holds_secret("", text) or any(secret in text for secret in _secrets_of_environment())


def redact_text(text: str) -> str:
    """Hide user info in URLs, keys, signatures of presigned URLs, logins, and the secrets of this environment."""
    return _redact_text(text, _secrets_of_environment())


def _redact_text(text: str, secrets: set[str]) -> str:
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    text = _USERINFO.sub(f"{HIDDEN}@", text)
    text = _AWS_KEY_ID.sub(HIDDEN, text)
    text = _WEBHOOK.sub(rf"\1{HIDDEN}", text)
    if "=" in text or "%3" in text:  # the other patterns together take half of this one's time
        text = _PARAMETER.sub(rf"\1={HIDDEN}", text)
    return _LOGIN.sub(rf"\1 {HIDDEN}", text)


def first_line(error: BaseException, limit: int = 300) -> str:
    """Return an error of another library in one line, without secrets. Cut last: half a secret is not recognised."""
    return redact_text((str(error).splitlines() or [repr(error)])[0])[:limit]


def redact(value: Any, name: str = "") -> Any:
    """Hide secrets in JSON-able data: values with names of secrets (`api_key`), and those `redact_text` finds."""
    return _redact(value, name, _secrets_of_environment())


def _redact(value: Any, name: str, secrets: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _redact(inner, str(key), secrets) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(inner, name, secrets) for inner in value]
    if isinstance(value, str):
        return HIDDEN if value and _SECRET_NAME.search(name) else _redact_text(value, secrets)
    return value


@contextlib.contextmanager
def hiding_secrets() -> Iterator[None]:
    """Let no exception and no printed line leave the block with a secret, and no log record this process.

    What takes exceptions from here on (Prefect, Ray, a traceback on stderr) writes them down as they are, with their causes;
    Ray keeps what its workers print.
    """
    _redact_logs()
    try:
        with _printing_no_secrets():
            yield
    except BaseException as error:
        clean = _without_secrets(error, {})
        if clean is not error:
            raise clean from clean.__cause__ or (None if clean.__suppress_context__ else clean.__context__)
        raise


def _secrets_of_environment() -> set[str]:
    """Return the values of variables named like secrets, and passwords in URLs; plain, and as URLs, Python and JSON quote."""
    return _secrets_of(tuple(os.environ.items()))


@functools.lru_cache(maxsize=1)  # called for each printed line, and the environment rarely changes
def _secrets_of(environment: tuple[tuple[str, str], ...]) -> set[str]:
    found: list[str] = []
    for name, value in environment:
        if _SECRET_VARIABLE.search(name) and name + value[:1] != "GOOGLE_APPLICATION_CREDENTIALS/":  # a file's path
            # `PREFECT_API_AUTH_STRING` is user:password
            found += [value, value.partition(":")[2]] if name.upper().endswith("AUTH_STRING") else [value]
        if "://" in value:
            found += [login[:-1].partition(":")[2] for login in _USERINFO.findall(value)]
        found += [each[each.lastindex or 0] for each in _PARAMETER.finditer(value) if each[1].lower() not in _NO_VALUE]
    long, quoted = [each for each in found if len(each) >= _MIN_LENGTH], (repr, ascii, json.dumps)
    return {form for each in long for form in (each, quote(each, safe=""), unquote(each), *(to(each)[1:-1] for to in quoted))}


class _Record(logging.LogRecord):
    """A log record whose message and traceback hold no secrets, whatever handler writes them."""

    def getMessage(self) -> str:
        return redact_text(super().getMessage())

    @property  # type: ignore[override]
    def exc_text(self) -> str | None:
        """Return the traceback, which the first formatter sets and all others use."""
        text = self.__dict__.get("exc_text")
        return text and redact_text(text)

    @exc_text.setter
    def exc_text(self, text: str | None) -> None:
        self.__dict__["exc_text"] = text


_patched: list[str] = []
"""Not empty once this process's log records and warnings are redacted."""


def _redact_logs() -> None:
    """Redact what this process logs and warns from now on. Ray has a factory of its own, which is still called."""
    if _patched:
        return
    _patched.append("logs")
    before, format_before = logging.getLogRecordFactory(), warnings.formatwarning

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        if type(record) is logging.LogRecord:
            record.__class__ = _Record
        else:
            record.msg, record.args = redact_text(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(make)
    warnings.formatwarning = lambda *args, **kwargs: redact_text(format_before(*args, **kwargs))


@contextlib.contextmanager
def _printing_no_secrets() -> Iterator[None]:
    """Redact what Python code writes to stdout and stderr, in any thread of this process, until the outermost block ends."""
    replaced = {
        name: stream for name in ("stdout", "stderr") if (stream := getattr(sys, name)) and not isinstance(stream, _Lines)
    }
    for name, before in replaced.items():
        setattr(sys, name, _Lines(before))
    try:
        yield
    finally:
        for name, before in replaced.items():
            if isinstance(lines := getattr(sys, name), _Lines):
                lines.end()
                setattr(sys, name, before)


class _Lines:
    """A stdout that hides secrets in each line; all else is delegated to the stream below."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._begun: dict[int, str] = {}
        """Thread -> its line that has not ended yet: `print` writes a line in pieces. A lock would outlive a fork."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def write(self, text: str) -> int:
        """Write the lines that end in the text."""
        thread = threading.get_ident()
        begun = self._begun.pop(thread, "") + text
        if "\n" in text or len(begun) > _PART:
            begun = redact_text(begun)
            end = len(begun) if len(begun) > _PART else begun.rfind("\n") + 1
            self._write(begun[:end])
            begun = begun[end:]
        if begun:
            self._begun[thread] = begun
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write one after the other."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write this thread's line as far as it is, but for what may become a secret of the environment."""
        thread = threading.get_ident()
        if begun := self._begun.pop(thread, ""):
            end = len(begun) - _begun_secret(begun)
            self._write(redact_text(begun[:end]))
            if begun[end:]:
                self._begun[thread] = begun[end:]
        with _going_on(self._below):
            self._below.flush()

    def end(self) -> None:
        """Write what all threads have begun."""
        while self._begun:
            self._write(redact_text(self._begun.popitem()[1]))

    def _write(self, text: str) -> None:
        with _going_on(self._below):
            self._below.write(text)


@contextlib.contextmanager
def _going_on(stream: TextIO) -> Iterator[None]:
    """Write to nowhere from now on if the reader is gone (`| head`, a closed terminal, a lost ssh): the work goes on."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _begun_secret(text: str) -> int:
    """Count the characters at the end of the text that may begin a secret."""
    found = 0
    for secret in _secrets_of_environment():
        lengths = range(min(len(secret) - 1, len(text)), max(found, _BEGINNING - 1), -1)
        found = next((length for length in lengths if text.endswith(secret[:length])), found)
    return found


def _without_secrets(error: BaseException, seen: dict[int, BaseException]) -> BaseException:
    """Redact the texts of the error and of its causes; return it, or a RuntimeError if its text cannot be changed."""
    if (key := id(error)) in seen:
        return seen[key]
    seen[key] = error
    if isinstance(error, BaseExceptionGroup):
        members = [_without_secrets(member, seen) for member in error.exceptions]
        if any(clean is not member for clean, member in zip(members, error.exceptions, strict=True)):
            made = BaseExceptionGroup(error.message, members)
            with contextlib.suppress(Exception):  # a class of the user's that cannot be derived
                made = error.derive(members)
            made.__dict__.update(error.__dict__)  # the notes, too
            made.__cause__, made.__context__ = error.__cause__, error.__context__
            made.__suppress_context__ = error.__suppress_context__
            seen[key] = error = made.with_traceback(error.__traceback__)
    for link in ("__cause__", "__context__"):
        behind = getattr(error, link)
        if behind is not None and (clean := _without_secrets(behind, seen)) is not behind:
            suppressed = error.__suppress_context__  # set by setting a cause
            setattr(error, link, clean)
            error.__suppress_context__ = suppressed
    error.args = tuple(_clean(value, seen) for value in error.args)
    for name in {*getattr(error, "__dict__", ()), "filename", "filename2", "strerror"}:
        value = getattr(error, name, None)
        if isinstance(value, str) and redact_text(value) != value:
            with contextlib.suppress(AttributeError):  # a property
                setattr(error, name, redact_text(value))
    if notes := getattr(error, "__notes__", None):
        error.__notes__ = redact(notes)
    if isinstance(error, Exception) and (text := str(error)) != redact_text(text):
        seen[key] = RuntimeError(f"{type(error).__name__}: {redact_text(text)}").with_traceback(error.__traceback__)
    return seen[key]


def _clean(value: object, seen: dict[int, BaseException]) -> object:
    """Redact an argument of an exception; it may be the causing exception."""
    if isinstance(value, BaseException):
        return _without_secrets(value, seen)
    return redact_text(value) if isinstance(value, str) else value
