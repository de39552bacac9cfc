"""The parts of a cluster spec, as frozen values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from launcher.described import describe
from launcher.failures import RESTARTED, FailureName, render_failures
from launcher.spec import field_options
from launcher.spec.fields import (
    LIMITED_S,
    MANY,
    ONE,
    UNLESS_0,
    AtMost,
    FilledText,
    Port,
    Seconds,
    Text,
    Times,
    VariableName,
    WebAddress,
    Word,
    Words,
)
from launcher.spec.redaction import Hides, hide_login, hide_words
from launcher.spec.strategies import Framework
from launcher.tasks import DEMO
from worker_entry.protocol import environment


def _complete(schema: dict[str, Any], model: type[Any]) -> None:
    """Describes the fields and omits `null`: fields have a value or are left out; YAML's `null` is the text "null"."""
    describe(schema, model)
    for name, field in schema["properties"].items():
        if {"type": "null"} in field.get("anyOf", ()):
            values = [value for value in field["anyOf"] if value != {"type": "null"}]
            rest = {key: entry for key, entry in field.items() if key not in ("anyOf", "default")}
            schema["properties"][name] = {**(values[0] if len(values) == 1 else {"anyOf": values}), **rest}


def _find_metadata(annotation: Any) -> Iterator[Any]:
    """The metadata of a type within an annotation, such as that of the list in `Annotated[list[str], …] | None`."""
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for part in get_args(annotation):
        yield from _find_metadata(part)


_Self = TypeVar("_Self", bound="Model")


class Model(BaseModel):
    """A part of a spec: frozen, without unknown fields, and validated again with every change."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, json_schema_extra=_complete)

    def changed(self: _Self, **values: Any) -> _Self:
        """The same part with these values.

        Raises:
            ValidationError: the result would not be valid.
        """
        return type(self).model_validate({**{name: getattr(self, name) for name in self.model_fields_set}, **values})

    def without_secrets(self: _Self) -> _Self:
        """The same part, for messages and files: secrets are redacted, as the types of the fields say (`Hides`)."""
        return self.changed(**{name: self._show(name) for name in self.model_fields_set})

    def _show(self, name: str) -> Any:
        value, field = getattr(self, name), type(self).model_fields[name]
        marks = [*field.metadata, *_find_metadata(field.annotation)]
        for mark in marks if value is not None else ():
            if isinstance(mark, Hides):
                return mark.hide(value)
        return value.without_secrets() if hasattr(value, "without_secrets") else value

    def model_copy(self: _Self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> _Self:
        """An unchanged copy; pydantic would not validate an update, so updates are refused."""
        if update:
            raise TypeError("model_copy does not validate an update; use changed()")
        return super().model_copy(deep=deep)


class SshSpec(Model):
    """How to reach nodes over SSH; overrides the user's ssh configuration."""

    user: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.$-]*$")] | None = None
    """The user to log in as."""
    hostname: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:%-]+$", max_length=255)] | None = None
    """The address to connect to, if `host` is only a name for the node."""
    port: Port | None = None
    """The port of sshd."""
    identity_file: FilledText | None = None
    """A private key; the other keys of the SSH agent are not tried."""
    known_hosts_file: FilledText | None = None
    """The only file in which to look up host keys, instead of the files that the ssh configuration names."""
    proxy_jump: (
        Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:@,\[\]-]*$"), Hides(hide_login)] | None
    ) = None
    """Machines to go through, as for `ssh -J`."""


class ConnectionCommandSpec(Model):
    """A program that connects to a node: it runs a command there, and connects the command's stdin and stdout."""

    command: Annotated[list[Word], Field(min_length=1), Hides(hide_words)]
    """The program and its arguments. `{host}` stands for the node, `{command}` for a command line for the node's shell.
    Without `{command}`, the words of the command follow as arguments."""


Connection = Annotated[
    Annotated[Literal["paramiko", "openssh", "docker", "kubernetes", "slurm"], Tag(ONE)]
    | Annotated[ConnectionCommandSpec, Tag(MANY)],
    Discriminator(lambda value: MANY if isinstance(value, (dict, ConnectionCommandSpec)) else ONE),
]


