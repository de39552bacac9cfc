"""Advice that nodes and the controller give in the same words."""

from __future__ import annotations

INSTALLERS = (
    ("/pipx/venvs/distlaunch/", "pipx inject distlaunch {}"),
    ("/uv/tools/distlaunch/", "uv tool install --with {} distlaunch"),
    ("/uv/archive-v0/", "uvx --with {} distlaunch …"),
)
"""Parts of the paths of environments that have installers of their own, and how these add a package."""


def advise_install(requirement: str, python: str) -> str:
    """What to do if this Python lacks a package, or several between spaces, as the end of "run: …".

    The system's own Python often refuses pip (PEP 668), and its users lack the rights: it makes a virtual environment.
    """
    for part, command in INSTALLERS:
        if part in python:
            named = requirement.replace(" ", " --with ") if "--with" in command else requirement
            return f"{command.format(named)}; or name a Python that has it with --python"
    if not python.startswith(("/usr/bin/", "/bin/")):
        return f"{python} -m pip install {requirement}; or name a Python that has it with --python"
    return (
        f"{python} -m venv ~/tf && ~/tf/bin/pip install {requirement}; then name that Python with "
        "--python '~/tf/bin/python' (`python:` in a spec)"
    )
