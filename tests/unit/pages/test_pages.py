"""The report page of a run, rendered from values: foreign text cannot break it, it is small and complete."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plotly import offline

from launcher.gang import events as gang
from launcher.gang.checks.findings import Finding, LinkSpeed, NodeSpeed, SpeedReport
from launcher.pages.charts import (
    LEAST_POINTS,
    MOST_POINTS,
    find_odd,
    group_curves,
    make_machine_charts,
    make_training_charts,
    thin,
)
from launcher.pages.html import inline, make_ticks, read_plotly, read_script, render_page, to_script
from launcher.pages.page_data import NodeSamples, PageData, TaskSamples
from launcher.pages.series import Point, Series, downsample, make_series, pack, shorten
from launcher.pages.task_states import Span
from launcher.pages.timeline import SPANS, Row, make_timeline, merge
from launcher.pages.verdict import make_outcome
from launcher.pages.wording import render_duration, render_offset, render_times, render_value
from launcher.pages.workers import find_steps
from launcher.printable import printable
from launcher.report.goodput import Goodput
from launcher.report.models import CompileCacheReport
from launcher.report.run_events import (
    Checkpoint,
    LinkDropped,
    Record,
    State,
    Straggler,
)
from launcher.report.run_text import render_end
from launcher.report.samples import NodeUseSample, ProgressSample, TaskUseSample
from tests.harness.builders.pages import (
    T0,
    W0,
    W1,
    hostile_page_data,
    make_attempt,
    make_page_data,
    make_report,
    one_attempt,
    record,
    reported,
)
from tests.harness.elements import Elements, without_plotly
from worker_entry.protocol.samples import GpuSample, NodeSample, TaskSample
from worker_entry.protocol.values import TaskExit


def row_of(data: PageData, name: str) -> Row:
    [row] = [row for row in make_timeline(data).rows if row.name == name]
    return row


class TestCurves:
    @given(
        st.lists(st.tuples(st.floats(0, 1e6), st.one_of(st.none(), st.floats(-1e9, 1e9))), min_size=1, max_size=400),
        st.integers(4, 60),
    )
    def test_downsampling_a_curve_keeps_its_ends_extremes_and_order(self, points: list[Point], limit: int) -> None:
        points = sorted(points, key=lambda point: point[0])
        kept = downsample(points, limit)
        gaps = sum(value is None for _, value in points)
        assert len(kept) <= limit + 3 * gaps
        assert kept[0] == points[0]
        assert kept[-1] == points[-1]
        assert [point[0] for point in kept] == sorted(point[0] for point in kept)
        assert set(kept) <= set(points)
        values = [value for _, value in points if value is not None]
        left = [value for _, value in kept if value is not None]
        if values:
            assert (min(left), max(left)) == (min(values), max(values))

    def test_a_spike_of_one_sample_in_a_week_survives_downsampling(self) -> None:
        week: list[Point] = [(float(second), 1.0) for second in range(0, 604_800, 10)]
        week[31_234] = (week[31_234][0], 99.0)
        kept = downsample(week, 1000)
        assert len(kept) <= 1000
        assert max(value for _, value in kept if value is not None) == 99.0

    def test_curves_of_different_attempts_are_not_connected(self) -> None:
        series = make_series("worker:0", [[(1.0, 5.0), (2.0, 4.0)], [], [(9.0, 4.5)]])
        assert series.points == [(1.0, 5.0), (2.0, 4.0), (5.5, None), (9.0, 4.5)]

    def test_a_curve_leaves_out_values_that_are_not_finite(self) -> None:
        assert make_series("x", [[(1.0, float("nan")), (2.0, None), (3.0, float("inf")), (4.0, 1.0)]]).points == [
            (4.0, 1.0)
        ]

    @given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e12, 1e12)), max_size=50))
    def test_packed_times_of_a_curve_keep_millisecond_precision(self, points: list[Point]) -> None:
        points = sorted(points, key=lambda point: point[0])
        packed = pack([(T0 + time, value) for time, value in points], start=T0)
        now = 0.0
        for step, (time, _) in zip(packed["x"], points, strict=True):
            assert step is not None
            now += step
            assert now / 1000 == pytest.approx(time, abs=0.002)

    def test_curve_values_keep_five_digits(self) -> None:
        assert [shorten(value) for value in (0.123456789, 1234567.0, 3.0, 0.0)] == [0.12346, 1234600, 3, 0]

    def test_all_curves_of_a_page_together_have_a_limited_number_of_points(self) -> None:
        samples = [
            TaskSamples(
                attempt=1,
                task=f"worker:{index}",
                progress=[
                    ProgressSample(T0 + step, step, 1, 0.2, 0.1, 0.02, {"loss": 1 / (step + 1), "accuracy": 0.5})
                    for step in range(10_000)
                ],
            )
            for index in range(8)
        ]
        charts = thin(make_training_charts(make_page_data(tasks=samples, ended=T0 + 10_000)))
        assert [chart.title for chart in charts][:3] == ["loss", "accuracy", "Steps per second"]
        counts = [len(series.points) for chart in charts for series in chart.series]
        assert len(counts) == 7 * 8 - 8 + 2
        assert max(counts) <= MOST_POINTS
        assert min(counts) >= LEAST_POINTS
        assert sum(counts) < 65_000

    def test_rates_on_the_page_are_computed_between_two_samples(self) -> None:
        progress = [ProgressSample(T0 + 2 * n, 10 * n, step_s=0.2, own_s=0.15) for n in range(4)]
        use = [TaskUseSample(T0 + 2 * n, TaskSample("worker:0", 3.0 * n, 1 << 30)) for n in range(3)]
        node = [NodeUseSample(T0 + n, "gpu-a", NodeSample(2.0 * n, 8, 5, 9, 100 * n, 50 * n)) for n in range(3)]
        data = make_page_data(
            tasks=[TaskSamples(attempt=1, task="worker:0", progress=progress, use=use)],
            nodes=[NodeSamples(attempt=1, node="gpu-a", use=node)],
        )
        values = {
            chart.key: chart.series[0].values for chart in [*make_training_charts(data), *make_machine_charts(data)]
        }
        assert values["steps"] == [5.0, 5.0, 5.0]
        assert values["waiting-time"] == pytest.approx([0.05] * 4)
        assert values["task-cpu"] == [1.5, 1.5]
        assert values["node-received"] == [100.0, 100.0]
        assert values["node-memory"] == [5, 5, 5]

    def test_each_gpu_has_its_own_curves_on_the_page(self) -> None:
        gpus = [GpuSample("0", 0.5, 1 << 30, 2 << 30, 250.0, 70.0), GpuSample("1", None, 5, 10)]
        use = [NodeUseSample(T0 + n, "gpu-a", NodeSample(1.0, 8, 5, 9, gpus=gpus)) for n in range(2)]
        charts = {
            chart.key: chart
            for chart in make_machine_charts(make_page_data(nodes=[NodeSamples(attempt=1, node="gpu-a", use=use)]))
        }
        assert [series.label for series in charts["gpu-memory"].series] == ["gpu-a GPU 0", "gpu-a GPU 1"]
        assert [(series.label, series.values) for series in charts["gpu-use"].series] == [("gpu-a GPU 0", [50.0, 50.0])]

    @pytest.mark.parametrize(("count", "grouped"), [(12, 0), (13, 13), (64, 64)])
    def test_more_than_12_curves_become_a_median_a_band_and_the_outliers(self, count: int, grouped: int) -> None:
        def losses(number: int) -> list[ProgressSample]:
            value = 900.0 if number == 7 else float(number)
            return [ProgressSample(T0 + at, at, metrics={"loss": value}) for at in range(3)]

        samples = [TaskSamples(attempt=1, task=f"worker:{n}", progress=losses(n)) for n in range(count)]
        [chart] = [each for each in make_training_charts(make_page_data(tasks=samples)) if each.title == "loss"]
        assert chart.grouped == grouped
        if not grouped:
            assert [series.label for series in chart.series] == [f"worker:{n}" for n in range(count)]
            return
        middle, below, above, odd = chart.series
        assert (middle.label, odd.label) == (f"median of {count}", "worker:7")
        assert [series.fills for series in chart.series] == [False, False, True, False]
        for low, mid, high in zip(below.values, middle.values, above.values, strict=True):
            assert 0 <= low < mid < high < count
        assert odd.values == [900.0] * 3

    def test_only_outlier_curves_are_shown_individually(self) -> None:
        curves = [Series(str(n), [(T0, 1.0 + n / 1000), (T0 + 1, 1.0)]) for n in range(20)]
        assert find_odd(curves) == []
        far = [*curves, *(Series(f"far {n}", [(T0, 10.0 * n)]) for n in range(2, 12))]
        assert [each.label for each in find_odd(far)] == [f"far {n}" for n in range(6, 12)]

    def test_each_curve_counts_once_in_a_time_window_of_grouped_curves(self) -> None:
        often = Series("often", [(T0 + n / 1000, 100.0) for n in range(500)])
        rarely = [Series(str(n), [(T0, 1.0), (T0 + 100, 1.0)]) for n in range(12)]
        middle = group_curves([often, *rarely])[0]
        assert middle.values == [1.0, *[100.0] * (len(middle.values) - 2), 1.0]


class TestSteps:
    def test_the_page_gives_the_slow_worker_a_low_score(self) -> None:
        def samples(task: str, own_s: float) -> TaskSamples:
            progress = [ProgressSample(T0 + n, n, step_s=0.25, own_s=own_s, data_s=0.04) for n in range(5)]
            return TaskSamples(attempt=1, task=task, progress=progress)

        tasks = [samples("worker:0", 0.1), samples("worker:1", 0.24), samples("worker:2", 0.1)]
        found = {each.task: each for each in find_steps(make_page_data(tasks=tasks, plan={}))}
        assert found["worker:0"].score == 1.0
        assert found["worker:1"].score == pytest.approx(0.1 / 0.24)
        assert found["worker:1"].waiting_s == pytest.approx(0.01)
        assert found["worker:1"].work_s == pytest.approx(0.2)


class TestTimeline:
    def test_the_timeline_shows_the_states_of_each_task(self) -> None:
        attempt = make_attempt(1, T0, T0 + 20, failed=True)
        data = make_page_data(records=one_attempt(1, 0, 20, failed=True), attempts=[attempt], ended=T0 + 20)
        spans = [(span.state, round(span.begin), round(span.end)) for span in row_of(data, "worker:1").spans]
        assert spans == [
            ("connecting", 0, 1),
            ("importing", 1, 3),
            ("forming", 3, 5),
            ("training", 5, 19),
            ("failed", 19, 20),
        ]
        assert [mark.kind for mark in row_of(data, "worker:1").marks] == ["failure"]
        assert row_of(data, "worker:0").spans[-1].state == "stopped"
        assert row_of(data, "worker:0").marks == []

    def test_the_timeline_shows_imports_before_the_first_task_as_importing(self) -> None:
        records = one_attempt(1, 0, 20, failed=False)
        records[1:1] = [record(0.5, State("forming"))]
        spans = row_of(make_page_data(records=records), "worker:0").spans
        assert [(span.state, span.begin, span.end) for span in spans[:2]] == [
            ("connecting", 0.0, 0.5),
            ("importing", 0.5, 3.0),
        ]

    def test_timeline_marks_close_in_time_are_drawn_side_by_side(self) -> None:
        records = one_attempt(1, 0, 100, failed=True)
        records[7:7] = [record(98.5, reported(W1, 5, injected=("exit@step=20",)))]
        marks = row_of(make_page_data(records=records), "worker:1").marks
        assert [(mark.kind, mark.shift) for mark in marks] == [("chaos", 0), ("failure", 16)]

    def test_the_timeline_of_a_running_run_ends_now(self) -> None:
        records = one_attempt(1, 0, 50, failed=False)[:7]
        data = make_page_data(records=records, running=True, ended=None, now=T0 + 30, state="running")
        last = row_of(data, "worker:0").spans[-1]
        assert (last.state, last.end) == ("training", 30.0)

    def test_the_timeline_has_one_mark_for_each_event(self) -> None:
        records = [
            *one_attempt(1, 0, 40, failed=True)[:-1],
            record(20, LinkDropped("gpu-b", "no answer")),
            record(21, Checkpoint("ckpt-1", T0 + 21)),
            record(22, Straggler(W0, "worker:0 takes 2 × the median step")),
            record(23, reported(W0, 5, injected=("kill@step=20",))),
            record(24, reported(W0, 5, injected=("kill@step=20",))),
            *one_attempt(2, 50, 90, failed=False),
        ]
        timeline = make_timeline(make_page_data(records=records))
        marks = {row.name: [mark.kind for mark in row.marks] for row in timeline.rows}
        assert marks["the run"] == ["link", "checkpoint", "restart"]
        assert marks["worker:0"] == ["straggler", "chaos"]
        assert timeline.restarts == [50.0]

    def test_the_timeline_shows_a_halted_task_return_to_its_earlier_state(self) -> None:
        records = one_attempt(1, 0, 50, failed=False)
        records[7:7] = [
            record(20, gang.TaskHalted(W0, 19, T0 + 20), node="x"),
            record(30, gang.TaskHalted(W0, None, T0 + 30), node="x"),
        ]
        states = [span.state for span in row_of(make_page_data(records=records), "worker:0").spans]
        assert states[3:6] == ["training", "held", "training"]

    def test_the_timeline_without_steps_shows_training_from_the_open_port(self) -> None:
        records = [
            record(0, State("connecting")),
            record(1, gang.TaskStarted(W0, 7, T0 + 1), node="x"),
            record(5, gang.TaskListening(W0, T0 + 5), node="x"),
        ]
        spans = row_of(make_page_data(records=records), "worker:0").spans
        assert [(span.state, span.begin) for span in spans] == [
            ("connecting", 0.0),
            ("importing", 1.0),
            ("training", 5.0),
        ]

    @given(st.lists(st.floats(0.001, 50), min_size=1, max_size=300), st.floats(0.01, 100))
    def test_merging_timeline_spans_loses_no_time(self, lengths: list[float], least_s: float) -> None:
        spans, at = [], 0.0
        for length in lengths:
            spans.append(Span(at, at + length, "training", 1))
            at += length
        merged = merge(spans, least_s)
        assert (merged[0].begin, merged[-1].end) == (spans[0].begin, spans[-1].end)
        assert sum(span.merged for span in merged) == len(spans)
        assert all(before.end == after.begin for before, after in pairwise(merged))
        assert len(merged) <= 2 * at / least_s + 2

    def test_the_page_of_a_run_with_a_thousand_attempts_stays_small(self) -> None:
        records = [
            each
            for number in range(1, 1001)
            for each in one_attempt(number, number * 100, number * 100 + 90, failed=True)
        ]
        data = make_page_data(records=records, ended=T0 + 100_100)
        timeline = make_timeline(data)
        assert sum(len(row.spans) for row in timeline.rows) <= SPANS * 1.2
        assert sum(len(row.marks) for row in timeline.rows) < 1000
        assert len(render_page(data).encode()) < 2_000_000

    @pytest.mark.parametrize("duration", [0.02, 3, 59, 3600, 86_400, 700_000, 6e7])
    def test_the_time_axis_has_1_to_14_distinct_labels_within_it(self, duration: float) -> None:
        ticks = make_ticks(duration)
        assert 1 <= len(ticks) <= 14
        assert all(0 <= at <= 97.1 for at, _ in ticks)
        assert len({text for _, text in ticks}) == len(ticks)


class TestOutcome:
    def test_the_page_of_a_failed_run_shows_node_line_and_exception(self) -> None:
        attempts = [make_attempt(1, T0, T0 + 20, failed=True)]
        report = make_report(attempts)
        outcome = make_outcome(make_page_data(report=report, attempts=attempts))
        assert outcome.cause is not None
        assert (outcome.title, outcome.tone) == ("Failed", "bad")
        assert (outcome.cause.verdict, outcome.cause.node) == (report.verdict, "gpu-b")
        assert outcome.cause.place == "train.py:88"
        assert outcome.cause.exception == "ValueError: no label"

    def test_the_page_shows_goodput_if_it_is_known(self) -> None:
        attempts = [make_attempt(1, T0, T0 + 20, failed=False)]
        goodput = Goodput(connecting_s=10, training_s=75, lost_s=15, share=0.75)
        outcome = make_outcome(make_page_data(report=make_report(attempts, goodput=goodput), attempts=attempts))
        assert outcome.goodput == 0.75
        assert [(part.key, part.share) for part in outcome.portions] == [
            ("training", 0.75),
            ("connecting", 0.1),
            ("lost", 0.15),
        ]
        assert make_outcome(make_page_data(report=make_report(attempts), attempts=attempts)).portions == []

    def test_the_page_shows_rates_reported_by_the_program(self) -> None:
        progress = [ProgressSample(T0 + n, 4 * n, metrics={"images_per_sec": 1240.0}) for n in range(5)]
        tasks = [TaskSamples(attempt=1, task="worker:0", progress=progress)]
        facts = {fact.label: fact.value for fact in make_outcome(make_page_data(tasks=tasks)).facts}
        assert facts["images per second"] == "1,240"
        assert facts["steps per second"] == "4"

    def test_the_last_step_on_the_page_equals_that_in_the_task_table(self) -> None:
        """A task that is being stopped may take one more step, which is in its samples only."""
        attempts = [make_attempt(1, T0, T0 + 20, failed=True)]
        tasks = [TaskSamples(attempt=1, task="worker:0", progress=[ProgressSample(T0 + 19, 41)])]
        for report, attempts_known, shown in (
            (make_report(attempts), attempts, "40"),
            (None, attempts, "40"),
            (None, [], "41"),
        ):
            data = make_page_data(report=report, attempts=attempts_known, tasks=tasks)
            assert {fact.key: fact.value for fact in make_outcome(data).facts}["step"] == shown

    def test_the_last_step_on_the_page_belongs_to_the_last_attempt(self) -> None:
        """An attempt that resumed from an earlier checkpoint may have ended before it reached the same step again."""
        attempts = [make_attempt(1, T0, T0 + 20, failed=True), make_attempt(2, T0 + 20, T0 + 40, failed=True)]
        task = attempts[0].tasks[0]
        assert task.progress is not None
        further = task.model_copy(update={"progress": task.progress.model_copy(update={"step": 434})})
        attempts[0] = attempts[0].model_copy(update={"tasks": [further, *attempts[0].tasks[1:]]})
        outcome = make_outcome(make_page_data(report=make_report(attempts), attempts=attempts))
        assert {fact.key: fact.value for fact in outcome.facts}["step"] == "40"
        assert max(row.step or 0 for row in outcome.tasks) == 40

    def test_steps_per_second_exclude_the_time_between_attempts(self) -> None:
        pieces = [
            TaskSamples(
                attempt=number,
                task="worker:0",
                progress=[ProgressSample(T0 + 1000 * number + n, 10 * n) for n in range(5)],
            )
            for number in (1, 2)
        ]
        facts = {fact.key: fact.value for fact in make_outcome(make_page_data(tasks=pieces)).facts}
        assert facts["steps-per-second"] == "10"

    def test_the_page_of_a_lost_run_has_the_title_lost(self) -> None:
        attempts = [make_attempt(1, T0, T0 + 20, failed=True)]
        outcome = make_outcome(make_page_data(state="lost", attempts=attempts))
        assert outcome.cause is not None
        assert (outcome.title, outcome.cause.verdict.reference) == ("Lost", "lost")


class TestPage:
    def test_foreign_text_adds_no_element_or_attribute_to_the_page(self) -> None:
        hostile = Elements(render_page(hostile_page_data()))
        assert {tag for tag, attributes in hostile.found if "onerror" in attributes} == set()
        assert "img" not in hostile.tags
        kinds = [attributes.get("type") for tag, attributes in hostile.found if tag == "script"]
        assert kinds.count(None) == 1
        assert kinds.count("text/plain") == 1
        assert set(kinds) == {None, "text/plain", "application/json"}

    def test_the_page_contains_no_control_characters(self) -> None:
        page = render_page(hostile_page_data())
        assert page.count(read_plotly()) == 1
        page = without_plotly(page)
        assert printable(page) == page
        assert "␛[31m" in page
        assert "\\u202e" in page

    @pytest.mark.parametrize("read", [read_plotly, read_script])
    def test_embedded_scripts_contain_nothing_that_an_html_parser_changes(self, read: Callable[[], str]) -> None:
        """An HTML parser would end the script, or change some of its characters."""
        assert len(read()) > 5_000
        assert not re.search(r"</script|<!--|\r|\0|[\ud800-\udfff]", read(), re.IGNORECASE)

    def test_the_embedded_plotly_equals_the_published_version(self) -> None:
        assert read_plotly() == offline.get_plotlyjs()
        assert read_plotly().startswith("/**\n* plotly.js v")
        assert "MIT license" in read_plotly()[:200]

    def test_an_inlined_script_cannot_close_its_script_element(self) -> None:
        script = 'const end = "</script><!-- </SCRIPT >"'
        found = Elements(f"<script>{inline(script)}</script><p>").found
        assert found == [("script", {}), ("p", {})]
        assert inline('"</script>"') == r'"\x3c/script>"'

    def test_a_page_without_curves_does_not_embed_plotly(self) -> None:
        assert len(render_page(make_page_data())) < 200_000

    @given(st.recursive(st.text() | st.floats(allow_nan=False, allow_infinity=False), lambda inner: st.lists(inner)))
    def test_embedded_json_data_cannot_close_its_element(self, value: object) -> None:
        text = to_script({"x": value})
        assert not set(text) & set("<>&\u2028\u2029")
        json.loads(text)

    def test_the_page_loads_nothing_from_the_network(self) -> None:
        elements = Elements(without_plotly(render_page(make_page_data())))
        addresses = [
            value
            for _, attributes in elements.found
            for name, value in attributes.items()
            if name in ("src", "href", "action", "data", "srcset", "poster", "xlink:href")
        ]
        assert addresses
        assert [each for each in addresses if each is None or not each.startswith(("#", "data:"))] == []
        [policy] = [each["content"] for tag, each in elements.found if each.get("http-equiv")]
        assert policy is not None
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert policy.count("unsafe") == 1
        assert "style-src 'unsafe-inline'" in policy

    def test_no_element_of_the_page_has_a_style_attribute(self) -> None:
        assert [
            tag
            for tag, attributes in Elements(without_plotly(render_page(hostile_page_data()))).found
            if "style" in attributes
        ] == []

    def test_the_page_shows_measured_speeds_and_compile_cache_use(self) -> None:
        attempt = make_attempt(1, T0, T0 + 20, failed=False)
        attempt = attempt.model_copy(update={"compile_cache": CompileCacheReport(loaded=4, stored=1)})
        nodes = [
            NodeSpeed(node=node, method="numpy", gflop_s=speed, memory_gb_s=14.1)
            for node, speed in (("gpu-a", 250.2), ("gpu-b", 47.8))
        ]
        links = [LinkSpeed(node="gpu-a", to="gpu-b", there_mb_s=118, back_mb_s=11.5, latency_s=4e-5)]
        found = Finding(level="warning", node="gpu-b", reference="slow-node", message="gpu-b is slow: 0.19 × a")
        speed = SpeedReport(nodes=nodes, links=links, findings=[found], seconds=3.0)
        page = render_page(make_page_data(report=make_report([attempt], speed=speed), attempts=[attempt]))
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without_plotly(page)))
        assert "gpu-b 47.8 GFLOP/s 14.1 GB/s numpy" in text
        assert "gpu-a to gpu-b 118 MB/s 11.5 MB/s 0.04 ms" in text
        assert "gpu-b is slow: 0.19 × a" in text
        assert "compile cache 4 loaded, 1 added" in text

    def test_every_anchor_of_the_page_is_unique(self) -> None:
        ids = [
            each["id"] for _, each in Elements(without_plotly(render_page(hostile_page_data()))).found if "id" in each
        ]
        assert len(ids) == len(set(ids))
        assert {"verdict", "timeline", "training", "machines", "appendix", "logs", "events", "stacks", "spec"} <= set(
            ids
        )

    @pytest.mark.parametrize("count", [12, 13])
    def test_a_page_table_of_more_than_12_tasks_is_collapsed(self, count: int) -> None:
        attempt = make_attempt(1, T0, T0 + 20, failed=True)
        first, *_ = attempt.tasks
        tasks = [first.model_copy(update={"task": f"worker:{number}"}) for number in range(count)]
        attempts = [attempt.model_copy(update={"tasks": tasks})]
        plan = {"tasks": [{"task": task.task, "node": "gpu-a", "address": "gpu-a:1"} for task in tasks]}
        page = without_plotly(render_page(make_page_data(report=make_report(attempts), attempts=attempts, plan=plan)))
        assert page.count("<details") == page.count("</details>")
        assert page.count(f"<summary>{count} tasks: {render_end(first)}</summary>") == (count > 12)

    def test_the_sections_of_the_page_are_in_a_fixed_order(self) -> None:
        elements = Elements(without_plotly(render_page(hostile_page_data())))
        assert [each["id"] for tag, each in elements.found if tag == "h2"] == [
            "verdict",
            "timeline",
            "training",
            "machines",
            "appendix",
        ]

    @pytest.mark.parametrize("state", ["succeeded", "failed", "interrupted", "lost", "ended"])
    def test_a_run_without_any_data_has_a_page_that_explains_each_gap(self, state: str) -> None:
        page = render_page(make_page_data(state=state, plan={}))
        assert "No steps were reported. Steps of <code>model.fit</code> are counted" in page
        assert "Nothing was measured: the run was too short, or <code>sample_every_s: 0</code>" in page
        assert "There are no logs, because no task was started" in page
        assert "The command was not recorded" in page

    @pytest.mark.parametrize("plan", [{"tasks": 5}, {"tasks": [3, None]}, {"tasks": [{}]}, {"x": [[[]]]}])
    def test_the_page_can_be_rendered_from_an_invalid_plan(self, plan: dict[str, Any]) -> None:
        assert "</html>" in render_page(make_page_data(plan=plan))

    def test_the_page_can_be_rendered_with_times_beyond_the_calendar(self) -> None:
        assert "</html>" in render_page(make_page_data(started=1e20, ended=1e20, now=1e20))


@settings(max_examples=30)
@given(*[st.floats()] * 4)
def test_the_page_can_be_rendered_with_any_float_values(one: float, two: float, three: float, four: float) -> None:
    """Files of a run may hold NaN, infinities, and times in any order."""
    progress = [ProgressSample(one, 5, 1, two, three, four, {"loss": two, "x": four}), ProgressSample(two, 3, 1, one)]
    use = [NodeUseSample(time, "gpu-a", NodeSample(two, 0, 5, 9)) for time in (one, three)]
    data = make_page_data(
        started=one,
        ended=two,
        now=three,
        attempts=[make_attempt(1, three, four, failed=True)],
        records=[Record(time, 1, State("forming")) for time in (one, two, three)]
        + [Record(four, 1, gang.TaskStarted(W0, 1, two), "x"), Record(one, 2, gang.TaskExited(W0, TaskExit(1), four))],
        tasks=[TaskSamples(attempt=1, task="worker:0", progress=progress)],
        nodes=[NodeSamples(attempt=1, node="gpu-a", use=use)],
    )
    page = without_plotly(render_page(data))
    assert "</html>" in page
    assert not re.search(r'\b(?:x|width)="(?:nan|inf|-)', page)


def test_a_curve_without_values_is_left_out_of_the_page() -> None:
    assert Series("x", [(1.0, None)]).values == []
    assert make_training_charts(make_page_data(tasks=[TaskSamples(attempt=1, task="worker:0")])) == []


def test_durations_sizes_and_times_on_the_page_are_human_readable() -> None:
    assert [render_duration(value) for value in (0, 0.0123, 2.83, 200)] == ["0 s", "12.3 ms", "2.8 s", "3 min 20 s"]
    assert [render_offset(value) for value in (0, 65, 3723, 90_000)] == ["0:00", "1:05", "1:02:03", "1 d 1:00:00"]
    assert render_value(1536, "B") == "1.5 KiB"
    assert render_value(0.0401, "s") == "40.1 ms"
    assert render_value(12.345, "%") == "12.3 %"
    assert render_times(T0, T0 + 85) == "2026-11-22 10:16:40 to 10:18:05 UTC"
    assert render_times(T0, T0 + 86_400) == "2026-11-22 10:16:40 to 2026-11-23 10:16:40 UTC"
