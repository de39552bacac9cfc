"""The HTML report of a run, and that of a test whether a program resumes.

In: the `PageData` of a run, or the `ResumeProof` of a test. Out: the page's text. Pure, except that it reads the page's
own parts (templates, style, scripts) from `assets/`, and plotly.js, which draws the curves, from the package plotly.
"""
