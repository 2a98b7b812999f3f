"""The reference of the library: every public name with an example that runs, and what its parameters are called."""

from __future__ import annotations

import doctest
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conftest import ROOT
from docs_modules import docs_module

import ckptool

pytestmark = pytest.mark.filterwarnings("ignore")


reference, tour = docs_module("reference"), docs_module("tour")
NAMES = [name for names in reference.SECTIONS.values() for name in names]


def test_the_page_has_every_public_name_once() -> None:
    assert sorted([*NAMES, "__version__"]) == sorted(ckptool.__all__)


def test_the_page_is_up_to_date() -> None:
    assert reference.reference() in (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Scalar"])
def test_every_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference.example_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = {"ckptool": ckptool, "numpy": numpy, "torch": torch}
    examples = doctest.DocTestParser().get_doctest(getattr(ckptool, name).__doc__, names, name, None, None)
    assert examples.examples, f"{name} has no example"
    printed: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=printed.append)
    assert printed == []


# -- the notebook


def plain_outputs(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """The cells of a notebook, each with its outputs as text."""
    cells = []
    for cell in notebook["cells"]:
        texts = [output.get("data", {}).get("text/plain", output.get("text", "")) for output in cell.get("outputs", ())]
        cells.append(("".join(cell["source"]), "".join("".join(text) for text in texts)))
    return cells


def committed() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(tour.NOTEBOOK.read_text(encoding="utf-8"))
    return notebook


def test_the_notebook_prints_what_it_shows() -> None:
    assert plain_outputs(tour.notebook()) == plain_outputs(committed())
    assert any("text/html" in output["data"] for cell in committed()["cells"] for output in cell.get("outputs", ()))


def test_the_notebook_runs_in_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    reference.example_files(tmp_path)
    notebook = nbformat.read(tour.NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert plain_outputs(notebook) == plain_outputs(committed())
