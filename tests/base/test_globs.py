"""Patterns: a string is one pattern, not one for each of its letters."""

from __future__ import annotations

from conftest import FIXTURES

import ckptool


def test_a_string_is_one_pattern() -> None:
    globs = ckptool.Globs("fc.*", "*.bias")  # type: ignore[arg-type]
    assert (globs.include, globs.exclude) == (("fc.*",), ("*.bias",))
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint:
        dropped = ckptool.drop(checkpoint, "fc.*")
        assert len(dropped.survey.tensors) == len(checkpoint.survey.tensors) - 2
        assert ckptool.redact(checkpoint, "paths").changes
