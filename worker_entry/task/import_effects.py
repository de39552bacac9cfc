"""Effects of imports besides `sys.modules`: undone after an early import, and repeated at the program's own import.

A program that has not imported TensorFlow yet sees the warning filters, loggers, exit handlers and folder of temporary
files of plain Python, and can configure them; its own import then finds this configuration.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

from worker_entry.protocol.frozen import dataclass

ExitHandler = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class State:
    """The state of this process before an import."""

    def __init__(self) -> None:
        self.filters = list(warnings.filters)
        self.environ = dict(os.environ)
        self.temporary = tempfile.tempdir
        self.handlers = list(_handlers())


@dataclass(frozen=True)
class Effects:
    """An import's changes to the process: warning filters added before and after the old ones, variables, and more.

    `handlers`: references to logging's new handlers, which a new configuration of logging closes. `finds_temporary`:
    whether the import has searched for the folder of temporary files, which Python does only once. `at_exit`: exit
    handlers, which run before those that the program has registered before the import.
    """

    first: list[Any]
    last: list[Any]
    environ: dict[str, str]
    handlers: list[Any]
    finds_temporary: bool
    at_exit: list[ExitHandler]

    @classmethod
    def since(cls, before: State, at_exit: list[ExitHandler]) -> Effects:
        """The difference between an earlier state and now."""
        new = [entry not in before.filters for entry in warnings.filters]
        split = new.index(False) if False in new else len(new)
        added = [entry for entry, is_new in zip(warnings.filters, new) if is_new]  # noqa: B905 - Python 3.9 has no `strict`
        return cls(
            added[:split],
            added[split:],
            {name: value for name, value in os.environ.items() if before.environ.get(name) != value},
            [each for each in _handlers() if each not in before.handlers],
            tempfile.tempdir != before.temporary,
            at_exit,
        )

    def repeat(self) -> None:
        """Makes the changes in a task, when its program imports the package."""
        filters: Any = warnings.filters
        filters[:] = [*self.first, *filters, *self.last]
        renew_filters()
        for name, value in self.environ.items():
            os.environ.setdefault(name, value)
        _handlers().extend(self.handlers)
        if self.finds_temporary:
            tempfile.gettempdir()
        # They were never unregistered: TensorFlow needs them even in a process that does not use it.
        for call, _, _ in self.at_exit:
            atexit.unregister(call)
        for call, arguments, keywords in self.at_exit:
            atexit.register(call, *arguments, **keywords)


def undo(before: State, effects: Collection[Effects]) -> None:
    """Undoes the effects in a task; variables stay undone from the beginning, because the task has its own."""
    warnings.filters[:] = before.filters  # type: ignore[index]  # typeshed has it as a Sequence
    renew_filters()
    tempfile.tempdir = before.temporary
    added = [each for effect in effects for each in effect.handlers]
    _handlers()[:] = [each for each in _handlers() if each not in added]


@contextlib.contextmanager
def noted_exit_handlers() -> Iterator[list[tuple[str, ExitHandler]]]:
    """Notes the exit handlers that modules register meanwhile, with the modules' names."""
    noted: list[tuple[str, ExitHandler]] = []
    register = atexit.register

    def note(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Callable[..., Any]:
        noted.append((sys._getframe(1).f_globals.get("__name__", ""), (call, arguments, keywords)))
        return register(call, *arguments, **keywords)

    atexit.register = note  # type: ignore[assignment]  # mypy wants the same type variables
    try:
        yield noted
    finally:
        atexit.register = register


class HiddenLoggers(dict[str, Any]):
    """logging's table of loggers, in which some loggers appear only when requested by name.

    A new configuration of logging disables all loggers that the table shows, unless it names them.
    """

    def __init__(self, shown: dict[str, Any], hidden: dict[str, Any]) -> None:
        super().__init__(shown)
        self._hidden = hidden

    @classmethod
    def hide(cls, known: Collection[str]) -> HiddenLoggers:
        """Hides all loggers except the known ones."""
        manager = logging.root.manager
        table: dict[str, Any] = manager.loggerDict
        new = {name: logger for name, logger in table.items() if name not in known}
        # A placeholder stands for a logger with children, and is made again with the first of them.
        hidden = {name: logger for name, logger in new.items() if isinstance(logger, logging.Logger)}
        found = cls({name: logger for name, logger in table.items() if name in known}, hidden)
        manager.loggerDict = found
        return found

    def __contains__(self, name: object) -> bool:
        if name in self._hidden:
            self.show([str(name)])
        return super().__contains__(name)

    def show(self, names: Collection[str]) -> None:
        """Shows the loggers as if they were created now."""
        for name in names:
            logger = self._hidden.pop(name, None)
            if logger is None:  # it was shown as the parent of another one
                continue
            self[name] = logger
            logging.root.manager._fixupParents(logger)  # type: ignore[attr-defined]  # as getLogger does
            logger._cache.clear()

    def show_all_except(self, packages: Collection[str]) -> None:
        """Shows the loggers that are not named after modules of these packages."""
        self.show([name for name in self._hidden if name.partition(".")[0] not in packages])

    def values(self) -> Any:
        """All that is shown; logging calls this when it clears the caches of all loggers."""
        for logger in self._hidden.values():
            logger._cache.clear()
        return super().values()


def renew_filters() -> None:
    """Makes the interpreter notice the changed filters, by leaving a context that invalidates its cache of them."""
    with warnings.catch_warnings():
        pass


def _handlers() -> list[Any]:
    """logging's references to all handlers, in the order of their creation."""
    found: list[Any] = logging.__dict__["_handlerList"]
    return found
