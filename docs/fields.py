"""Tell the documentation which constructors records have: `Pytree` makes them from annotated fields."""

from __future__ import annotations

import ast
from typing import Any

import griffe


def _default(value: Any) -> str | None:
    """Return the default of a field as it is written; None where it has none."""
    if value is None:
        return None
    node = ast.parse(str(value), mode="eval").body
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("static", "tree", "field"):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        return given.get("default")
    return str(value)


class Fields(griffe.Extension):
    """Give every record the constructor that its fields make."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._visit(pkg)

    def _visit(self, module: griffe.Module) -> None:
        for member in module.members.values():
            if member.is_alias:
                continue
            if member.is_module:
                self._visit(member)
            elif member.is_class:
                self._construct(member)

    def _construct(self, record: griffe.Class) -> None:
        family = [record, *record.mro()]
        if "__init__" in record.members or not any(base.name == "Pytree" for base in family):
            return
        fields: dict[str, griffe.Parameter] = {}
        for cls in reversed(family):
            for name, member in cls.members.items():
                if member.is_alias or not member.is_attribute or member.annotation is None or name.startswith("_"):
                    continue
                if "property" in member.labels:
                    continue
                if "class-attribute" in member.labels and "instance-attribute" not in member.labels:
                    continue  # ClassVar
                keyword = "kw_only=True" in str(member.value)
                kind = griffe.ParameterKind.keyword_only if keyword else griffe.ParameterKind.positional_or_keyword
                fields[name] = griffe.Parameter(
                    name, annotation=member.annotation, kind=kind, default=_default(member.value)
                )
        order = sorted(fields.values(), key=lambda p: p.kind is griffe.ParameterKind.keyword_only)
        init = griffe.Function("__init__", parameters=griffe.Parameters(griffe.Parameter("self"), *order))
        init.parent = record
        record.set_member("__init__", init)
