"""Source of docs/notebook.ipynb: a tour of the library in cells, with the outputs of a real run.

``python -m docs.tour`` writes the notebook; with ``--check`` it only reports whether it is up to date.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from .reference import example_files

NOTEBOOK: Final = Path(__file__).resolve().with_name("notebook.ipynb")

CELLS: Final = (
    "# ckptool in a notebook\n\nA checkpoint is opened in milliseconds, whatever its size, and nothing in it is run.",
    'import ckptool\n\ncheckpoint = ckptool.open("training.pth")\ncheckpoint',
    "It is a read-only mapping of what it holds. Tensors are read when their numbers are needed, and no further.",
    'list(checkpoint), checkpoint["epoch"], checkpoint["optimizer"]["param_groups"][0]["lr"]',
    'weight = checkpoint["state_dict"]["module.head.weight"]\nweight.shape, weight.dtype, weight.device, weight.nbytes',
    "import numpy\n\nnumpy.asarray(weight[0, :3]).ravel()",
    "import torch\n\ntorch.as_tensor(weight).abs().max()  # also of bfloat16 and float8, which NumPy does not have",
    "Edits return another checkpoint. Only `save` writes; it copies the bytes of the tensors as they are.",
    'plain = ckptool.remap(ckptool.strip_module(checkpoint), "cpu")\n'
    'print("; ".join(item.words for item in plain.changes))',
    'ckptool.save(ckptool.extract(plain, "state_dict"), "weights.pth")\nckptool.match("weights.pth", plain)["loads"]',
    "Every function takes a path or a checkpoint, and returns what the command prints with `--json`.",
    'report = ckptool.validate("weights.pth", {"device": "cpu", "weights-only": True})\nreport["valid"]',
    "checkpoint.close()",
)


def notebook() -> dict[str, Any]:
    """Run the cells in a folder with the files of the examples. Return the notebook."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        example_files(Path(folder))
        os.chdir(folder)
        try:
            return _run()
        finally:
            os.chdir(here)


def _run() -> dict[str, Any]:
    names: dict[str, Any] = {}
    cells: list[dict[str, Any]] = []
    count = 0
    for number, source in enumerate(CELLS):
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        if _is_code(source):
            count += 1
            outputs = _outputs(source, names, count)
            cell |= {"cell_type": "code", "execution_count": count, "outputs": outputs}
        else:
            cell["cell_type"] = "markdown"
        cells.append(dict(sorted(cell.items())))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _is_code(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _outputs(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell. Return its printed text and the value of its last line, as a notebook shows them."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)  # type: ignore[attr-defined]
    outputs: list[dict[str, Any]] = []
    lines = printed.getvalue().splitlines(keepends=True)
    if lines:
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": value._repr_html_().splitlines(keepends=True)} | data
        outputs.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def text() -> str:
    """Return the text of the notebook file."""
    return json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit("docs/notebook.ipynb is not up to date: make docs" if NOTEBOOK.read_text("utf-8") != text() else 0)
    NOTEBOOK.write_text(text(), "utf-8")
