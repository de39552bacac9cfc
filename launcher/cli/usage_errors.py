"""Errors of a command line: what is wrong with it, and what to type instead, in the style of all other errors."""

from __future__ import annotations

import contextlib
import difflib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeGuard

import click

from launcher.cli.defaults import name_origin

if TYPE_CHECKING:
    from launcher.errors import UsageError

MEANT = {
    "cancel": ("down",),
    "continue": ("resume",),
    "kill": ("down",),
    "launch": ("up", "local"),
    "list": ("ls",),
    "ps": ("ls",),
    "run": ("up", "local"),
    "start": ("up", "local"),
    "stop": ("down",),
    "tail": ("logs",),
    "top": ("status",),
    "help": ("--help",),
    "version": ("--version",),
}
"""Commands of other programs, and ours that do the same."""
FLAGS = ("help", "version")
NEVER_MEANT = ("prune", "rm")
"""Commands that remove files; no hint suggests them."""

GONE = {
    "drain-timeout": "timeouts.drain_s=S",
    "isolate": "isolation=namespace",
    "keep-own-tf-config": "keep_own_tf_config=true",
    "keep-tensorboard": "tensorboard=keep",
    "lease": "timeouts.lease_s=S",
    "metrics": "metrics=[ADDRESS:]PORT",
    "metrics-file": "metrics_file=FILE",
    "no-keras-patch": "keras.patch=false",
    "no-preload": "preload=false",
    "no-progress": "progress=false",
    "sample-every": "sample_every_s=S",
    "stall-timeout": "timeouts.stall_s=S",
    "start-timeout": "timeouts.start_s=S",
    "stop-grace": "timeouts.stop_grace_s=S",
}
"""Options of earlier versions, and the settings that do the same."""

ALIKE = 0.75
"""The least similarity (difflib's ratio) of an option that is suggested: a program may have similar ones."""


def refuse_command(name: str, known: Iterable[str], path: str) -> UsageError:
    """The error for a command that the group at `path` does not have."""
    likely = {each: (each,) for each in known if each not in NEVER_MEANT} | {each: MEANT[each] for each in FLAGS}
    close = difflib.get_close_matches(name, likely, 1)
    meant = MEANT.get(name) or (likely[close[0]] if close else ())
    return _make(f"`{path}` has no command {name}", hint=_suggest(meant, f"`{path} -h` lists its commands"))


def refuse_extra(words: Sequence[str], context: click.Context) -> UsageError:
    """The error for words that the command does not take."""
    what = f"argument {words[0]}" if len(words) == 1 else f"arguments {' '.join(words)}"
    return _make(f"`{context.command_path}` does not take the {what}", hint=_render_usage(context))


@contextlib.contextmanager
def naming_command(context: click.Context) -> Iterator[None]:
    """Adds the command to errors of click's parser, which leaves it out."""
    try:
        yield
    except click.UsageError as error:
        if error.ctx is None:
            error.ctx = context
        raise


def as_usage_error(error: click.ClickException) -> UsageError:
    """An error of click as one of ours."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return _make(error.format_message().rstrip("."))
    if isinstance(error, click.NoSuchOption):
        return _refuse_option(error.option_name, context)
    if isinstance(error, click.BadOptionUsage):
        option = next(each for each in context.command.get_params(context) if error.option_name in each.opts)
        return _make(f"{error.option_name} {_describe_value(option)}", hint=_help(context))
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return _make(f"`{context.command_path}` needs {name_origin(error.param, None)}", hint=_render_usage(context))
    if isinstance(error, click.BadParameter) and is_flag(error.param):
        return _make(f"{name_origin(error.param, context)}: expected true or false", hint=_help(context))
    if isinstance(error, click.BadParameter) and error.param is not None:
        return _make(f"{name_origin(error.param, context)}: {error.message.rstrip('.')}", hint=_help(context))
    return _make(error.format_message().rstrip("."), hint=_help(context))


def is_flag(parameter: click.Parameter | None) -> TypeGuard[click.Option]:
    """Whether the parameter is an option without a value."""
    return isinstance(parameter, click.Option) and parameter.is_flag


def refuse_choice(
    value: str, choices: Sequence[str], parameter: click.Parameter | None, context: click.Context | None
) -> UsageError:
    """The error for a word that is none of the choices."""
    *others, last = choices
    name = f"{name_origin(parameter, context)}: " if parameter is not None else ""
    close = difflib.get_close_matches(value, choices, 1)
    return _make(f"{name}expected {', '.join(others)} or {last}, not {shlex.quote(value)}", hint=_suggest(close, ""))


def _describe_value(option: click.Parameter) -> str:
    return "takes no value" if is_flag(option) else f"needs a value, {option.metavar}"


def _refuse_option(name: str, context: click.Context) -> UsageError:
    known = [opt for each in context.command.get_params(context) for opt in each.opts if opt.startswith("--")]
    gone = GONE.get(name.removeprefix("--"))
    if gone is not None and "--set" in known:
        return _make(f"`{context.command_path}` has no option {name}", hint=f"write --set {gone}")
    meant = difflib.get_close_matches(name, known, 1, ALIKE)
    dashes = "write -- before arguments of the program" if _has_spec(context) else _help(context)
    return _make(f"`{context.command_path}` has no option {name}", hint=_suggest(meant, dashes))


def _make(message: str, hint: str = "") -> UsageError:
    from launcher.errors import UsageError  # not before there is an error: `--help` needs none

    return UsageError(message, hint=hint)


def _has_spec(context: click.Context) -> bool:
    """Whether the words of the command are a spec, and arguments for its program."""
    return bool(getattr(context.command, "appends_arguments", False)) and not context.meta.get("distlaunch.names_hosts")


def _suggest(meant: Sequence[str], rest: str) -> str:
    return f"did you mean {' or '.join(meant)}? {rest[:1].upper()}{rest[1:]}".rstrip() if meant else rest


def _help(context: click.Context) -> str:
    return f"`{context.command_path} -h` shows its options"


def _render_usage(context: click.Context) -> str:
    return f"usage: {context.command_path} {' '.join(context.command.collect_usage_pieces(context))}"
