"""All attempts of a run: judges each attempt, and decides whether another one follows."""

from __future__ import annotations

import functools
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.console.messages import render_restart
from launcher.controller.attempt import AttemptLoop
from launcher.controller.collect.collector import Collector
from launcher.controller.collection_wait import collect_at_end
from launcher.controller.context import AttemptSetup, RunContext
from launcher.controller.leftovers import confirm_left, note_kept
from launcher.controller.nodes import NodeChoice, Pauses, Recover, Relist
from launcher.errors import RunDirectoryError, ShownError, TakenOverError, error_lines
from launcher.gang.checks.preflight import Preflight
from launcher.gang.events import EndAnnounced, Interrupted, StacksAsked
from launcher.gang.faults import Fault, needed, pending
from launcher.gang.restarts import (
    Again,
    AttemptOutcome,
    End,
    Next,
    Requeue,
    Situation,
    WaitForNodes,
    decide_next,
    price,
    remember,
)
from launcher.gang.state import AttemptState, Reason
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.planner import Planner
from launcher.report.fault_report import report_faults
from launcher.report.models import RunReport
from launcher.report.run_events import AttemptEnded
from launcher.report.run_report import (
    Attempt,
    RunEnd,
    end_by_error,
    end_by_signal,
    end_without_progress,
    make_attempt_report,
    make_run_report,
    make_versions,
)
from launcher.report.run_text import TAIL_LINES, render_error, render_summary
from launcher.rundir.history import NO_HISTORY, History
from launcher.rundir.log_tails import last_lines
from launcher.signals import STACKS_SIGNAL, Interrupts
from launcher.tasks import TaskId, parse_task_id
from launcher.verdict.judge import judge, outcome
from launcher.verdict.models import Verdict
from worker_entry.protocol.frozen import replace

SOURCE_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals by which Slurm announces that it takes the nodes away."""
JUDGED_LINES = 60
"""Lines at the end of a failed task's log, where its cause is most likely."""


