"""A page of 8 workers with 10,000 points each, from opening to its first curves, against one with 100 points each."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.pairs import Pair, time_pairs
from tests.harness.browser import Browser, open_browser
from tests.harness.builders.pages import to_curves, write_page


def measure(runs: int) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as folder, open_browser(Path(folder, "profile")) as browser:
        large = write_page(Path(folder, "large.html"), points=10_000)
        small = write_page(Path(folder, "small.html"), points=100)
        browser.size(1280, 1000)
        print("a page of 8 workers with 10,000 points each; rival: with 100 points each (goal: ratio at most 1.5)")
        yield Pair(
            "to the first curves",
            *time_pairs(partial(_time_curves, browser, large), partial(_time_curves, browser, small), runs * 2),
        )


def _time_curves(browser: Browser, page: Path) -> float:
    """Seconds, by the page's own clock, until the frame after its first curves."""
    browser.open(Path("/dev/null"))
    browser.open(page)
    to_curves(browser, "#training")
    seconds = browser.run(
        "new Promise((told) => requestAnimationFrame(() => requestAnimationFrame("
        "() => told(performance.now() / 1000))))"
    )
    return float(seconds)
