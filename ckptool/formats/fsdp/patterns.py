"""Rank files that the user names one by one, or by a pattern, instead of by their folder.

A pattern is a file name with one ``*``, or with one list like ``{0,2}`` as in shells. It is the path of the checkpoint
that its files form together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from fnmatch import translate
from itertools import takewhile

from ...files.folders import Folder, open_folder
from ...files.sources import FolderSource
from ..names.ranks import mates
from .meshes import Meshes, are_one_save, read_files


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern rather than the name of an existing file."""
    name = os.path.basename(path)
    return ("*" in name or ("{" in name and "," in name)) and not os.path.lexists(path)


def matching(path: str) -> tuple[Folder, list[str]]:
    """Return the folder of a pattern, and the names in it that match."""
    parent, pattern = os.path.split(path)
    folder = open_folder(parent)
    before, brace, rest = pattern.partition("{")
    inner, _, after = rest.partition("}")
    patterns = [before + part + after for part in inner.split(",")] if brace else [pattern]
    matches = re.compile("|".join(map(translate, patterns))).match
    return folder, sorted(name for name in folder.names() if matches(name))


def of_one_save(path: str) -> bool:
    """Return whether a path is a pattern whose files are all ranks of one save."""
    if not is_pattern(path):
        return False
    folder, names = matching(path)
    return len(names) > 1 and are_one_save(folder, names)


def read_pattern(path: str) -> tuple[FolderSource, Meshes] | None:
    """Open the files of a pattern as one checkpoint; None if they are not ranks of one save."""
    if not of_one_save(path):
        return None
    folder, names = matching(path)
    return read_files(path, folder, names)


def pattern_of(paths: Sequence[str]) -> str:
    """Return the pattern for files that are exactly the ranks of one save, or "" if they are not.

    Names alone exclude most other files; otherwise some of the files are opened.
    """
    folders = {os.path.dirname(path) for path in paths}
    names = {os.path.basename(path) for path in paths}
    if len(folders) != 1 or not 1 < len(names) == len(paths) or any(set("*?[]{},!") & set(name) for name in names):
        return ""
    folder = folders.pop()
    among = open_folder(folder).names()
    if not mates(names, names) == mates(names, among) == names:
        return ""
    pattern = os.path.join(folder, pattern_among(names, among))
    return pattern if of_one_save(pattern) else ""


def pattern_among(names: Collection[str], among: Collection[str]) -> str:
    """Return a pattern that matches exactly these names among the names in a folder."""
    start = _common(names)
    end = _common([name[len(start) :][::-1] for name in names])[::-1]
    matches = re.compile(translate(f"{start}*{end}")).match
    if all(name in names for name in among if matches(name)):
        return f"{start}*{end}"
    inner = sorted((name[len(start) : len(name) - len(end)] for name in names), key=lambda part: (len(part), part))
    return f"{start}{{{','.join(inner)}}}{end}"


def _common(texts: Collection[str]) -> str:
    alike = takewhile(lambda characters: len(set(characters)) == 1, zip(*texts))
    return "".join(characters[0] for characters in alike)
