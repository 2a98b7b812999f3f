"""The table of codes: every code that the package reports is in it, and every code in it is reported somewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

from ckptool.base import findings
from ckptool.base.findings import Effect, Finding, codes

#: Functions that take the code of a finding first.
_MAKERS = ("Finding", "Problem", "note", "_note")


@cache
def _trees() -> tuple[tuple[Path, ast.Module], ...]:
    files = sorted((ROOT / "ckptool").rglob("*.py"))
    return tuple((path, ast.parse(path.read_text(encoding="utf-8"))) for path in files)


def _reported() -> Iterator[tuple[str, str]]:
    """Yield (code, place) for every code that is written as text where a finding is made."""
    for path, tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or len(node.args) < 3:
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            first, second = node.args[:2]
            level = isinstance(second, ast.Constant) and second.value in ("note", "warning", "error")
            if name in _MAKERS and level and isinstance(first, ast.Constant):
                yield str(first.value), f"{path.name}:{node.lineno}"


def test_every_reported_code_is_in_the_table() -> None:
    reported = list(_reported())
    assert len(reported) > 150
    assert [place for code, place in reported if code not in codes()] == []


def test_every_code_in_the_table_is_used() -> None:
    assert [code for code in codes() if not {code, code.removeprefix("lock-")} & _used()] == []


@cache
def _used() -> set[str]:
    """Return all texts in the package outside of the table, and the codes that other modules use by a name."""
    others = [tree for path, tree in _trees() if path.parts[-2:] != ("base", "findings.py")]
    nodes = [node for tree in others for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return texts | {value for name, value in vars(findings).items() if isinstance(value, str) and name in names}


def test_effects_come_from_the_table() -> None:
    cut = Finding("cut", "error", "the file ends early", refused=True)
    assert (cut.blocks_edits, cut.ambiguous, cut.refused) == (True, False, True)
    assert Effect.LOSES_VALUES in cut.effect
    assert cut.check == "checksums"
    note = Finding("torch-tar", "note", "an old format")
    assert note.effect is Effect.NONE
    with pytest.raises(KeyError):
        Finding("no-such-code", "note", "").effect  # noqa: B018


def test_damage_always_blocks_edits() -> None:
    assert [name for name, code in codes().items() if code.effect == Effect.LOSES_VALUES] == []
