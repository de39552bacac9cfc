"""One HTML page that tells what a run was: the `Material` that was read of a run goes in, the page's text comes out.

Pure, except that the page's own parts (template, style, scripts) are read from `assets/`, and plotly.js, which draws
the curves, from the package plotly.
"""
