"""Adds man pages and completion scripts to the wheel; hatchling runs this when it builds one.

Both come from the command line's own definitions, and so are never stale. The same sources give the same bytes.
"""

from __future__ import annotations

import sys
import tempfile
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    import click

COMPLETIONS = {
    "bash": "bash-completion/completions/distlaunch",
    "zsh": "zsh/site-functions/_distlaunch",
    "fish": "fish/vendor_completions.d/distlaunch.fish",
}
"""Where each shell looks for the script, below `share/`."""
NO_DATE = r"\&"
"""A man page's date that shows nothing."""


class WheelData(BuildHookInterface[Any]):  # type: ignore[misc]  # hatchling is not installed where mypy runs
    """hatchling finds this class because it is the only hook of this file."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Writes the files to a temporary folder, and names them in `build_data`.

        Args:
            version: `standard`, or `editable`: such a wheel only points to the sources, and is built on each install.
            build_data: what hatchling puts into the wheel; `shared_data` goes below the environment's folder.
        """
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        try:
            from click_man.core import write_man_pages

            from launcher.cli.completion import render_script
            from launcher.cli.main import cli
        finally:
            sys.path.remove(self.root)
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        scripts = {shell: render_script(shell, cli) for shell in COMPLETIONS}
        _prepare(cli)
        write_man_pages("distlaunch", cli, version=self.metadata.version, target_dir=str(folder), date=NO_DATE)
        for page in sorted(folder.glob("*.1")):
            build_data["shared_data"][str(page)] = f"share/man/man1/{page.name}"
        for shell, place in COMPLETIONS.items():
            path = folder / shell
            path.write_text(scripts[shell], encoding="utf-8")
            build_data["shared_data"][str(path)] = f"share/{place}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the temporary folder."""
        if self._folder is not None:
            self._folder.cleanup()


def _prepare(command: click.Command) -> None:
    """Changes the texts of a command, and of those below it, to what click-man expects.

    click-man would cut a command's line in a list after 45 characters, and fill the lines of an example.
    """
    command.short_help = command.get_short_help_str()
    command.help = "\n\n".join(map(_as_roff, cleandoc(command.help or "").split("\n\n")))
    for inner in getattr(command, "commands", {}).values():
        _prepare(inner)


def _as_roff(paragraph: str) -> str:
    r"""A paragraph of a help text for a man page; click marks one whose lines must stay with a line `\b`."""
    lines = [line.replace("\\", r"\e").replace("-", r"\-") for line in paragraph.splitlines()]
    lines = [rf"\&{line}" if line.startswith((".", "'")) else line for line in lines]
    return "\n".join([".nf", *lines[1:], ".fi"]) if lines[:1] == ["\b"] else "\n".join(lines)
