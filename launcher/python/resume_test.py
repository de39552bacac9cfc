"""Runs a program without and with faults, each time in a copy of its folder, and compares what it did."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from pydantic_core import ValidationError

from launcher.controller.bundle import Bundle, make_bundle
from launcher.errors import DistlaunchError, UsageError
from launcher.failures import FailureName
from launcher.proof.advice import advise
from launcher.proof.compare import Records, Repeat, compare, compare_repeats, render_difference
from launcher.proof.files import Files, compare_files, find_left, read_files
from launcher.proof.models import FaultResult, Flaw, Point, ResumeProof
from launcher.proof.phases import Choice, Phase, choose_phases
from launcher.proof.record import Record, parse_record
from launcher.proof.text import render_result
from launcher.python.cluster import Cluster
from launcher.report.models import RunReport
from launcher.rundir.names import current_directory, make_run_id, runs_directory
from launcher.spec.command_line import PORTS
from launcher.spec.explain import explain_option, refuse_options
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.spec.parts import RestartSpec, SshSpec, SyncSpec
from launcher.spec.redaction import hide_words
from launcher.tasks import LOCAL, TASK_TYPES, TaskId, parse_task_id
from launcher.wording import count_of, render_duration
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass

MORE_RESTARTS = 2
"""How many failures besides those of the faults are followed by a restart."""
MOST_POINTS = 2000
CHECKPOINTS = "checkpoints"
"""The part of a run's folder in which programs save."""


@contextlib.contextmanager
def opened_folder(chosen: Path | None) -> Iterator[Path]:
    """A new private folder for the files of a test; it is removed if the test is interrupted or impossible.

    Args:
        chosen: the folder; by default, one in the user's state directory.

    Raises:
        UsageError: the folder exists already, or cannot be made.
    """
    name = make_run_id("resume")
    folder = (chosen or runs_directory(os.environ).parent / "resume-tests" / name).resolve()
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}", hint="choose another folder with -o") from None
    try:
        yield folder
    except ProgramFailedError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class ProgramFailedError(DistlaunchError):
    """The program fails even without a fault, or does not train."""

    reference = "program-failed"


@dataclass(frozen=True)
class _Run:
    """A run that has ended: its folder, its report, what each attempt's tasks did, and the files that it wrote."""

    place: Path
    report: RunReport
    attempts: Sequence[Records]
    files: Files


