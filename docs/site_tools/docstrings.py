"""Lets the docstrings' cross-references, written in Sphinx's way, lead to the pages of this site."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([\w.]+)`")
_LITERAL = re.compile(r"^[ \t]*::[ \t]*$|(?<=\S):(?=:[ \t]*$)", re.M)


class SphinxRoles(griffe.Extension):
    """Turns each role into code, with a link where its target has a place on a page."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrites every docstring of a package, once it is loaded whole and names can be resolved."""
        _rewrite(pkg)


def _rewrite(obj: griffe.Object) -> None:
    if obj.docstring is not None:
        text = _ROLE.sub(lambda role: _link(obj, role[1], role[2]), obj.docstring.value)
        obj.docstring.value = _LITERAL.sub("", text)
    for member in obj.members.values():
        if not member.is_alias:
            _rewrite(member)


def _link(obj: griffe.Object, tilde: str, target: str) -> str:
    text = target.rsplit(".", 1)[-1] if tilde else target
    return f'<autoref identifier="{_path(obj, target)}" optional><code>{text}</code></autoref>'


def _path(obj: griffe.Object, target: str) -> str:
    """Returns the dotted path of what a docstring calls ``target``: a member of its class, or a name of its module."""
    first, dot, rest = target.partition(".")
    scope: Any = obj
    while scope is not None:
        if first in scope.members:
            member = scope.members[first]
            return (member.target_path if member.is_alias else member.path) + dot + rest
        scope = scope.parent
    return target
