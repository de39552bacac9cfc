"""Redacts secrets, recognised by name or by form, so that they are neither shown nor written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from worker_entry.protocol.frozen import dataclass

REDACTED = "(redacted)"

_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|(?:^|_)PASS$|API_?KEY|_KEY|^KEY|CREDENTIAL|WEBHOOK(?!_FROM)", re.IGNORECASE
)
_COUNT = re.compile(r"TOKENS", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]*)?(e[0-9]+)?", re.IGNORECASE)

_WORD = r"-{0,2}[A-Za-z_][\w.-]*"
_SETTING = re.compile(rf"({_WORD})=(.*)", re.ASCII | re.DOTALL)
_VALUE = r"([^\s&;\"']+|\"[^\"]*\"|'[^']*')"
_SETTING_WITHIN = re.compile(rf"(?<![\w.-])(?:({_WORD})(=)|(-[\w.-]+)([ \t]+)(?!-)){_VALUE}", re.ASCII)
"""`NAME=value` or `--name value` in the words of a shell, or `name=value` in the query of a URL."""

_ENV_FLAG = re.compile(r"--env|-[a-zA-Z]*e")
_VARIABLE = re.compile(r"([^=]*)=.*", re.DOTALL)
_ENV_WORD = re.compile(
    r"(--env=[^=]*|-[a-zA-Z]*?e[A-Za-z_][A-Za-z0-9_]*|--set=(?:[^=]*\.)?env(?:\.[^=]*)?)=.*", re.DOTALL
)
_SET_ENV = re.compile(r"((?:[^=]*\.)?env(?:\.[^=]*)?)=.*", re.DOTALL)
"""The options with which a command line sets variables of the tasks."""

_PASSWORD_OF_URL = re.compile(r"(://[^\s/?#@:\"']*):(?:[^\s/\"']{1,4096}|(?!\d+[/?#])[^\s\"']{1,4096}?)@")
"""Matches up to the last `@` before the path. A password with a `/` makes the URL invalid, but occurs; digits before
a `/` are a port."""
_PASSWORD_OF_LOGIN = re.compile(r"(?:(?<=[,\s])|^)([^,:@\s]*):[^,@\s]*@")
"""`user:password@` in a list of machines."""
_USER_OF_URL = re.compile(r"(https?://)[^\s/?#@:\"']+@", re.IGNORECASE)
"""In the URL of a web server, a user name without a password is a token."""


@dataclass(frozen=True)
class Hides:
    """Marks a field of a spec whose value may contain secrets, in its annotation."""

    hide: Callable[[Any], Any]
    """Takes the value; returns one without secrets, which is still valid."""


def hide_login(jump: str) -> str:
    """Machines as for `ssh -J`, without passwords: ssh takes none there."""
    return _PASSWORD_OF_LOGIN.sub(r"\1@", jump)


def hide_text(text: str) -> str:
    """The text with everything that looks like a secret redacted."""
    text = _PASSWORD_OF_URL.sub(rf"\1:{REDACTED}@", text)
    text = _USER_OF_URL.sub(rf"\1{REDACTED}@", text)
    return _SETTING_WITHIN.sub(_hide_setting, text)


def hide_words(words: Sequence[str]) -> list[str]:
    """The words of a command line without the values of secret options, variables and URLs."""
    return list(_hide_words(words))


def hide_command(words: Sequence[str]) -> list[str]:
    """The words of a `distlaunch` command without the values of all variables and of other secrets."""
    plain, before = [], ""
    for word in words:
        plain.append(_hide_variable(before, word))
        before = word
    return hide_words(plain)


def _hide_variable(before: str, word: str) -> str:
    """Redacts VALUE in `-e NAME=VALUE`, `--env=NAME=VALUE` or `--set env.NAME=VALUE`; `before` precedes `word`."""
    if _ENV_FLAG.fullmatch(before):
        found = _VARIABLE.fullmatch(word)
    else:
        found = _ENV_WORD.fullmatch(word) or (_SET_ENV.fullmatch(word) if before == "--set" else None)
    return f"{found[1]}={REDACTED}" if found is not None else word


def hide_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without secret values."""
    return {name: REDACTED if is_secret(name, value) else value for name, value in env.items()}


def is_secret(name: str, value: str) -> bool:
    """Whether the value of a variable must not be shown."""
    return _is_name_of_secret(name, value) or hide_text(value) != value


def _hide_words(words: Sequence[str]) -> Iterator[str]:
    before = ""
    for word in words:
        setting = _SETTING.fullmatch(word)
        if before.startswith("-") and not word.startswith("--") and _is_name_of_secret(before, word):
            yield REDACTED
        elif setting is not None and _is_name_of_secret(setting[1], setting[2]):
            yield f"{setting[1]}={REDACTED}"
        else:
            yield hide_text(word)
        before = "" if "=" in word else word


def _hide_setting(found: re.Match[str]) -> str:
    name, between = (found[1], found[2]) if found[1] else (found[3], found[4])
    return f"{name}{between}{REDACTED}" if _is_name_of_secret(name, found[5]) else found[0]


def _is_name_of_secret(name: str, value: str) -> bool:
    plain = name.lstrip("-").replace("-", "_").replace(".", "_")
    if _COUNT.search(plain) and _NUMBER.fullmatch(value):  # `--max-tokens 512` is a count
        return False
    return _NAME.search(plain) is not None
