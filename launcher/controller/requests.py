"""Requests to the tasks of an attempt: for the stacks of all tasks, and for a profile of all tasks."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.controller.context import RunContext
from launcher.gang.events import StacksReceived
from launcher.gang.state import AttemptState
from launcher.gang.watch.stacks import StackCollector, render_stacks
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.tf_config import format_address
from launcher.tasks import TaskId, find_leader, parse_task_id
from worker_entry.protocol.messages import Stacks
from worker_entry.protocol.orders import ShowStacks
from worker_entry.protocol.profiles import Profile, Profiled, ProfileTarget


class StackRequests:
    """The stack requests of an attempt, at most one at a time."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._collector: StackCollector | None = None
        self._shows = self._tells = False
        self.text = ""
        """The last answers, as text."""
        self.count = 0
        """How often the stacks of all tasks have been collected."""

    def ask(self, state: AttemptState, *, show: bool = False, tell: bool = False) -> None:
        """Asks all running tasks, unless a request is pending.

        Args:
            state: the attempt.
            show: whether the terminal shows the answers.
            tell: whether a message names the file of the answers.
        """
        self._shows, self._tells = self._shows or show, self._tells or tell
        if self._collector is None:
            self._collector = StackCollector(
                state.started.keys() - state.exits.keys(), self._context.timing.monotonic()
            )
            for node in sorted(state.occupied):
                self._context.links.send(node, ShowStacks())

    def note(self, message: Stacks) -> None:
        """Adds one task's answer.

        Raises:
            ValueError: the message names no task.
        """
        if self._collector is not None:
            self._collector.note(parse_task_id(message.task), message.text, message.activity)

    def take(self) -> Iterator[StacksReceived]:
        """Yields the answers once all tasks have answered or the time limit has passed."""
        texts = self._collector.texts(self._context.timing.monotonic()) if self._collector is not None else None
        if self._collector is None or texts is None:
            return
        activity, self._collector = self._collector.activity, None
        self.text = render_stacks(texts)
        self.count += 1
        problem = self._context.files.write_stacks(f"{self.text}\n")
        if problem:
            self._context.console.warn(problem)
        line = f"The stacks of all tasks are in {self._context.files.stacks}" if self.text else "No task is running"
        if self._shows:
            self._context.console.note(self.text or line, record=problem or line)
        elif self._tells and not problem:
            self._context.console.note(line)
        self._shows = self._tells = False
        yield StacksReceived(texts, activity)


class ProfileRequests:
    """The profile requests of an attempt; `answers`: all answers so far, at most one for each request.

    The agent on the leader's node makes the profile, because it can reach the tasks' addresses.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.answers: tuple[Profiled, ...] = ()
        self._asked = 0

    def ask(self, plan: LaunchPlan, duration_s: float) -> None:
        """Requests one capture of all tasks; the answer may come at any time, or never if the node is lost."""
        self._asked += 1
        tasks, directory = find_servers(plan), self._context.spec.logs
        if directory is None:
            self.note(Profiled(problem="the run has no log directory: set `log_directory:` in the spec"))
        elif not tasks:
            self.note(Profiled(problem="no task of this run has a profiler server: run two workers or more"))
        else:
            leader = find_leader(tasks)
            node = next(task.node for task in plan.tasks if task.task == leader)
            self._context.links.send(node, Profile([*tasks.values()], directory, duration_s))

    def note(self, answer: Profiled) -> None:
        """Adds an answer; drops an unrequested one."""
        if len(self.answers) < self._asked:
            self.answers = (*self.answers, answer)


def find_servers(plan: LaunchPlan) -> dict[TaskId, ProfileTarget]:
    """The tasks with a profiler server, and whether TensorFlow's operations are recorded.

    Operations are recorded in every task except the workers that ask the leader to order their collectives. In these
    workers, TensorFlow (2.21) gathers its threads' records through pointers into a vector that is still growing, and
    writes to freed memory (`TraceMeRecorder::Consume`, an activity that begins in one thread and ends in another): one
    in 10 to 90 captures killed such a worker with SIGSEGV or SIGABRT. Python functions and GPU work are recorded in a
    different way, in all tasks.
    """
    servers = [task for task in plan.tasks if task.tf_config is not None and task.task.type != "evaluator"]
    leader = find_leader(task.task for task in servers) if servers else None
    return {
        task.task: ProfileTarget(
            task.task.file_name,
            format_address(task.address, task.port),
            operations=task.task == leader or not plan.rules.collective,
        )
        for task in servers
    }
