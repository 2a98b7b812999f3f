"""The manual pages: one for each command, as its help has it, installed with the wheel, and read by groff as meant."""

from __future__ import annotations

import configparser
import shutil
import subprocess

import pytest
from conftest import ROOT
from docs_modules import docs_module

from ckptool.cli.main import COMMANDS, cli

manual = docs_module("manual")
PAGES = manual.stored()
SECTIONS = ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS", "SEE ALSO")


def test_every_command_has_a_page_that_is_up_to_date() -> None:
    assert PAGES.keys() == {"ckptool.1", *(f"ckptool-{name}.1" for name in COMMANDS)}
    assert manual.pages() == PAGES


def test_the_wheel_installs_every_page() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    pattern = settings["options.data_files"]["share/man/man1"]
    assert {path.name for path in ROOT.glob(pattern)} == PAGES.keys()


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("name", sorted(PAGES))
def test_groff_renders_a_page_as_it_is_meant(name: str) -> None:
    run = subprocess.run(
        ["groff", "-ww", "-man", "-Tutf8", "-P-cbou", str(manual.FOLDER / name)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    assert run.stderr == ""
    lines = [line.strip() for line in run.stdout.splitlines()]
    assert [line for line in lines if line in SECTIONS] == list(SECTIONS)
    # What can be typed comes out as it is typed, its quotes and dashes, too.
    with cli.make_context("ckptool", ["inspect"]) as context:
        command = cli.get_command(context, name.removeprefix("ckptool-").removesuffix(".1")) or cli
    examples, _ = manual.epilog(command)
    assert examples and not set(examples) - set(lines)
