"""The HTML report of a run.

In: the `PageData` of a run. Out: the page's text. Pure, except that it reads the page's own parts (template, style,
scripts) from `assets/`, and plotly.js, which draws the curves, from the package plotly.
"""
