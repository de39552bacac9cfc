"""The pods of a run: created at its start, watched while it runs, and removed at its end."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from launcher import helpers
from launcher.kubernetes.calls import Kubectl, KubernetesError, NotFoundError
from launcher.kubernetes.pod import QUEUE, RUN, Manifest
from launcher.kubernetes.pod_state import PULL_ERRORS, PodState, explain_wait, parse_pod

TELL_S = 2.0
"""How long pods may take to start before a message says why they wait."""
REMIND_S = 60.0
"""How often the message is repeated."""
HOPELESS_S = 10.0
"""How long a pod may be in a state that only an outside change can end."""
PULL_S = 60.0
"""How long pulling an image may fail: registries have short outages."""
RETRY_S = (0.5, 5.0)
"""The first and the longest pause before the pods are watched again."""
END_S = 60.0
"""How long the pods may take to end."""
WAITS = ("BackOff", "Failed", "NetworkNotReady", "Pulling")
"""Prefixes of the event reasons that explain why a pod does not run yet."""
_POLL_S = 0.5

Watcher = Callable[[PodState, bool], None]
"""Takes a pod that is being taken away or has ended, and whether it still exists; called from the watching thread."""


class RunPods:
    """The pods of one run.

    Args:
        kubectl: calls the cluster of the pods.
        manifest: the job that creates the pods.
    """

    def __init__(self, kubectl: Kubectl, manifest: Manifest) -> None:
        self.kubectl = kubectl
        self.name: str = manifest["metadata"]["name"]
        """The name of the job."""
        self.count: int = manifest["spec"]["completions"]
        self.order: list[str] = []
        """The pods that are the run's nodes, in the order of its tasks."""
        self._manifest = manifest
        self.selector = f"{RUN}={self.name}"
        self._changed = threading.Condition()
        self._seen: dict[str, PodState] = {}
        self._gone: dict[str, PodState] = {}
        self._problem = ""
        """Why the pods cannot be watched."""
        self._waiting_since: dict[str, float] = {}
        """When each pod began to wait for its image, or for an outside change."""
        self._closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._begun = False
        self.watcher: Watcher = lambda _pod, _is_there: None

    def begin(self, order: Sequence[str] = ()) -> None:
        """Creates the pods unless they exist; `order`: the pods that an earlier controller of the run has used.

        Raises:
            KubernetesError: the cluster refuses the job.
        """
        if self._begun:
            return
        self.order = [*order]
        with contextlib.suppress(NotFoundError):
            job = self.kubectl.show("job", self.name)
            ends = [each for each in (job.get("status") or {}).get("conditions") or [] if each.get("status") == "True"]
            if any(each.get("type") in ("Complete", "Failed") for each in ends):
                self.kubectl.call("delete", "job", self.name, "--cascade=foreground")
        self._begun = True
        try:
            self.kubectl.create(self._manifest)
        except KubernetesError as error:
            if not error.says("(AlreadyExists)"):
                raise
        threading.Thread(target=self._follow, name="pods", daemon=True).start()

    def await_usable(
        self, is_wanted: Callable[[], bool], tell: Callable[[str], None], slots: Sequence[str], limit_s: float
    ) -> list[PodState]:
        """Waits until all pods can be used, and returns them in the order of their tasks; empty if not wanted.

        A pod that was used before keeps its place; new pods take the places of pods that are gone.

        Args:
            is_wanted: whether to continue.
            tell: gets the reasons why pods wait.
            slots: the tasks of the first pod, of the second pod, …
            limit_s: how long to wait; 0: without limit.

        Raises:
            KubernetesError: the pods cannot be used in time, or not at all.
        """
        began = time.monotonic()
        reported, reported_at = "", 0.0
        while is_wanted():
            with self._changed:
                usable = {name for name, pod in self._seen.items() if pod.is_usable}
                if len(usable) >= self.count:
                    self.order = self._arrange(usable)
                    return [self._seen[name] for name in self.order]
            now = time.monotonic()
            if now - began > TELL_S:
                reasons = self.explain(slots)
                hopeless = self._is_hopeless(now)
                if hopeless or (limit_s and now - began > limit_s):
                    within = "" if hopeless else f" within {limit_s:g} s"
                    message = f"{len(usable)} of {self.count} pods run{within}"
                    raise KubernetesError(message, evidence=reasons, hint=f"see `kubectl describe job {self.name}`")
                text = "; ".join(reasons)
                if text != reported or now - reported_at > REMIND_S:
                    tell(f"Waiting for {self.count - len(usable)} of {self.count} pods, {now - began:.0f} s: {text}")
                    reported, reported_at = text, now
            with self._changed:
                self._changed.wait(_POLL_S)
        return []

    def explain(self, slots: Sequence[str]) -> list[str]:
        """The reasons why pods do not run yet, each once, with the tasks that wait."""
        with self._changed:
            pods, problem = {**self._seen}, self._problem
        usable = {name for name, pod in pods.items() if pod.is_usable}
        free = [slot for slot, name in zip(slots, self._arrange(usable), strict=True) if not name]
        waiting = [pod for pod in pods.values() if not pod.is_leaving and not pod.is_usable]
        if problem:
            return [problem]
        reasons: dict[str, list[str]] = {}
        for index, slot in enumerate(free):
            reason = self._explain(waiting[index]) if index < len(waiting) else self._explain_job()
            reasons.setdefault(reason, []).append(slot)
        return [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]

    def find(self, name: str) -> tuple[PodState, bool] | None:
        """The pod as it was last seen, and whether it still exists."""
        with self._changed:
            if name in self._seen:
                return self._seen[name], True
            return (self._gone[name], False) if name in self._gone else None

    def events(self, kind: str, name: str) -> list[str]:
        """The events that the cluster has reported about an object, the latest last, each as `Reason: message`."""
        selector = f"--field-selector=involvedObject.kind={kind},involvedObject.name={name}"
        try:
            items = self.kubectl.show("events", selector).get("items") or []
        except KubernetesError:
            return []
        ordered = sorted(items, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or ""))
        return [f"{item.get('reason')}: {' '.join(str(item.get('message')).split())}" for item in ordered]

    def close(self) -> None:
        """Stops watching the pods, but keeps them."""
        self._closed.set()
        if self._process is not None:
            helpers.kill(self._process)

    def remove(self) -> int | None:
        """Deletes the pods and their job; returns how many pods are left, None if that is unknown."""
        self.close()
        left = remove_pods(self.kubectl, self.name) if self._begun else 0
        self._begun = left != 0
        return left

    def _arrange(self, usable: set[str]) -> list[str]:
        """The usable pods at the places of their tasks; an empty name is a free place."""
        kept = [name if name in usable else "" for name in self.order] or [""] * self.count
        new = sorted(usable - {*kept})
        return [name or (new.pop(0) if new else "") for name in kept]

    def _is_hopeless(self, now: float) -> bool:
        for name, since in [*self._waiting_since.items()]:
            pod = self._seen.get(name)
            if pod is not None and now - since > (HOPELESS_S if pod.is_hopeless else PULL_S):
                return True
        return False

    def _explain(self, pod: PodState) -> str:
        is_told = pod.waits[0] in PULL_ERRORS or pod.find("PodScheduled") is None or not pod.machine
        events = [] if is_told else self.events("Pod", pod.name)
        return explain_wait(pod, [event for event in events if event.startswith(WAITS)])

    def _explain_job(self) -> str:
        """Why there are too few pods."""
        with contextlib.suppress(KubernetesError):
            job = self.kubectl.show("job", self.name)
            if (job.get("spec") or {}).get("suspend"):
                queue = (job.get("metadata") or {}).get("labels") or {}
                words = [event for event in self.events("Job", self.name) if not event.startswith("Suspended: ")]
                return f"not admitted yet by queue {queue.get(QUEUE, '')}{_last(words)}"
        events = [event for event in self.events("Job", self.name) if event.startswith("Failed")]
        return events[-1] if events else "its pod has not been made yet"

    # --- watching ---

    def _follow(self) -> None:
        pause_s = RETRY_S[0]
        while not self._closed.is_set():
            try:
                self._replace([parse_pod(shown) for shown in _list_pods(self.kubectl, self.name)])
                pause_s = RETRY_S[0]
                self._process = self.kubectl.watch("pods", self.selector)
                if self._closed.is_set():
                    helpers.kill(self._process)
                assert self._process.stdout is not None
                for kind, shown in read_events(self._process.stdout):
                    self._note(parse_pod(shown), is_there=kind != "DELETED")
            except (KubernetesError, OSError, ValueError) as error:
                self._problem = f"the pods cannot be watched: {error}"
            finally:
                if self._process is not None:
                    helpers.kill(self._process)
                    self._process.wait()
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, RETRY_S[1])

    def _replace(self, pods: Sequence[PodState]) -> None:
        """Replaces the known pods with the current ones, after a time in which changes were missed."""
        self._problem = ""
        for gone in self._seen.keys() - {pod.name for pod in pods}:
            self._note(self._seen[gone], is_there=False)
        for pod in pods:
            self._note(pod, is_there=True)

    def _note(self, pod: PodState, *, is_there: bool) -> None:
        with self._changed:
            before = self._seen.get(pod.name)
            if is_there:
                self._seen[pod.name] = pod
            else:
                self._seen.pop(pod.name, None)
                self._gone[pod.name] = pod
            if pod.is_hopeless or pod.waits[0] in PULL_ERRORS:
                self._waiting_since.setdefault(pod.name, time.monotonic())
            else:
                self._waiting_since.pop(pod.name, None)
            self._changed.notify_all()
        is_known = before is not None and before.is_leaving
        if not self._closed.is_set() and not is_known and (pod.is_leaving or not is_there):
            self.watcher(pod, is_there)


