"""Text of others, made such that a terminal shows it and obeys nothing in it. Pure.

Names of hosts, messages of exceptions, file names, what a shell prints on a node: none of it may move the cursor, give
the window another title, write to the clipboard, or turn the order of characters. What would is shown instead.
"""

from __future__ import annotations

import re

UNSEEN = r"\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""Beside the first 32: the controls above ASCII, line breaks that are none, what turns the order of characters, and
half characters. For the inside of a regular expression's brackets."""

_UNSEEN = re.compile(rf"[\x00-\x08\x0b-\x1f{UNSEEN}]")


def printable(text: str) -> str:
    """The text with a visible stand-in for every control character but line breaks and tabs."""
    return text if text.isprintable() else _UNSEEN.sub(lambda match: stand_in(match[0]), text)


def stand_in(char: str) -> str:
    r"""`␛` for the escape character, `\u202e` where there is no picture of it."""
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
