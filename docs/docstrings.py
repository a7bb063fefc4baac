"""Docstrings as pages: tables in Markdown, no notes to developers, and defaults by their values."""

from __future__ import annotations

import re
from typing import Any

import griffe

_RULER = re.compile(r"=+(  +=+)+")
_SPECIAL = re.compile(r"([\\|_*<])")
_PRIVATE = re.compile(r"_[A-Z_]+")


def in_markdown(text: str, home: str, names: set[str]) -> str:
    """Write tables of reStructuredText as Markdown's, and leave out what a room may import.

    Args:
      text: a docstring.
      home: the module that it is of.
      names: those of the module, which become links where they are in the first column.
    """
    done: list[str] = []
    lines = iter(re.sub(r"\n*It may import [^.]*\.\n*$", "", text).split("\n"))
    for line in lines:
        if not _RULER.fullmatch(line):
            done.append(line)
            continue
        starts = [0, *(found.end() for found in re.finditer(r"  +", line))]
        rows: list[list[str]] = []
        for row in lines:
            if _RULER.fullmatch(row):
                if len(rows) > 1:
                    break
                continue
            cells = [row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
            if cells[0]:
                rows.append(cells)
            else:  # the row before goes on
                rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
        head, *body = ([_cell(cell, home, names if j == 0 else set()) for j, cell in enumerate(row)] for row in rows)
        done += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]
    return "\n".join(done)


def _cell(text: str, home: str, names: set[str]) -> str:
    plain, *others = text.split("`")
    name, rest = others if others else ("", "")
    link = f"[`{name}`][{home}.{name}]" if name in names else f"`{name}`" if name else ""
    return _SPECIAL.sub(r"\\\1", plain).replace(r"\<", "&lt;") + link + _SPECIAL.sub(r"\\\1", rest)


class Docstrings(griffe.Extension):
    """Rewrite the docstrings of modules, and private constants among the defaults of functions."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._visit(pkg)

    def _visit(self, holder: griffe.Module | griffe.Class) -> None:
        if holder.is_module and holder.docstring is not None:
            text = holder.docstring.value
            holder.docstring.value = in_markdown(text, holder.canonical_path, set(holder.members))
        for member in holder.members.values():
            if member.is_alias:
                continue
            if member.is_function:
                for parameter in member.parameters:
                    if _PRIVATE.fullmatch(str(parameter.default)) and str(parameter.default) in member.module.members:
                        parameter.default = member.module.members[str(parameter.default)].value
            elif member.is_module or member.is_class:
                self._visit(member)
