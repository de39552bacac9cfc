"""The page of a test whether a program resumes: it says what is wrong and shows both curves; foreign text is text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.pages.html import read_plotly, render_proof_page
from launcher.pages.resume import make_loss_charts
from launcher.printable import printable
from launcher.proof.models import Point, ResumeProof
from tests.harness.builders.pages import HOSTILE, T0
from tests.harness.builders.proofs import (
    STEPS,
    make_fault_result,
    make_flaw,
    make_hostile_proof,
    make_inexact_result,
    make_losses,
    make_proof,
)
from tests.harness.elements import Elements, without_plotly


def page_of(proof: ResumeProof) -> str:
    """The page without Plotly."""
    return without_plotly(render_proof_page(proof, T0))


def text_of(page: str) -> str:
    """The text of the page's main part, without tags and repeated spaces."""
    main = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL).partition("<main>")[2].partition("</main>")[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", main))


def curves_of(page: str, key: str) -> dict[str, Any]:
    """The data of a chart's curves."""
    [data] = re.findall(rf'<script type="application/json" id="data-{key}">(.*?)</script>', page)
    found: dict[str, Any] = json.loads(data)
    return found


def steps_of(series: dict[str, Any]) -> list[int]:
    """The steps of a curve: each `x` is the difference from the one before, in thousandths."""
    at, found = 0, []
    for difference in series["x"]:
        at += difference
        found.append(at // 1000)
    return found


def test_the_page_of_an_exact_resume_says_so_first() -> None:
    page = page_of(make_proof(make_fault_result(), make_fault_result(name="of a whole node", seconds=65.0)))
    assert "<title>Resume is exact after 2 faults: train.py --epochs 4</title>" in page
    assert text_of(page).startswith(" Verdict ✓ Resume is exact after 2 faults faults 2 exact 2 steps of a run 40 ")
    tags = Elements(page).found
    assert [each["class"] for tag, each in tags if "verdict" in (each.get("class") or "")] == ["verdict good"]
    assert not [each for _, each in tags if each.get("class") == "failed"]
    assert " in an epoch exact 5 7.1 s kill:worker:1@step=25 of a whole node exact 5 1 min 5 s " in text_of(page)


def test_the_page_of_an_inexact_resume_says_what_is_wrong_and_which_line_to_change() -> None:
    flaw = make_flaw()
    both = [make_inexact_result(), make_inexact_result(name="of a whole node")]
    page = page_of(make_proof(make_fault_result(), *both))
    text = text_of(page)
    assert text.startswith(
        f" Verdict ✕ Resume is not exact after 2 of 3 faults {flaw.message} learning-rate "
        f"after a fault at a preemption, of a whole node line train.py:31 What to do: {flaw.hint} faults 3 exact 1 "
    )
    assert (
        f" at a preemption first differs at step 22: loss 0.5545 instead of 0.4545 {flaw.message} learning-rate 5 "
        in text
    )
    assert [each.get("class") for tag, each in Elements(page).found if tag == "tr"].count("failed") == 2


def test_the_page_says_if_the_program_does_not_repeat_itself_and_what_was_not_tested() -> None:
    text = text_of(
        page_of(make_proof(make_fault_result(), repeats=False, noise="at step 3: the model", left_out=["x"]))
    )
    assert "Resume is exact after 1 fault, as far as the program repeats itself" in text
    assert "only larger differences count; at step 3: the model Not tested: x" in text


@pytest.mark.parametrize("result", [make_fault_result(), make_inexact_result()], ids=["exact", "inexact"])
def test_a_chart_of_the_page_has_the_losses_without_and_after_the_fault_at_their_steps(result: Any) -> None:
    curves = curves_of(page_of(make_proof(result)), "fault-1")
    whole, resumed = curves["series"]
    assert (whole["label"], resumed["label"]) == ("without a fault", "after the fault")
    assert (whole.get("wide"), resumed.get("wide")) == (True, None)
    assert steps_of(whole) == [*range(1, STEPS + 1)]
    assert steps_of(resumed) == [*range(21, STEPS + 1)]
    assert (resumed["y"] == whole["y"][20:]) == result.exact


def test_a_chart_of_the_page_marks_the_fault_the_checkpoint_and_the_first_difference() -> None:
    page = page_of(make_proof(make_fault_result(), make_inexact_result()))
    assert curves_of(page, "fault-1")["marks"] == [["fault", 25], ["resume", 20]]
    assert curves_of(page, "fault-2")["marks"] == [["fault", 25], ["resume", 20], ["difference", 22]]
    text = text_of(page)
    assert "After step 25 the run was restarted, and training went on after step 20; 5 steps repeated." in text


def test_all_charts_of_the_page_show_the_same_range_of_steps() -> None:
    """A run that resumes wrongly may do more steps than the run without a fault."""
    result = make_inexact_result(losses=[*make_losses(21), Point(step=STEPS + 7, loss=1.0)])
    [facts] = re.findall(r'id="page">(.*?)</script>', page_of(make_proof(make_fault_result(), result)))
    assert json.loads(facts) == {"duration": STEPS + 7, "restarts": [], "axis": "steps"}


def test_a_fault_after_which_no_step_was_done_has_a_row_but_no_chart() -> None:
    silent = make_inexact_result(resumed_after=None, repeated=0, losses=[], first_difference=None, difference="")
    proof = make_proof(silent, make_fault_result())
    assert [chart.key for chart in make_loss_charts(proof)] == ["fault-2"]
    found = Elements(page_of(proof))
    assert [each["href"] for tag, each in found.found if (each.get("href") or "").startswith("#fault-")] == [
        "#fault-2",
        "#fault-2",
    ]
    assert " at a preemption the learning rate is " in text_of(page_of(proof))


def test_the_page_of_a_program_without_losses_has_no_charts_and_says_why() -> None:
    page = render_proof_page(make_proof(make_fault_result(losses=[]), losses=[]), T0)
    assert read_plotly() not in page
    assert "There are no curves, because no loss was seen before and after a restart" in page
    assert "figure" not in Elements(page).tags


def test_foreign_text_adds_no_element_or_attribute_to_the_page_of_a_resume_test() -> None:
    page = page_of(make_hostile_proof(HOSTILE))
    found, usual = Elements(page), Elements(page_of(make_hostile_proof("x")))
    assert found.tags == usual.tags
    assert [each.keys() for _, each in found.found] == [each.keys() for _, each in usual.found]
    assert printable(page) == page
    assert text_of(page).count("alert(1)") >= 10


def test_the_page_of_a_resume_test_loads_nothing_and_runs_only_its_own_scripts() -> None:
    found = Elements(page_of(make_proof(make_fault_result()))).found
    addresses = [value or "" for _, each in found for name, value in each.items() if name in ("src", "href", "action")]
    assert len(addresses) > 5
    assert [address for address in addresses if not address.startswith(("#", "data:"))] == []
    [policy] = [each["content"] or "" for _, each in found if each.get("http-equiv")]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("unsafe") == policy.count("style-src 'unsafe-inline'") == 1


def test_every_anchor_of_the_page_of_a_resume_test_is_unique() -> None:
    found = Elements(page_of(make_proof(make_fault_result(), make_inexact_result()))).found
    ids = [each["id"] for _, each in found if "id" in each]
    assert len(ids) == len(set(ids))
    assert {"verdict", "faults", "losses", "fault-1", "fault-2", "flaw-1"} <= set(ids)


def test_the_page_of_a_full_test_of_a_long_program_stays_small() -> None:
    losses = [Point(step=step, loss=1 / step) for step in range(1, 2001)]
    proof = make_proof(*(make_fault_result(losses=losses) for _ in range(30)), losses=losses, steps=2000)
    assert len(page_of(proof)) < 1_500_000


@settings(max_examples=30)
@given(st.floats(), st.floats())
def test_the_page_of_a_resume_test_can_be_rendered_with_any_losses(one: float, two: float) -> None:
    """A loss may become infinite, or NaN."""
    losses = [Point(step=1, loss=one), Point(step=2, loss=two)]
    page = page_of(make_proof(make_fault_result(losses=losses), losses=losses))
    assert "</html>" in page
    assert not re.search(r"\b(nan|inf|NaN|Infinity)\b", re.sub(r"<script>.*", "", page, flags=re.DOTALL))
