"""The page's text. Logs, names and messages from others are always text in the page, never markup or a script.

Three independent measures ensure this. The template escapes every value, and a visible character replaces every control
character of the page. Data for the script is JSON in which no character ends its element. The page's content security
policy admits only the scripts with these hashes, and fetches nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from launcher.pages.appendix import make_appendix
from launcher.pages.charts import Chart, make_machine_charts, make_training_charts, thin
from launcher.pages.page_data import PageData, clean
from launcher.pages.resume import STEP_MARKS, find_last_step, make_loss_charts
from launcher.pages.series import pack, summarize
from launcher.pages.task_states import STATES
from launcher.pages.timeline import MARKS, describe, make_timeline
from launcher.pages.verdict import make_outcome
from launcher.pages.wording import render_duration, render_moment, render_offset, render_rate, render_value
from launcher.pages.workers import find_steps
from launcher.printable import printable
from launcher.proof.models import ResumeProof
from launcher.proof.text import group_flaws, render_verdict
from launcher.report.check_text import make_speed_tables

_ASSETS = resources.files("launcher.pages") / "assets"
_IN_SCRIPT = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}
_SCRIPTS = ("values.js", "charts.js", "report.js")
_ENDS_SCRIPT = re.compile(r"<(?=/script|!--)", re.IGNORECASE)
"""Text that would end an element `script`, or hide its end from the parser."""


def render_page(data: PageData) -> str:
    """The page of a run."""
    data = clean(data)
    timeline = make_timeline(data)
    training, machines = make_training_charts(data), make_machine_charts(data)
    return _assemble(
        "report.html.j2",
        [*training, *machines],
        {"duration": round(timeline.duration, 3), "restarts": _rounded(timeline.restarts)},
        start=data.started,
        now=data.now,
        run=data,
        outcome=make_outcome(data),
        timeline=timeline,
        ticks=make_ticks(timeline.duration),
        states=STATES,
        marks=MARKS,
        training=training,
        machines=machines,
        workers=find_steps(data),
        speed=make_speed_tables(data.report.speed) if data.report and data.report.speed else [],
        appendix=make_appendix(data),
    )


def render_proof_page(proof: ResumeProof, now: float) -> str:
    """The page of a test whether a program resumes exactly; `now`: when it is made, in Unix seconds."""
    charts = make_loss_charts(proof)
    return _assemble(
        "resume.html.j2",
        charts,
        {"duration": find_last_step(proof), "restarts": [], "axis": "steps"},
        start=0.0,
        now=now,
        proof=proof,
        verdict=render_verdict(proof),
        flaws=group_flaws(proof.results),
        charts={chart.key: chart for chart in charts},
        marks=STEP_MARKS,
    )


def _assemble(
    template: str, charts: Sequence[Chart], page: Mapping[str, object], /, *, start: float, now: float, **values: object
) -> str:
    """A page from its template.

    Args:
        template: the file in `assets/`.
        charts: all charts of the page.
        page: what the page's script needs.
        start: where the positions of the points begin: a time, or a step.
        now: when the page is made.
        values: what else the template needs.
    """
    script = read_script()
    plotly = read_plotly() if charts else ""
    text: str = (
        _environment()
        .get_template(template)
        .render(
            policy=_policy([script, plotly]),
            style=_read("report.css"),
            now=now,
            summaries={chart.key: [summarize(each) for each in chart.series] for chart in charts},
            page=to_script(page),
            data={chart.key: to_script(_chart_data(chart, start)) for chart in thin(charts)},
            **values,
        )
    )
    # plotly.js has control characters in its strings, so the scripts are added after `printable`. Its inert element
    # does not run while the page loads, so the page is visible first.
    inert = f'<script type="text/plain" id="plotly">{plotly}</script>\n' if plotly else ""
    return f"{printable(text)}{inert}<script>{script}</script>\n</body>\n</html>\n"


def read_script() -> str:
    """The page's own script."""
    return inline('"use strict";\n{\n' + "\n".join(map(_read, _SCRIPTS)) + "}\n")


@functools.cache
def read_plotly() -> str:
    """plotly.js from the package plotly."""
    # The import would take a third of a second, and only one file of the package is needed.
    found = importlib.util.find_spec("plotly")
    assert found is not None
    assert found.origin is not None
    return inline((Path(found.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8"))


def inline(script: str) -> str:
    r"""The script, made safe for an element `script`: in a string or a regular expression, `\x3c` is `<`."""
    return _ENDS_SCRIPT.sub(r"\\x3c", script)


def to_script(value: object) -> str:
    """The value as JSON for a `<script type="application/json">`; no text in it can end the element."""
    return json.dumps(_shown(value), separators=(",", ":"), allow_nan=False).translate(_IN_SCRIPT)


def make_ticks(duration: float) -> list[tuple[float, str]]:
    """The labels of the timeline's axis: their positions, as percentages, and their texts."""
    steps = (0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    step = next((step for step in steps if duration / step <= 8), max(86400 * round(duration / 86400 / 6), 86400))
    count = int(duration / step)
    return [
        (100 * number * step / duration, f"{number * step:.1f} s" if step < 1 else render_offset(number * step))
        for number in range(count + 1)
        if number * step <= duration * 0.97
    ]


def _shown(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {str(_shown(key)): _shown(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return value if value and isinstance(value[0], (int, float)) else [_shown(entry) for entry in value]
    return value


def _chart_data(chart: Chart, start: float) -> dict[str, Any]:
    series = [
        {
            "label": each.label,
            **pack(each.points, start=start),
            **({"fills": True} if each.fills else {}),
            **({"wide": True} if each.wide else {}),
        }
        for each in chart.series
    ]
    return {"unit": chart.unit, "series": series, **({"marks": chart.marks} if chart.marks else {})}


def _rounded(times: Sequence[float]) -> list[float]:
    return [round(time, 3) for time in times]


def _policy(scripts: Sequence[str]) -> str:
    """The policy that fetches nothing and runs only these scripts."""
    hashes = " ".join(_hash(script) for script in scripts if script)
    # plotly.js adds an element `style` that differs between its versions, so styles cannot be admitted by their hashes.
    # Styles cannot fetch anything, and no style from others gets into the page.
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> Any:
    """The templates, which escape every value."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_omit_none,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "duration": render_duration,
        "offset": render_offset,
        "moment": render_moment,
        "rate": render_rate,
        "value": render_value,
        "percent": lambda share: f"{share:.1%}".replace("%", " %"),
        "position": _position,
    }
    environment.globals["describe"] = describe
    return environment


def _position(part: float, whole: float) -> str:
    """The share of the whole, as a percentage for SVG."""
    share = part / whole if whole else 0.0
    return f"{100 * min(max(share, 0.0), 1.0) + 0.0:.3f}%"  # turns -0.0 into 0.0


def _omit_none(value: object) -> object:
    return "" if value is None else value
