"""Globs("fc.*"), drop(c, "head") and redact(c, "paths") took every letter for a pattern, and so chose everything."""

from __future__ import annotations

import pytest
from conftest import FIXTURES

import ckptool
from ckptool.base.errors import TargetError


def test_a_text_is_one_pattern() -> None:
    globs = ckptool.Globs("fc.*", "*.bias")  # type: ignore[arg-type]
    assert (globs.include, globs.exclude) == (("fc.*",), ("*.bias",))
    with ckptool.open(FIXTURES / "bare.pth") as checkpoint:
        dropped = ckptool.drop(checkpoint, "fc.*")
        assert len(dropped.survey.tensors) == len(checkpoint.survey.tensors) - 2
        assert ckptool.redact(checkpoint, "paths").changes


def test_only_scalars_are_set() -> None:
    with ckptool.open(FIXTURES / "wrapped.pth") as checkpoint:
        for value in ((1, 2), [1], {}, object()):
            with pytest.raises(TargetError, match="no scalar"):
                ckptool.set_entry(checkpoint, "epoch", value)  # type: ignore[arg-type]
