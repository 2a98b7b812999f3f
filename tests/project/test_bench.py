"""The benchmark: its commands. That it measures well is seen by running it: no times here."""

from __future__ import annotations

from bench import peaks


def test_every_command_has_its_peak_measured() -> None:
    from ckptool.cli.main import COMMANDS

    measured = {command.name.split()[0] for command in peaks.COMMANDS}
    assert measured <= set(COMMANDS)
    # One is measured where files are edited in place, two read no checkpoint, and two need files of their own.
    elsewhere = {"completion", "explain", "undo", "dequantize"}
    elsewhere |= {"lora merge", "lora convert", "lora extract", "lora resize"}
    assert set(COMMANDS) - measured <= elsewhere, "add it to bench/peaks.py"