class SyncSpec(Model):
    """The folder that is sent to the other machines before the start: only changed files, verified by hash."""

    path: FilledText = "."
    """The folder on this machine. Files that git ignores are left out."""
    to: FilledText
    """The path on the other machines: a symbolic link that distlaunch creates, and switches to each new version."""
    exclude: list[Text] = []
    """Patterns of files to leave out, as in .gitignore."""


class NodeSourceSpec(Model):
    """The source that names the nodes of a cluster."""

    command: Annotated[Words, Field(min_length=1)]
    """A program and its arguments, run here without a shell. Prints `HOST` or `HOST:SLOTS` lines, or JSON: hosts,
    objects with the fields of a node, or an Ansible inventory."""


_SlurmWord = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,:@%/+=\[\]-]+$", max_length=255)]
_SlurmOption = Annotated[
    str, StringConstraints(pattern=r"^--[a-z][a-z-]*(=[A-Za-z0-9_.,:@%/+=&|*()\[\]-]+)?$", max_length=255)
]


class SlurmSpec(Model):
    """The resources that a Slurm job requests, with `nodes: slurm`."""

    nodes: Annotated[int, Field(ge=1), AtMost(10_000, "no job has more nodes")] = 1
    """The number of nodes that `distlaunch submit` requests, without spares."""
    tasks_per_node: Annotated[int, Field(ge=1), AtMost(1024, "no node has room for more")] = 1
    """The number of workers on each node."""
    partition: _SlurmWord | None = None
    """The partition of the job."""
    account: _SlurmWord | None = None
    """The account to which the job is charged."""
    time: _SlurmWord | None = None
    """The time limit, as `sbatch --time` takes it: minutes, `HH:MM:SS`, `D-HH`. Default: the partition's limit."""
    gpus_per_node: _SlurmWord | None = None
    """GPUs on each node: a number, or a type and a number like `a100:4`."""
    extra: list[_SlurmOption] = []
    """More options of `sbatch`, like `--constraint=ib`."""
    spares: Annotated[int, Field(ge=0), AtMost(1000, "no job needs more")] = 0
    """The number of spare nodes, the last of the job, which replace lost nodes. The job then survives a lost node."""
    stop_early_s: Annotated[Seconds, LIMITED_S] = 60.0
    """How long before the job's time limit the tasks are asked to stop, so that they can save; 0: Slurm asks them."""


class ProgramSpec(Model):
    """The program that every task runs: exactly one of `script`, `module` and `command`."""

    script: FilledText | None = None
    """A Python script, relative to the working directory."""
    module: FilledText | None = None
    """A Python module, run as `python -m` does."""
    command: Annotated[Words, Field(min_length=1)] | None = None
    """Any other program with its arguments; runs without a shell."""
    args: Words = []
    """Arguments of the script or module."""

    @model_validator(mode="after")
    def _is_one(self) -> ProgramSpec:
        given = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            what = "only one of them" if given else "one of them"
            raise PydanticCustomError("program", f"a program is a `script:`, a `module:` or a `command:`; give {what}")
        if self.command is not None and self.args:
            raise PydanticCustomError("program", "a command has its arguments in `command:`; remove `args:`")
        if self.command is not None and not self.command[0]:
            raise PydanticCustomError("program", "the first word of `command:` is empty; write the program's name")
        return self


DEMOS: Mapping[Framework, ProgramSpec] = {
    "tensorflow": ProgramSpec(module=DEMO),
    "jax": ProgramSpec(module="worker_entry.demo.train_jax"),
}
"""The built-in demos: a spec that names no program runs that of its framework."""


class KerasSpec(Model):
    """The changes that distlaunch makes to Keras 3."""

    patch: bool = True
    """Whether to patch Keras 3, whose `model.fit` fails with more than one worker."""


