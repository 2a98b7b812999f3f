"""``redact`` told ``--paths -o OUT takes them out``, which is no command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from command_line import say
from conftest import FIXTURES


def test_what_it_names_takes_all_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my model.ckpt").write_bytes((FIXTURES / "lightning.ckpt").read_bytes())
    said = say("redact", "my model.ckpt")
    step = said.out.rpartition("-> ckptool ")[2]
    assert say(*shlex.split(step)).code == 0
    assert "nothing private is recognised" in say("redact", "my model.redacted.ckpt").out


def test_where_there_is_nothing_there_is_no_step() -> None:
    assert "->" not in say("redact", FIXTURES / "bare.pth").out
