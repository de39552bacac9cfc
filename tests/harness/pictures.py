"""The pictures of the documents: drawn from what the program shows now, and kept with this text in `.github/pictures/`.

A test compares the text of a picture with what the program shows. `UPDATE_PICTURES=1` draws the pictures again.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from html import escape, unescape
from io import StringIO

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tests.harness.places import ROOT
from tests.harness.terminals import Screen

PICTURES = ROOT / ".github" / "pictures"
LINE = 24.4
"""The height of a line in what rich exports."""
MARGIN = 8
FRAME_S = 0.2
"""The shortest time that a frame of a recording is shown."""
PAUSE_S = 1.0
"""The longest time, except for the last frame."""
END_S = 6.0
PNG_HEAD = 8
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{width}} {height:g}">
<desc>{description}</desc>
<style>.{{unique_id}}-matrix {{{{ font: {{char_height}}px monospace; white-space: pre }}}} {{styles}}{motion}</style>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<svg x="{margin}" y="{margin}" width="100%" height="{seen:g}"><g class="{{unique_id}}-matrix film">
{{backgrounds}}{{matrix}}
</g></svg>
</svg>
"""
Frame = tuple[float, Sequence[Text]]


def draw(lines: Sequence[Text], columns: int, description: str) -> bytes:
    """An SVG of lines as a terminal shows them."""
    return _export(lines, columns, len(lines), description, "")


def draw_film(frames: Sequence[Frame], columns: int, rows: int, description: str) -> bytes:
    """An SVG that repeats the frames; a frame is the time in seconds at which it is first shown, and its lines.

    The frames are below each other, and move up one by one behind a window of one frame.
    """
    times = [time for time, _ in frames]
    shown = [min(max(later - time, FRAME_S), PAUSE_S) for time, later in itertools.pairwise(times)] + [END_S]
    begins = itertools.accumulate(shown, initial=0.0)
    steps = "".join(
        f"{100 * begin / sum(shown):.3f}% {{{{ transform: translateY({-number * rows * LINE:g}px) }}}} "
        for number, begin in zip(range(len(shown)), begins, strict=False)
    )
    motion = f" @keyframes roll {{{{ {steps}}}}} .film {{{{ animation: roll {sum(shown):.2f}s step-end infinite }}}}"
    lines = [line for _, frame in frames for line in (*frame, *[Text()] * (rows - len(frame)))]
    return _export(lines, columns, rows, description, motion)


def _export(lines: Sequence[Text], columns: int, rows: int, description: str, motion: str) -> bytes:
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, no_wrap=True, crop=True, overflow="crop", highlight=False)
    frame = SVG.format(
        height=rows * LINE + 2 * MARGIN,
        seen=rows * LINE,
        margin=MARGIN,
        description=escape(description).replace("{", "{{").replace("}", "}}"),
        motion=motion,
    )
    drawn = console.export_svg(code_format=frame, unique_id="t")
    return re.sub(r' clip-path="url\(#t-line-\d+\)"', "", drawn).encode()  # `textLength` keeps to the line as well


def read_rows(screen: Screen) -> list[Text]:
    """The rows of a terminal, with their colours, without the empty ones at the end."""
    rows = [_read_row(screen.buffer[y], screen.columns) for y in range(screen.lines)]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _read_row(row: pyte.screens.StaticDefaultDict[int, pyte.screens.Char], columns: int) -> Text:
    text = Text()
    for style, cells in itertools.groupby((row[x] for x in range(columns)), _style_of):
        text.append("".join(cell.data for cell in cells), style)
    text.rstrip()
    return text


def _style_of(cell: pyte.screens.Char) -> Style:
    return Style(
        color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold, italic=cell.italics, reverse=cell.reverse
    )


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else name.replace("brown", "yellow")


def read_frames(writes: Sequence[tuple[float, bytes]], columns: int, rows: int) -> Iterator[Frame]:
    """What a terminal showed after each output that is followed by a pause, and at the end."""
    screen = Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    before: list[Text] = []
    for (time, data), (later, _) in zip(writes, [*writes[1:], (float("inf"), b"")], strict=True):
        stream.feed(data)
        if later - time >= FRAME_S and (now := read_rows(screen)) != before:
            yield time, now
            before = now


# --- pictures on disk ---


def keep(name: str, picture: bytes, description: str) -> None:
    """Writes a picture if the pictures are to be drawn again."""
    if not os.environ.get("UPDATE_PICTURES"):
        return
    if picture.startswith(b"\x89PNG"):
        chunk = b"iTXtDescription\0\0\0\0\0" + description.encode()
        length, check = struct.pack(">I", len(chunk) - 4), struct.pack(">I", zlib.crc32(chunk))
        end = picture.rindex(b"IEND") - 4
        picture = picture[:end] + length + chunk + check + picture[end:]
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / name).write_bytes(picture)


def read_description(name: str) -> str:
    """The text with which a picture was kept."""
    picture = (PICTURES / name).read_bytes()
    if name.endswith(".svg"):
        [found] = re.findall(r"<desc>(.*?)</desc>", picture.decode(), re.DOTALL)
        return unescape(found)
    place = PNG_HEAD
    while picture[place + 4 : place + 8] != b"iTXt":
        place += 12 + int(struct.unpack(">I", picture[place : place + 4])[0])
    length = struct.unpack(">I", picture[place : place + 4])[0]
    return picture[place + 8 : place + 8 + length].removeprefix(b"Description\0\0\0\0\0").decode()