class RestartSpec(Model):
    """Restarts of the whole cluster after a failure, with the same tasks and fresh ports."""

    max_restarts: Annotated[Times, field_options.MAX_RESTARTS] = 0
    """The maximum number of restarts; those after a preemption or a taken port do not count. 0 disables all."""
    period_s: Annotated[Seconds, UNLESS_0] = 0.0
    """The period within which restarts are counted, in seconds; 0: the whole run."""
    pause_s: Annotated[Seconds, LIMITED_S] = 1.0
    """The pause, in seconds, before the second restart in quick succession; doubles each time, up to 60. The first
    restart is immediate."""
    min_workers: Annotated[int, Field(ge=0)] = 0
    """If a node is lost and no spare is left, continue without it if this many workers remain; 0: do not continue."""
    max_worker_restarts: Times = 3
    """How often each worker of a parameter_server cluster may restart individually, while all other tasks continue."""
    return_s: Annotated[Seconds, LIMITED_S] = 300.0
    """How long to wait for a lost node that nothing replaces, such as a machine that reboots; 0: do not wait."""
    on: Annotated[
        list[FailureName], Field(description=f"The failures after which the cluster restarts. {render_failures()}.")
    ] = [*RESTARTED]


class TimeoutsSpec(Model):
    """Time limits, in seconds."""

    start_s: Annotated[Seconds, UNLESS_0] = 600.0
    """From the start until every task has opened its port and joined the cluster; 0: no limit."""
    stop_grace_s: Annotated[Seconds, AtMost(86_400, "that is a day, in which any program can save its state")] = 10.0
    """How long tasks may take to end when the user stops the run."""
    drain_s: Annotated[Seconds, UNLESS_0] = 300.0
    """How long the other training tasks may continue after the first has succeeded; 0: no limit."""
    stall_s: Annotated[Seconds, UNLESS_0] | None = None
    """How long a running cluster may go without a step or, if it reports no steps, without output; 0: no limit.
    Default: 20 times the time of a long step, at least 10 if only other tasks could wake each task, else at least 120;
    not checked if no steps are reported."""
    lease_s: Annotated[
        Seconds, Field(ge=1), AtMost(604_800, "that is a week; the kernel counts in milliseconds, up to three weeks")
    ] = 60.0
    """How long a node continues without contact with distlaunch; until then, a broken connection can be replaced."""


NotifiedEvent = Literal["failed", "restarted", "stalled", "succeeded"]


class NotifySpec(Model):
    """The recipients of notifications about a run, and the events that they are notified of."""

    webhook: Annotated[WebAddress | None, Field(repr=False)] = None
    """The URL to which a JSON object is POSTed; a secret, which is never shown and not written to the run's files."""
    webhook_from: VariableName | None = None
    """The variable of distlaunch's environment that has the URL."""
    command: Annotated[Words, Field(min_length=1)] | None = None
    """A program and its arguments, run here without a shell; reads the JSON object from stdin."""
    on: Annotated[list[NotifiedEvent], Field(min_length=1)] = ["failed", "stalled", "succeeded"]
    """The events that cause a notification."""

    def without_secrets(self) -> NotifySpec:
        """A webhook is replaced by the variable from which `resume` takes it."""
        shown = super().without_secrets()
        if shown.webhook is None:
            return shown
        given = {name: getattr(shown, name) for name in shown.model_fields_set - {"webhook"}}
        return NotifySpec(**given, webhook_from=environment.WEBHOOK)

    @model_validator(mode="after")
    def _has_recipients(self) -> NotifySpec:
        if self.webhook is not None and self.webhook_from is not None:
            raise PydanticCustomError("notify", "has both `webhook:` and `webhook_from:`; keep one of them")
        if all(given is None for given in (self.webhook, self.webhook_from, self.command)):
            raise PydanticCustomError("notify", "names no recipient; add `webhook_from:` or `command:`")
        if self.command is not None and not self.command[0]:
            raise PydanticCustomError("notify", "the first word of `command:` is empty; write the program's name")
        return self