def remove_pods(kubectl: Kubectl, job: str) -> int | None:
    """Deletes a job of ours and its pods; returns how many pods are left, None if that is unknown."""
    until = time.monotonic() + END_S
    while True:
        try:
            return _remove(kubectl, job, until)
        except KubernetesError as error:  # one failed call is no reason to leave pods behind
            if _is_refused(error) or time.monotonic() > until:
                return None
            time.sleep(_POLL_S)


def _is_refused(error: KubernetesError) -> bool:
    """Whether we lack permission, for example because our own pod's job and its service account were deleted."""
    return error.says("(Forbidden)") or error.says("Unauthorized")


def _remove(kubectl: Kubectl, job: str, until: float) -> int:
    with contextlib.suppress(NotFoundError):
        kubectl.call("delete", "job", job, "--cascade=background", "--wait=false")
    while pods := [parse_pod(shown) for shown in _list_pods(kubectl, job)]:
        if time.monotonic() > until:
            break
        ended = [pod.name for pod in pods if pod.is_over]
        if ended:  # their processes have ended; a kubelet may take ten more seconds to remove the pods
            force = ("--grace-period=0", "--force", "--wait=false", "--ignore-not-found")
            kubectl.call("delete", "pods", *ended, *force)
        else:
            time.sleep(_POLL_S)
    return len(pods)


def _list_pods(kubectl: Kubectl, job: str) -> Sequence[Mapping[str, Any]]:
    items: Sequence[Mapping[str, Any]] = kubectl.show("pods", f"--selector={RUN}={job}").get("items") or []
    return items


def read_events(stream: IO[bytes]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The kind and the object of each event that `kubectl get --watch` prints.

    Raises:
        ValueError: a line is not JSON.
    """
    for line in stream:  # one event per line
        event = json.loads(line)
        yield str(event["type"]), event["object"]


def _last(words: Sequence[str]) -> str:
    return f": {words[-1]}" if words else ""
