"""Makes text from outside sources safe to print: a terminal shows the text and obeys no control character in it.

Host names, exception messages, file names and the output of a node's shell must not move the cursor, change the
window's title, write to the clipboard or reverse the order of characters. Visible characters replace such characters.
"""

from __future__ import annotations

import re

UNSEEN = r"\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
"""Characters to replace in addition to the first 32: DEL and the C1 controls, Unicode's line separators, marks that
change the direction of text, and surrogates. Goes inside the brackets of a regular expression."""

_UNSEEN = re.compile(rf"[\x00-\x08\x0b-\x1f{UNSEEN}]")


def printable(text: str) -> str:
    """The text with a visible stand-in for every control character except line breaks and tabs."""
    return text if text.isprintable() else _UNSEEN.sub(lambda match: stand_in(match[0]), text)


def has_control(text: str) -> bool:
    """Whether the text has a control character, such as a line break: then it can become two lines of a script."""
    return any(char < " " or char == "\x7f" for char in text)


def stand_in(char: str) -> str:
    r"""A visible stand-in: `␛` for the escape character, `\u202e` for a character without a symbol."""
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
