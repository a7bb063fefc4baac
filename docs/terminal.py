"""Draw what a program prints as a terminal: every block of a page that begins with a prompt, ``$ ``, is a picture."""

from __future__ import annotations

import html
import re
from typing import Any

# Of one character, in the units of the picture.
_WIDTH, _HEIGHT, _EDGE, _BAR = 7.8, 18, 16, 28

_BLOCK = re.compile(r"^```text\n(\$ .*?)^```\n", flags=re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put pictures in place of such blocks; mkdocs calls it."""
    return _BLOCK.sub(lambda found: picture(found.group(1)) + "\n", markdown)


def blocks(markdown: str) -> list[str]:
    """The texts of a page that are drawn."""
    return _BLOCK.findall(markdown)


def picture(text: str) -> str:
    """Draw a text line by line as SVG, whose letters can be marked and copied."""
    lines = text.rstrip("\n").split("\n")
    width = round(2 * _EDGE + _WIDTH * max(map(len, lines)))
    height = _BAR + 2 * _EDGE + _HEIGHT * (len(lines) - 1)
    rows = "".join(_row(line, _BAR + _EDGE + _HEIGHT * i) for i, line in enumerate(lines))
    dots = "".join(
        f'<circle cx="{_EDGE + 16 * i}" cy="{_BAR // 2}" r="5" fill="{color}"/>'
        for i, color in enumerate(("#e5655c", "#e0b050", "#5fb760"))
    )
    return (
        f'<svg class="terminal" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(lines[0])}"><rect width="{width}" height="{height}" rx="8" fill="#1d2430"/>{dots}'
        f'<text fill="#d7dde8" font-family="monospace" font-size="13" xml:space="preserve" '
        f'style="white-space: pre">{rows}</text></svg>'
    )


def _row(line: str, y: int) -> str:
    color = ' fill="#7ee2c8"' if line.startswith("$ ") else ""
    return f'<tspan x="{_EDGE}" y="{y}"{color}>{html.escape(line, quote=False) or " "}</tspan>'
