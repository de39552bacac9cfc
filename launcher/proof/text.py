"""The result of `distlaunch test-resume` as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.proof.models import FaultResult, Flaw, ResumeProof
from launcher.wording import count_of, render_duration


def render_proof(proof: ResumeProof) -> Iterator[str]:
    """The last lines: what was found, and what to change."""
    for flaw, names in group_flaws(proof.results):
        yield f"{', '.join(names)}: {flaw.message} [{flaw.reference}]"
        place = f"{flaw.place}: " if flaw.place else ""
        if flaw.hint:
            yield f"  {place}{flaw.hint}"
    if not proof.repeats:
        yield f"The program does not repeat itself, so only larger differences count; {proof.noise}"
    yield from (f"Not tested: {reason}" for reason in proof.left_out)
    yield render_verdict(proof)


def render_verdict(proof: ResumeProof) -> str:
    """`Resume is exact after 8 faults`."""
    faults = count_of(len(proof.results), "fault")
    if proof.exact:
        return f"Resume is exact after {faults}{'' if proof.repeats else ', as far as the program repeats itself'}"
    return f"Resume is not exact after {sum(not result.exact for result in proof.results)} of {faults}"


def render_result(result: FaultResult) -> str:
    """`exact; 2 steps repeated (7.1 s)`, after the name of the phase."""
    if result.exact:
        parts = ["exact"]
    else:
        parts = [result.flaws[0].message if result.flaws else "not exact"]
        if result.difference:
            parts[:0] = [result.difference]
    if result.repeated:
        parts.append(f"{count_of(result.repeated, 'step')} repeated")
    return f"{'; '.join([*parts, *result.notes])} ({render_duration(result.seconds)})"


def group_flaws(results: Sequence[FaultResult]) -> list[tuple[Flaw, list[str]]]:
    """Equal flaws of several runs, with the names of the runs; by kind, because steps and values differ."""
    groups: dict[str, tuple[Flaw, list[str]]] = {}
    for result in results:
        for flaw in result.flaws:
            groups.setdefault(flaw.reference, (flaw, []))[1].append(result.name)
    return [*groups.values()]
