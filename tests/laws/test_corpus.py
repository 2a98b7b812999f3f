"""Real checkpoints by other people: reports agree with the manifest and with torch, edits with the oracle."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import oracle
import pytest
from conftest import CORPUS, corpus_files, needs_corpus
from naive_edits import strip, without_metadata

import ckptool
from ckptool.base.errors import NotACheckpointError
from ckptool.checkpoint.paths import parse_path
from ckptool.pickles.compare import difference
from ckptool.pickles.nodes import children

pytestmark = needs_corpus

FILES = corpus_files()
KINDS = {
    "sb3-zip": "zip",
    "tar.gz": "gzip",
    "unknown": "unknown",
    "lfs-pointer": "git-lfs-pointer",
    "zip-nontorch": "npz",
    "torch01-tar": "torch-tar",
}
PROGRAMS = {"torchscript": "torchscript", "torchscript-1.0(model.json)": "torchscript-1.0"}


def rows() -> dict[str, dict[str, str]]:
    if not CORPUS.is_dir():
        return {}
    with (CORPUS / "MANIFEST.tsv").open(encoding="utf-8", newline="") as lines:
        return {row["file"]: row for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)}


ROWS = rows()
every = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
TORCH = [path for path in FILES if ROWS[path.name]["container"] in ("zip", "legacy")]
torch_files = pytest.mark.parametrize("path", TORCH, ids=lambda path: path.name)
LOADABLE = [path for path in TORCH if ROWS[path.name]["torch 2.13 weights_only"].startswith("yes")]
loadable = pytest.mark.parametrize("path", LOADABLE, ids=lambda path: path.name)


@every
def test_container(path: Path) -> None:
    container = ROWS[path.name]["container"]
    if container in PROGRAMS:
        assert ckptool.inspect(path)["format"] == PROGRAMS[container]
        return
    if container in ("zip", "legacy"):
        assert ckptool.inspect(path)["format"] == f"torch-{container}"
        return
    if container == "safetensors":
        assert ckptool.inspect(path)["format"] == container
        return
    with pytest.raises(NotACheckpointError) as caught:
        ckptool.open(path)
    assert caught.value.kind == KINDS.get(container, container)
    assert caught.value.exit_code == 3


@torch_files
def test_weights_only_agrees_with_torch(path: Path) -> None:
    verdict = ckptool.inspect(path)["weights_only"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            oracle.load(path)
        loads = True
    except Exception:
        loads = False
    assert verdict["loads"] == loads == ROWS[path.name]["torch 2.13 weights_only"].startswith("yes")
    assert bool(verdict["blockers"]) is not loads


@loadable
@pytest.mark.parametrize("edit", ["strip", "add", "repack", "sanitize", "cpu", "cuda:0"])
def test_edits_equal_the_naive_ones(path: Path, edit: str, out: Path) -> None:
    with ckptool.open(path) as checkpoint:
        paths = [parse_path(item.path) for item in checkpoint.state_dicts if item.confidence == "high"]
        if edit in ("strip", "add"):
            result = ckptool.strip_module(checkpoint) if edit == "strip" else ckptool.add_module(checkpoint)
        elif edit in ("repack", "sanitize"):
            result = ckptool.repack(checkpoint) if edit == "repack" else ckptool.sanitize(checkpoint)
        else:
            result = ckptool.remap(checkpoint, edit)
        ckptool.save(result, out)
    expected = oracle.load(path)
    if edit in ("strip", "add"):
        expected = oracle.rename(expected, paths, strip if edit == "strip" else "module.".__add__)
    elif edit not in ("repack", "sanitize"):
        assert oracle.tags(out) == [tag if tag in ("cpu", "meta") else edit for tag in oracle.tags(path)]
    assert oracle.difference(without_metadata(expected), without_metadata(oracle.load(out))) == ""


@torch_files
def test_add_then_strip_gives_back_every_byte(path: Path, tmp_path: Path) -> None:
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    with ckptool.open(path) as checkpoint:
        ckptool.save(checkpoint, three)
        ckptool.save(ckptool.add_module(checkpoint), one)
    with ckptool.open(one) as checkpoint:
        ckptool.save(ckptool.strip_module(checkpoint), two)
    assert three.read_bytes() == path.read_bytes()
    if shared_keys(path):
        # Only the key was renamed, so it is another object afterwards: equal but for the identity of strings.
        with ckptool.open(path) as before, ckptool.open(two) as after:
            assert difference(before.graph, after.graph, texts_by_value=True) == ""
        return
    assert two.read_bytes() == path.read_bytes()


def shared_keys(path: Path) -> set[str]:
    """Keys of state dicts that are one string object with something outside the renamed mappings."""
    with ckptool.open(path) as checkpoint:
        graph = checkpoint.graph
        keys = {key for item in checkpoint.state_dicts for key, _ in item.items}
        renamed = {item.ref for item in checkpoint.state_dicts} | {item.metadata for item in checkpoint.state_dicts}
        others = (child for ref in graph.reachable() if ref not in renamed for child in children(graph.nodes[ref]))
        return {str(graph.nodes[ref]) for ref in others if ref in keys}