class Supervisor:
    """One run, restarted by the rules of the spec's `restart:`.

    Args:
        context: shared by all attempts.
        planner: plans for all nodes of the spec.
        recover: cleans a lost node; returns whether the node can be used again.
        interrupts: the user's signals.
        relist: called before each restart to find the current nodes.
        checks: whether the nodes are checked before the first start.
        faults: the faults to inject.
        history: the history from earlier controllers.
        taken_over: the running attempt of an earlier controller.
    """

    def __init__(
        self,
        context: RunContext,
        planner: Planner,
        recover: Recover,
        interrupts: Interrupts,
        *,
        relist: Relist = lambda planner, _: planner,
        checks: bool,
        faults: Sequence[Fault] = (),
        history: History = NO_HISTORY,
        taken_over: AttemptSetup | None = None,
    ) -> None:
        self.loop: AttemptLoop | None = None
        """The current attempt, or the last one; None before the first."""
        self._faults = faults
        self._interrupts = interrupts
        self._asked: int | None = None
        """The signal that asked the run to stop, at any time."""
        self._ended_by: int | None = None
        """The signal that ends the run, unless `distlaunch down` or a key has asked for the stop."""
        self._next: Next = End()
        """What follows the last attempt."""
        self._context = context
        self._links = context.links
        self._timing = context.timing
        self._console = context.console
        self._restart = context.spec.restart
        self._nodes = NodeChoice(
            planner, context.links, context.console, relist, checks=checks, examines=context.examines
        )
        self._pauses = Pauses(context, self._nodes, recover, self._goes_on)
        self._last: Attempt | None = None
        """The last ended attempt; `_earlier` has the needed parts of the ones before."""
        self._number = history.attempt
        """The number of the last attempt that began."""
        self._taken_over = taken_over
        self._earlier = history.earlier
        self._endings: list[AttemptOutcome] = [*history.endings]
        self._pods_left: int | None = None
        self._states: dict[int, AttemptState] = {}
        """The states of attempts that the fault report needs."""

    @property
    def continues_later(self) -> bool:
        """Whether the run has lost its nodes and should continue when their source has nodes again."""
        return isinstance(self._next, Requeue)

    @property
    def collector(self) -> Collector:
        """The collector of the files that tasks write."""
        return self._context.collector

    def run(self) -> RunReport:
        """Runs the cluster to its end; returns once all processes have ended and the report is written.

        Raises:
            DistlaunchError: the cluster could not be started; no process is left running.
            ShownError: an error ended the started cluster; the report is written.
        """
        self._interrupts.deliver_to(self._note_signal)
        self._context.source.watch(self._links.put)
        error: Exception | None = None
        try:
            chosen = self._taken_over or self._nodes.choose()
            while chosen is not None:
                chosen = self._prepare_next(self._run_attempt(chosen))
                self._pauses.hand_over()
        except TakenOverError:
            self._links.abandon()
            raise
        except Exception as caught:  # noqa: BLE001 - after any error, everything is stopped and reported
            error = caught
        self._collect()
        self._context.source.close()
        if self._last is not None and self._last.state.is_taken_away:
            self._links.give_up(self._last.state.lost)
        left = confirm_left(self._links.close(), self._context.run_id, self._console, self._context.find_left)
        self._pods_left = self._context.source.release()
        left = dict.fromkeys(left, 0) if self._pods_left == 0 else left  # their processes ended with the pods
        if error is None:
            return self._report(left, self._find_end())
        if self._last is None or not (self._last.number > 1 or self._last.state.started):
            raise error
        self._console.end_logs()
        end = end_by_error(error, self.loop.ignored if self.loop is not None else ())
        self._console.error(render_error(end.verdict))
        report = self._report(left, end)
        raise ShownError(report.verdict.message, report.exit_status) from error

    def _note_signal(self, signum: int, is_request: bool) -> None:
        if signum == STACKS_SIGNAL:
            self._links.put(StacksAsked())
        elif signum in SOURCE_SIGNALS and not is_request:
            self._context.source.ask(functools.partial(self._interrupt, Interrupted(signum)))
        else:
            self._interrupt(Interrupted(signum, is_request), None)

    def _interrupt(self, interrupted: Interrupted, end: EndAnnounced | None) -> None:
        """Handles a signal; `end`: the announced end if the source of the nodes has sent the signal."""
        if end is None or end.reference == "interrupted":
            self._asked = interrupted.signal
            self._ended_by = None if interrupted.asked else interrupted.signal
        self._links.put(end or interrupted)

    def check(self) -> tuple[AttemptState, Preflight]:
        """Checks the nodes without starting tasks; returns the nodes' answers."""
        self._interrupts.deliver_to(self._note_signal)
        chosen = self._nodes.choose()
        assert chosen is not None
        assert chosen.preflight is not None
        try:
            state, _ = AttemptLoop(self._context, chosen, 1).run()
        finally:
            self._links.close()
        return state, chosen.preflight

    def _run_attempt(self, chosen: AttemptSetup) -> AttemptSetup:
        """Runs an attempt; returns the setup for the next attempt on the same nodes, without a second check."""
        started, files = self._timing.now(), self._context.files
        if chosen.taken_over is None:
            self._number += 1
        else:
            started = chosen.taken_over.began
        number = self._number
        self._context.source.forget()
        self.loop = loop = AttemptLoop(self._context, chosen, number, pending(self._faults, self._states.values()))
        if self._last is not None:
            self._earlier = self._earlier.add(make_attempt_report(self._last))
        logs = {task: files.log(number, task) for task in loop.state.policy.tasks}
        shown = {task: files.relative(path) for task, path in logs.items()}
        try:
            state, following = loop.run()
        except Exception as error:
            verdict = end_by_error(error).verdict
            self._last = Attempt(number, loop.state, loop.plan, verdict, started, self._timing.now(), shown)
            raise
        state, verdict = judge_attempt(self._context, state, loop.plan, logs)
        self._console.end_logs()
        if outcome(state) == "failed":
            log = logs.get(parse_task_id(verdict.task)) if verdict.task else None
            tail = last_lines(log, TAIL_LINES) if log is not None else []
            self._console.error(render_error(verdict, tail))
        over = Attempt(number, state, loop.plan, verdict, started, self._timing.now(), shown)
        last_progress = self._time_at(state.last_progress)
        self._last = replace(over, last_progress=last_progress, cache=loop.compile_cache)
        ending = make_ending(self._last, self._endings, saved=loop.has_saved)
        self._context.journal.write(AttemptEnded(make_attempt_report(self._last), ending))
        self._endings = remember([*self._endings, ending])
        self._states = needed(self._faults, {**self._states, number: state})
        return following

    def _prepare_next(self, chosen: AttemptSetup) -> AttemptSetup | None:
        """Waits and chooses nodes after the last attempt; returns the setup of the next one, None if the run ends."""
        assert self._last is not None
        why, setup = self._last.verdict, None
        step = self._decide()
        if isinstance(step, Again):
            setup = self._choose_nodes(chosen, self._last, step)
            step = self._decide(has_nodes=setup is not None)
        if isinstance(step, WaitForNodes):
            setup = self._pauses.await_return(step.limit_s, why)
            step = self._decide(has_nodes=setup is not None, has_waited=True)
        if isinstance(step, Again):
            self._pauses.fence(why)
            step = self._decide()
        if isinstance(step, Again):
            self._context.journal.note_state("restarting", why.reference, why.message)
            self._console.note(render_restart(step.restart, self._last.number + 1, self._restart.max_restarts))
            self._pauses.pause(step.restart.pause_s)
            step = self._decide()
        self._next = step
        if isinstance(step, Again):
            return setup
        if isinstance(step, End) and outcome(self._last.state) == "failed":
            self._context.journal.note_state("stopping")  # no longer waiting for a node
        if isinstance(step, (Requeue, End)) and step.reason:
            self._console.note(step.reason)
        return None

    def _decide(self, *, has_nodes: bool = True, has_waited: bool = False) -> Next:
        last = self._last
        assert last is not None
        announced = last.state.announced
        is_end = announced is not None and last.state.is_taken_away and not announced.replaced
        known = Situation(
            failed=outcome(last.state) == "failed",
            is_taken_away=is_end and announced is not None and last.verdict.reference == announced.reference,
            is_lost_earlier=self.loop is not None and bool(self.loop.not_taken_over),
            asked=self._asked,
            announced=self._pauses.announced,
            has_nodes=has_nodes,
            has_waited=has_waited,
        )
        return decide_next(self._restart, self._endings, known)

    def _choose_nodes(self, chosen: AttemptSetup, last: Attempt, again: Again) -> AttemptSetup | None:
        """The setup of the next attempt; None if too few nodes are left."""
        setup = self._nodes.choose_again(chosen, last.state, self._goes_on)
        if not again.reuses_nodes:
            return setup
        self._pauses.fence(last.verdict)
        self._nodes.take_back(last.state.lost, proven=last.state.lost)
        return self._nodes.choose()

    def _find_end(self) -> RunEnd | None:
        """Why the run has ended, unless the last attempt's verdict says it."""
        if not isinstance(self._next, End) or self._last is None:
            return None
        if self._next.fruitless:
            return end_without_progress(self._last.verdict)
        return end_by_signal(self._next.signal) if self._next.signal is not None else None

    def _collect(self) -> None:
        """Fetches the files that tasks have written, unless the run has to end at once."""
        last = self._last
        if last is None or not (last.number > 1 or last.state.started):
            return
        is_urgent = last.state.is_taken_away or self.continues_later or self._ended_by in SOURCE_SIGNALS
        collect_at_end(self._context, self._interrupts, is_urgent=is_urgent)

    def _goes_on(self) -> bool:
        """Whether the run has not been asked to stop."""
        return self._asked is None

    def _time_at(self, monotonic: float | None) -> float | None:
        """Converts a time of the monotonic clock to Unix seconds."""
        return None if monotonic is None else self._timing.now() - (self._timing.monotonic() - monotonic)

    def _report(self, left: Mapping[str, int | None], end: RunEnd | None) -> RunReport:
        assert self._last is not None
        files, ended = self._context.files, self._timing.now()
        report = make_run_report(
            [self._last],
            earlier=self._earlier,
            run_id=self._context.run_id,
            name=self._last.plan.name,
            directory=str(files.root),
            started=self._context.started,
            ended=ended,
            left=left,
            versions=make_versions(self._links.ready.values()),
            end=end,
            chaos=report_faults(self._faults, self._states),
            goodput=self._context.goodput.count(ended),
            pods_left=self._pods_left,
            speed=self._nodes.speed,
            collected=self._context.collector.make_report(),
            kept_warm=note_kept(self._links.kept, self._context, ended),
        )
        written = True
        try:
            files.write_json(files.report, report.model_dump(mode="json"))
        except RunDirectoryError as error:  # the run's outcome stands
            lines = error_lines(error.message, error.reference, (), "the run has ended; only its report is missing")
            self._console.error("\n".join(lines))
            written = False
        page = self._context.write_page(report)
        self._console.note(render_summary(report, written=written, page=page))
        self._context.journal.end(report)
        return report