def run_resume_test(
    spec: ClusterSpec,
    folder: Path,
    *,
    choice: Choice = "usual",
    last_step: int | None = None,
    links: Sequence[str] = (),
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> ResumeProof:
    """Tests whether the program of a spec resumes exactly; all of its tasks run on this machine.

    Args:
        spec: what to run.
        folder: a folder for the files of all runs.
        choice: how many faults are tested.
        last_step: the step after which training ends; by default, as the program says.
        links: files and folders that are not copied, and that programs only read.
        only: the names of the faults to test, of all that `full` has; by default, those of `choice`.
        say: prints text about the progress of the test; a line comes in two parts, before a run and after it.

    Raises:
        UsageError: the program cannot be tested in this way.
        ProgramFailedError: it fails without a fault.
        DistlaunchError: a run could not be started.
    """
    test = _ResumeTest(spec, folder, last_step, links)
    say("Without a fault: ")
    first = test.run_whole("whole-1")
    whole = first.attempts[0]
    chief = min(whole)
    say(f"{count_of(len(whole[chief].steps), 'step')} in {_render_time(first)}\nAgain: ")
    second = test.run_whole("whole-2")
    repeat = compare_repeats(whole, second.attempts[0])
    say("the same\n" if repeat.exact else f"not the same: {repeat.where}; only larger differences will count\n")
    phases = _select(choose_phases(whole, test.nodes, "full" if only else choice), only)
    results: list[FaultResult] = []
    saves = any(record.saves for record in whole.values())
    left_out = [] if saves else ["faults while a checkpoint is written: no checkpoint was seen"]
    for number, phase in enumerate(phases, 1):
        say(f"[{number}/{len(phases)}] {phase.name}: ")
        run = test.run(f"fault-{number}", phase)
        if not any(fault.attempt for fault in run.report.chaos):
            left_out.append(f"{phase.name}: {run.report.chaos[0].message}")
            say(f"{run.report.chaos[0].message}\n")
            continue
        result = _compare(phase, run, whole, repeat, (first.files, second.files), test)
        results.append(result)
        say(f"{render_result(result)}\n")
    return ResumeProof(
        exact=all(result.exact for result in results),
        repeats=repeat.exact,
        noise=repeat.where,
        program=test.program,
        steps=len(whole[chief].steps),
        losses=_make_points(whole[chief], 0),
        results=results,
        left_out=left_out,
        directory=str(folder),
    )


def _render_time(run: _Run) -> str:
    return render_duration(run.report.ended - run.report.started)


class _ResumeTest:
    """Runs one program again and again, each time in a new copy of its folder."""

    def __init__(self, spec: ClusterSpec, folder: Path, last_step: int | None, links: Sequence[str]) -> None:
        _check(spec)
        self._spec = spec
        self._folder = folder
        self._last_step = last_step
        self._base = (current_directory() / Path(spec.working_directory or "").expanduser()).resolve()
        self._links = [_check_link(self._base, link) for link in links]
        self._bundle = _read_folder(self._base, self._links)
        counts = {name: sum(node.count(name) for node in spec.nodes) for name in TASK_TYPES}
        self._tasks = {name: count for name, count in counts.items() if count}
        self.nodes = [
            tasks
            for node in spec.nodes
            if (tasks := [task for at, task in spec.placements() if at is node and task.trains])
        ]
        program = spec.program
        words = [program.script] if program.script is not None else ["-m", program.module or ""]
        self.program = " ".join(hide_words([*filter(None, words), *program.args]))

    @property
    def source(self) -> tuple[str, str]:
        """The name and the text of the program's script; empty if it is a module."""
        script = self._spec.program.script
        if script is None:
            return "", ""
        return script, (self._base / script).read_text(encoding="utf-8", errors="replace")

    def run_whole(self, name: str) -> _Run:
        """A run without a fault.

        Raises:
            ProgramFailedError: it failed, or did not train.
            UsageError: it did not begin at its beginning.
        """
        run = self.run(name, Phase(name, ()))
        if run.report.outcome != "succeeded":
            self._explain_failure(run)
        records = run.attempts[0] if run.attempts else {}
        if not records or not all(record.steps for record in records.values()):
            raise ProgramFailedError(
                "the program trained no step that distlaunch sees",
                hint="it sees those of Keras 3's `fit`, and those that a loop reports with `worker_entry.progress`",
            )
        first = records[min(records)].steps[0]
        # In a loop of the program's own, a batch is a step, counted through all epochs.
        if max(first.epoch or 1, first.state.iterations or 1, first.batch or 1) > 1:
            outside = next(iter(self._find_outside(records)), "")
            raise UsageError(
                "without a fault, training does not begin at its beginning: the program has found an old checkpoint",
                hint=f"it saves to {outside}; use a path relative to the working directory, or the folder "
                "DISTLAUNCH_CHECKPOINT_DIR"
                if outside
                else "remove the checkpoint from its folder",
            )
        return run

    def run(self, name: str, phase: Phase) -> _Run:
        """Runs the program in a new copy of its folder."""
        place = self._folder / name
        work, trace = place / "work", place / "trace"
        place.mkdir(mode=0o700)
        _copy(self._bundle, work)
        for link in self._links:
            (work / link).parent.mkdir(parents=True, exist_ok=True)
            (work / link).symlink_to(self._base / link)
        before = read_files(work)
        spec = self._make_spec(work, trace, len(phase.faults))
        with Cluster(
            spec, run_dir=place / "run", checks=False, chaos=[str(fault) for fault in phase.faults]
        ) as cluster:
            report = cluster.wait()
        checkpoints = place / "run" / CHECKPOINTS
        written = {path: facts for path, facts in read_files(work).items() if before.get(path) != facts}
        saved = {f"{CHECKPOINTS}/{path}": facts for path, facts in read_files(checkpoints).items()}
        attempts = _read_attempts(trace, len(report.attempts))
        for each in (work, trace, checkpoints):
            shutil.rmtree(each, ignore_errors=True)
        return _Run(place, report, attempts, {**written, **saved})

    def _make_spec(self, work: Path, trace: Path, faults: int) -> ClusterSpec:
        env = {**self._spec.env, environment.TRACE: str(trace)}
        if self._last_step is not None:
            env[environment.TRACE_STEPS] = str(self._last_step)
        restarts = RestartSpec(max_restarts=faults + MORE_RESTARTS, pause_s=0, on=[*get_args(FailureName)])
        try:
            return self._spec.changed(
                nodes=[NodeSpec(host=LOCAL, tasks=self._tasks)],
                ports=PORTS,
                working_directory=str(work),
                sync=None,
                checkpoint_directory=None,
                log_directory=None,
                collect=[],
                tensorboard=False,
                notify=None,
                metrics=None,
                metrics_file=None,
                connection="paramiko",
                ssh=SshSpec(),
                env=env,
                restart=restarts if faults else RestartSpec(),
            )
        except ValidationError as error:
            raise refuse_options(explain_option("test-resume", error)) from None

    def _explain_failure(self, run: _Run) -> None:
        verdict = run.report.verdict
        said = [verdict.message, *(line.replace(str(run.place / "work"), str(self._base)) for line in verdict.evidence)]
        missing = next((name for name in self._left_out() if any(name in line for line in said)), "")
        raise ProgramFailedError(
            f"the program fails without a fault: {said[0]}",
            evidence=said[1:],
            hint=f"{missing} is not copied, because git ignores it: --link {missing}" if missing else "",
        )

    def _left_out(self) -> list[str]:
        """What the program's folder contains, but not its copies."""
        copied = {entry.path.partition("/")[0] for entry in self._bundle.entries}
        return sorted(path.name for path in self._base.iterdir() if path.name not in copied)

    def _find_outside(self, records: Records) -> Iterator[str]:
        """The checkpoints that are not in the run's own folders, so that other runs may find them."""
        for record in records.values():
            yield from (save.path for save in record.saves if not Path(save.path).is_relative_to(self._folder))


def _select(phases: Sequence[Phase], only: Sequence[str]) -> list[Phase]:
    """The phases with these names; all if there are no names.

    Raises:
        UsageError: the program has no such phase.
    """
    unknown = [name for name in only if name not in {phase.name for phase in phases}]
    if unknown:
        names = ", ".join(f"'{phase.name}'" for phase in phases)
        raise UsageError(f"--only {unknown[0]!r}: this program has no such fault", hint=f"it has {names}")
    return [phase for phase in phases if not only or phase.name in only]


def _check(spec: ClusterSpec) -> None:
    if spec.program.command is not None:
        raise UsageError(
            "test-resume needs a Python program, which distlaunch runs itself", hint="name the script, not a command"
        )
    if not spec.progress:
        raise UsageError("test-resume counts steps, which needs `progress: true`")
    if spec.strategy == "parameter_server" and spec.framework == "tensorflow":
        raise UsageError(
            "no two runs under ParameterServerStrategy are alike, because workers do not wait for each other"
        )


def _read_folder(base: Path, links: Sequence[str]) -> Bundle:
    try:
        return make_bundle(SyncSpec(path=str(base), to="/unused", exclude=[f"/{link}" for link in links]), base)
    except UsageError as error:
        raise UsageError(
            f"{base}, the folder of the program, cannot be copied",
            evidence=error.evidence or [error.message],
            hint="change to a folder that has only the program; --link names what need not be copied",
        ) from None


def _check_link(base: Path, link: str) -> str:
    path = Path(os.path.normpath(link))
    if path.is_absolute() or path.parts[:1] == ("..",) or not (base / path).exists():
        raise UsageError(f"--link {link}: there is no such file or folder in {base}")
    return str(path)


def _copy(bundle: Bundle, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for entry in bundle.entries:
        target = folder / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(bundle.root / entry.path, target, follow_symlinks=False)


def _read_attempts(trace: Path, count: int) -> list[Records]:
    attempts: list[dict[TaskId, Record]] = [{} for _ in range(count)]
    for path in sorted(trace.glob("*.jsonl")):
        task, attempt = path.stem.rsplit(".", 1)
        if 0 < int(attempt) <= count:
            name = parse_task_id(task.replace("-", ":"))
            if name.trains:
                attempts[int(attempt) - 1][name] = parse_record(path.read_text(encoding="utf-8"))
    return [*attempts]


def _compare(
    phase: Phase,
    run: _Run,
    whole: Records,
    repeat: Repeat,
    files: tuple[Files, Files],
    test: _ResumeTest,
) -> FaultResult:
    """What a run with faults did, compared with those without."""
    comparison = compare(whole, run.attempts, repeat)
    flaws, notes = [*comparison.flaws], [*comparison.notes]
    chief = min(whole)
    last = next((each[chief] for each in reversed(run.attempts) if chief in each and each[chief].steps), Record())
    if run.report.outcome != "succeeded":
        saving = any(fault.injection.at == "save" for fault in phase.faults)
        verdict = run.report.verdict
        how = ": ".join(filter(None, [verdict.message, *verdict.evidence[:1]]))
        failed = Flaw(
            reference="half-checkpoint" if saving else "did-not-resume", message=f"the program did not resume: {how}"
        )
        flaws = [failed, *(flaw for flaw in flaws if flaw.reference != "ends-elsewhere")]
    else:
        flaws += compare_files(*files, run.files)
        notes += filter(None, [find_left(*files, run.files)])
    missed = [fault.fault for fault in run.report.chaos if fault.attempt is None]
    notes += [f"{fault} was not injected" for fault in missed]
    difference = render_difference(whole[chief], last, comparison)
    return FaultResult(
        name=phase.name,
        faults=[str(fault) for fault in phase.faults],
        exact=not flaws,
        resumed_after=comparison.start,
        repeated=comparison.repeated,
        first_difference=comparison.difference if flaws else None,
        difference=difference if flaws else "",
        flaws=advise(flaws, *test.source),
        notes=notes,
        losses=_make_points(last, comparison.start or 0),
        seconds=run.report.ended - run.report.started,
        directory=run.report.directory,
    )


def _make_points(record: Record, start: int) -> list[Point]:
    """The losses, at most `MOST_POINTS` of them."""
    points = [
        Point(step=number, loss=step.loss if math.isfinite(step.loss) else None)
        for number, step in enumerate(record.steps, start + 1)
        if step.loss is not None
    ]
    stride = -(-len(points) // MOST_POINTS) or 1
    return points[::stride]
