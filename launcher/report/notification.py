"""Notifications: selects the events of a run to notify people of, and writes a message for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.printable import printable
from launcher.report.run_events import AttemptEnded, Ended, Record, State
from launcher.spec.parts import NotifiedEvent
from launcher.spec.redaction import hide_text
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass

MESSAGE_LIMIT = 2000
"""The most characters of a message, which may come from a program's exception."""


@dataclass(frozen=True, kw_only=True)
class Notification:
    """An event of a run to notify people of; `task` and `host` caused the event, if a task did."""

    event: NotifiedEvent
    time: float
    attempt: int
    reference: str
    message: str
    task: str | None = None
    host: str | None = None


class Notifications:
    """Finds the events to notify people of."""

    def __init__(self) -> None:
        self._cause: tuple[str | None, str | None] = (None, None)
        """The task and the node that ended the last attempt."""

    def note(self, record: Record) -> Notification | None:
        """Returns the notification of this event; None for an event without notification."""
        match record.event:
            case AttemptEnded(report):
                verdict = report.verdict
                node = next((task.node for task in report.tasks if task.task == verdict.task), None)
                self._cause = verdict.task, node
                if verdict.reference == "stalled":
                    return self._make("stalled", record, verdict.reference, verdict.message)
            case State("restarting", reference, message):
                return self._make("restarted", record, reference, message)
            case Ended("failed", _, reference, message):
                return self._make("failed", record, reference, message)
            case Ended("succeeded", _, reference, message):
                self._cause = None, None
                return self._make("succeeded", record, reference, message)
        return None

    def _make(self, event: NotifiedEvent, record: Record, reference: str, message: str) -> Notification:
        text = hide_text(message)
        task, host = self._cause
        return Notification(
            event=event,
            time=record.time,
            attempt=record.attempt,
            reference=reference,
            message=text if len(text) <= MESSAGE_LIMIT else f"{text[: MESSAGE_LIMIT - 1]}…",
            task=task,
            host=host,
        )


def make_payload(
    notification: Notification, *, run_id: str, name: str, directory: str, started: float, goodput: float | None
) -> dict[str, Any]:
    """The JSON object of a notification; `goodput` is the share of training in the time so far, None if unknown."""
    return {
        "event": notification.event,
        "run": run_id,
        "name": name,
        "reference": notification.reference,
        "message": notification.message,
        "task": notification.task,
        "host": notification.host,
        "attempt": notification.attempt,
        "time": round(notification.time, 3),
        "elapsed_s": round(max(notification.time - started, 0.0), 3),
        "goodput": goodput,
        "directory": directory,
        # The field that Slack, Mattermost and others show.
        "text": f"{name} {notification.event}: {notification.message} ({run_id}, attempt {notification.attempt})",
    }


def make_variables(payload: Mapping[str, Any]) -> dict[str, str]:
    """The main fields of a notification as environment variables."""
    facts = {
        environment.EVENT: payload["event"],
        environment.RUN: payload["run"],
        environment.RUN_NAME: payload["name"],
        environment.ATTEMPT: payload["attempt"],
        environment.REFERENCE: payload["reference"],
        environment.MESSAGE: payload["message"],
        environment.TASK: payload["task"] or "",
        environment.DIRECTORY: payload["directory"],
    }
    return {name: printable(str(value)) for name, value in facts.items()}
