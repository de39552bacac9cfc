"""The plan as data, as commands and as text, and the spec as data; always without secrets."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from launcher.plan.launch_plan import LaunchPlan, TaskPlan
from launcher.plan.tf_config import format_address
from launcher.plan.tf_config import render as render_tf_config
from launcher.spec.models import ClusterSpec
from launcher.spec.redaction import hide_words
from launcher.wording import count_of
from worker_entry.protocol import environment

_NOT_SHOWN = f'{environment.TF_CONFIG}="${environment.TF_CONFIG}"'
"""The placeholder in a command for a TF_CONFIG whose addresses are stored elsewhere."""


def render_json(plan: LaunchPlan) -> dict[str, Any]:
    """The plan for `--json`, without secrets: each task with its complete TF_CONFIG."""
    shown = _render(plan)
    for entry, task in zip(shown["tasks"], plan.tasks, strict=True):
        if task.tf_config is not None:
            entry["env"] = {**entry["env"], environment.TF_CONFIG: render_tf_config(task.tf_config)}
            entry["command"] = render_by_hand(task)
    return shown


def render_file(plan: LaunchPlan) -> dict[str, Any]:
    """The plan for plan.json: as for `--json`, but with the addresses of all tasks only once, in `cluster`.

    A TF_CONFIG with other addresses, such as an evaluator's, stays complete.
    """
    shown = _render(plan)
    clusters = [task.tf_config["cluster"] for task in plan.tasks if task.tf_config is not None]
    shown["cluster"] = clusters[0] if clusters else {}
    for entry in shown["tasks"]:
        if entry["tf_config"] is not None and entry["tf_config"]["cluster"] == shown["cluster"]:
            entry["tf_config"] = {"task": entry["tf_config"]["task"]}
    return shown


def complete_command(plan: Mapping[str, Any], task: Mapping[str, Any]) -> str:
    """The command of a task in plan.json, with its TF_CONFIG; accepts malformed content of the file."""
    command, config = str(task.get("command", "")), task.get("tf_config")
    if not isinstance(config, dict):
        return command
    text = json.dumps({"cluster": plan.get("cluster"), **config}, separators=(",", ":"))
    return command.replace(_NOT_SHOWN, f"{environment.TF_CONFIG}={shlex.quote(text)}", 1)


def _render(plan: LaunchPlan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "strategy": plan.strategy,
        "directory": plan.directory,
        "warnings": list(plan.warnings),
        "routes": dict(plan.routes),
        "tasks": [
            {
                "task": str(task.task),
                "node": task.node,
                "python": task.python,
                "address": task.address,
                "port": task.port,
                "program": {
                    "kind": task.program.kind,
                    "target": hide_words([task.program.target])[0],
                    "args": hide_words(task.program.args),
                },
                "tf_config": task.tf_config,
                "env": task.shown_env(),
                "command": render_by_hand(task, whole=False),
            }
            for task in plan.tasks
        ],
    }


def render_spec(spec: ClusterSpec) -> str:
    """The spec for the run's files, without secrets; the result is still a valid spec."""
    return spec.without_secrets().model_dump_json(indent=2, exclude_defaults=True) + "\n"


def render_by_hand(task: TaskPlan, *, whole: bool = True) -> str:
    """The shell command that runs this task by hand on its node; secrets come from the shell's environment.

    distlaunch must be installed there: it patches Keras in a Python program, and in the Pythons that a command starts,
    unless the spec turns the patches off. The user has to fill in secret arguments. Unless `whole`, TF_CONFIG also
    comes from the shell's environment.
    """
    settings = [
        f'{name}="${name}"' if name in task.secrets else f"{name}={shlex.quote(value)}"
        for name, value in task.env.items()
    ]
    if task.tf_config is not None:
        text = f"{environment.TF_CONFIG}={shlex.quote(render_tf_config(task.tf_config))}" if whole else _NOT_SHOWN
        settings.append(text)
    program = task.program
    if program.kind == "command" and not task.patch_keras:
        command = shlex.join(hide_words([program.target, *program.args]))
    else:
        flags = [] if task.patch_keras else ["--no-keras-patch"]
        target = [*{"module": ["-m"], "command": ["--"]}.get(program.kind, []), program.target]
        words = shlex.join(["-m", "worker_entry", "run", *flags, *target, *hide_words(program.args)])
        command = f"{_quote_path(task.python)} {words}"
    return f"cd {_quote_path(task.directory)} && env -u TF_CONFIG {' '.join(settings)} {command}"


def _quote_path(path: str) -> str:
    """The path, quoted for the node's shell, which expands `~`."""
    if path == "~":
        return path
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def render_text(plan: LaunchPlan) -> str:
    """The plan as text: a block for each task."""
    tasks, nodes = len(plan.tasks), len(plan.nodes)
    size = f"{count_of(tasks, 'task')} on {count_of(nodes, 'node')}"
    lines = [f"{plan.name}: {plan.strategy}, {size}, in {plan.directory}"]
    lines += [f"Warning: {warning}" for warning in plan.warnings]
    if plan.unasked:
        lines.append(f"Cores and GPUs not known yet: {', '.join(plan.unasked)}")
    lines += [f"Tunnel: {address} stands for {host}" for address, host in plan.routes.items()]
    for task in plan.tasks:
        notes = [] if task.explicit_port else ["or the next free port"]
        if task.other_addresses:
            notes.append(f"or {', '.join(task.other_addresses)} if not all nodes reach the first")
        note = f" ({'; '.join(notes)})" if notes else ""
        config = "unset" if task.tf_config is None else json.dumps(task.tf_config)
        env = task.shown_env()
        lines += [
            "",
            f"{task.task} on {task.node}",
            f"  address    {format_address(task.address, task.port)}{note}",
            f"  TF_CONFIG  {config}",
            *(f"  {'env' if i == 0 else '':<9}  {name}={value}" for i, (name, value) in enumerate(sorted(env.items()))),
            f"  by hand    {render_by_hand(task)}",
        ]
    return "\n".join(lines)
