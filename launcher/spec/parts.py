"""The parts of a cluster spec that stand for themselves, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from launcher.failures import RESTARTED, FailureName, render_failures
from launcher.spec.fields import LIMITED_S, UNLESS_0, AtMost, FilledText, Port, Seconds, Text, Times


def _leave_null_out(schema: dict[str, Any]) -> None:
    """A field of a spec is left out or has a value; `null` is the text "null"."""
    for name, field in schema["properties"].items():
        if {"type": "null"} in field.get("anyOf", ()):
            value, _ = field["anyOf"]
            rest = {key: entry for key, entry in field.items() if key not in ("anyOf", "default")}
            schema["properties"][name] = {**value, **rest}


_Self = TypeVar("_Self", bound="Model")


class Model(BaseModel):
    """A part of a spec: frozen, without unknown fields, and never changed without being validated again."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_extra=_leave_null_out
    )

    def changed(self: _Self, **values: Any) -> _Self:
        """The same part with these values.

        Raises:
            ValidationError: it would not be valid with them.
        """
        return type(self).model_validate({**{name: getattr(self, name) for name in self.model_fields_set}, **values})

    def model_copy(self: _Self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> _Self:
        """A copy as it is; pydantic does not validate an update, so there is none."""
        if update:
            raise TypeError("model_copy does not validate an update; use changed()")
        return super().model_copy(deep=deep)


class SshSpec(Model):
    """How nodes are reached over SSH, over what the user's own ssh configuration says."""

    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.$-]*$")] | None = None
    """Whom to log in as."""
    hostname: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:%-]+$", max_length=255)] | None = None
    """Where to connect, when `host` is but a name for the node."""
    port: Port | None = None
    """The port of sshd."""
    identity_file: FilledText | None = None
    """A private key; the agent's others are not tried then."""
    known_hosts_file: FilledText | None = None
    """The one file in which the keys of hosts are looked up, in place of those of the ssh configuration."""
    proxy_jump: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@,\[\]-]*$")] | None = None
    """Machines to go through, as `ssh -J` takes them."""


class SyncSpec(Model):
    """The folder that is sent to the other machines before the start: only what changed, checked by its hash."""

    path: FilledText = "."
    """The folder here. What git ignores is left out."""
    to: FilledText
    """Its name there; a link that distlaunch makes and moves from one version to the next."""
    exclude: list[Text] = []
    """Patterns of files to leave out, as in .gitignore."""


class ProgramSpec(Model):
    """What every task runs: exactly one of `script`, `module` and `command`."""

    script: FilledText | None = None
    """A Python script, relative to the working directory."""
    module: FilledText | None = None
    """A Python module, run as `python -m` does."""
    command: Annotated[list[Text], Field(min_length=1)] | None = None
    """Any other program with its arguments; run as it is, without a shell."""
    args: list[Text] = []
    """Arguments of the script or module."""

    @model_validator(mode="after")
    def _is_one(self) -> ProgramSpec:
        given = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            what = "only one of them" if given else "one of them"
            raise PydanticCustomError("program", f"a program is a `script:`, a `module:` or a `command:`; give {what}")
        if self.command is not None and self.args:
            raise PydanticCustomError("program", "a command has its arguments in `command:`; leave `args:` out")
        if self.command is not None and not self.command[0]:
            raise PydanticCustomError("program", "the first word of `command:` is empty; write the program's name")
        return self


class KerasSpec(Model):
    """How Keras 3 is treated."""

    patch: bool = True
    """Whether to patch Keras 3, whose `model.fit` fails with more than one worker."""


class RestartSpec(Model):
    """What happens after a failure: the whole cluster is started again, with the same tasks and fresh ports."""

    max_restarts: Times = 0
    """How often. Restarts after a preemption or a taken port are not counted, but 0 turns them off as well."""
    period_s: Annotated[Seconds, UNLESS_0] = 0.0
    """Restarts are counted within so many seconds; 0: within the whole run."""
    pause_s: Annotated[Seconds, LIMITED_S] = 1.0
    """Before the second of restarts that follow each other soon, the first being at once; then it doubles, up to 60."""
    min_workers: Annotated[int, Field(ge=0)] = 0
    """When a node is lost and no spare is left, go on without it if so many workers remain; 0: do not."""
    max_worker_restarts: Times = 3
    """How often each worker of a parameter_server cluster is started again alone; all others go on meanwhile."""
    return_s: Annotated[Seconds, LIMITED_S] = 300.0
    """How long a lost node that nothing replaces is waited for, as while a machine starts again; 0: not at all."""
    on: Annotated[list[FailureName], Field(description=f"The failures after which. {render_failures()}.")] = [
        *RESTARTED
    ]


class TimeoutsSpec(Model):
    """How long things may take, in seconds."""

    start_s: Annotated[Seconds, UNLESS_0] = 600.0
    """From the start until every task has opened its port; 0 waits for ever."""
    stop_grace_s: Annotated[Seconds, AtMost(86_400, "a day, in which any program can save what it has")] = 10.0
    """From TERM to KILL when the user stops the run."""
    drain_s: Annotated[Seconds, UNLESS_0] = 300.0
    """How long the other training tasks may go on after the first has ended well; 0 waits for ever."""
    stall_s: Annotated[Seconds, UNLESS_0] | None = None
    """How long a cluster that is up may go without a step or, if it tells of none, without output; 0: for ever.
    Without it, 20 times as long as its steps take, and at least 120; a cluster that tells of none is let be."""
    lease_s: Annotated[
        Seconds, Field(ge=1), AtMost(604_800, "a week; the kernel counts in milliseconds, up to three weeks")
    ] = 60.0
    """How long a node goes on without a word from distlaunch; a connection that breaks may come back until then."""