def make_ending(attempt: Attempt, earlier: Sequence[AttemptOutcome], *, saved: bool) -> AttemptOutcome:
    """Returns the attempt's outcome for the restart rule.

    Args:
        attempt: the attempt.
        earlier: the outcomes of the attempts before it.
        saved: whether it saved a checkpoint.
    """
    reference = attempt.verdict.reference
    if reference == "node-unreachable" and attempt.number > 1:  # an earlier attempt reached the node
        reference = "node-lost"
    ending = AttemptOutcome(reference, attempt.started, attempt.ended, _trained(attempt), saved, _step(attempt))
    announced = attempt.state.announced
    return price(
        ending,
        earlier,
        is_confirmed=announced is not None and announced.reference == reference,
        is_guess=reference == "port-taken" and attempt.state.reason is not Reason.REFUSED,
    )


def _trained(attempt: Attempt) -> bool:
    """Whether training is known, or assumed, to have begun."""
    progresses = attempt.state.progresses
    if progresses:
        return any(progress.first_step is not None for progress in progresses)
    # A program that reports no steps may train once the cluster is up; a command may train at any time.
    policy = attempt.state.policy
    return not policy.scripts or policy.forming <= attempt.state.listening.keys()


def _step(attempt: Attempt) -> int:
    """The last step that is known to be completed."""
    return max(((progress.resumed or 0) + progress.step for progress in attempt.state.progresses), default=0)


def judge_attempt(
    context: RunContext, state: AttemptState, plan: LaunchPlan, logs: Mapping[TaskId, Path]
) -> tuple[AttemptState, Verdict]:
    """Returns the last state, with the announced end of its nodes if there is one, and the verdict.

    Args:
        context: the run's context.
        state: the state with which the attempt ended.
        plan: the plan of the started tasks.
        logs: the paths of the tasks' logs.
    """
    if state.announced is None and outcome(state) == "failed":
        # Slurm or Kubernetes may have acted before it could be asked.
        state = replace(state, announced=context.source.find_end({*state.lost}))
    failed = [task for task, event in state.exits.items() if event.failed]
    verdict = judge(
        state,
        plan,
        {task: str(path) for task, path in logs.items()},
        tails={task: last_lines(logs[task], JUDGED_LINES, fold=False) for task in failed},
        agent_stderr=last_lines(context.files.agent_errors, 3),
        stacks=str(context.files.stacks),
    )
    return state, verdict
