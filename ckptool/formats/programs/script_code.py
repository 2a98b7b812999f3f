"""What the code of a TorchScript archive says, read as text: nothing of it is run, or parsed as Python.

Source: ``torch/csrc/jit/serialization/python_print.cpp`` writes it, ``import_source.cpp`` reads it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from ...base.errors import MalformedError
from ...files.zips.reader import Archive, Record

#: Bytes of code that are read, inflated: the code of real models has some hundred thousand.
_MOST: Final = 32 << 20
#: Files of code that are read: a module class has one each at the most.
_FILES: Final = 200_000

#: Classes of which something is kept, and characters of the names of their parameters and buffers: a hostile file has
#: millions of either. A module of 200,000 parameters has three million characters of names.
_CLASSES: Final = 200_000
_NAMES: Final = 16 << 20

#: The lines that matter: a class begins a line, its declarations are indented by two.
_LINE: Final = re.compile(
    r"^(?:class (?P<head>.*)|  (?P<kind>__parameters__|__buffers__) = \[(?P<names>.*)\]"
    r'|  (?:(?P<plain>[A-Za-z_]\w*) : |__annotations__\["(?P<odd>.*)"\] = )(?:Optional\[)?Tensor\]?'
    r"|  def (?P<restores>__setstate__)\(.*)$",
    re.MULTILINE,
)
_CLASS: Final = re.compile(r"([^\s(]+)\((\w+)\):")
#: Names are written as they are: python_print.cpp escapes nothing in them.
_QUOTED: Final = re.compile(r'"([^"]*)"')
_KINDS: Final = "cpu|cuda|mps|xpu|hpu|npu|mtia|xla|ipu|musa|vulkan|privateuseone|meta"
#: ``torch.device("cuda:0")``, and any other text that is a device; ``"cpu"`` alone may be anything. Torch keeps
#: the index in eight bits.
_DEVICE: Final = re.compile(rf'torch\.device\("((?:{_KINDS})(?::\d{{1,3}})?)"|"((?!cpu)(?:{_KINDS})(?::\d{{1,3}})?)"')


class ClassCode(NamedTuple):
    """A class of the program: is it a module, which of its attributes are parameters and buffers (None where its writer
    did not say, before torch 1.6), which are declared as tensors, and does code of its own restore its state?"""

    is_module: bool
    parameters: frozenset[str]
    buffers: frozenset[str] | None
    tensors: frozenset[str]
    restores: bool


class Code(NamedTuple):
    """``files`` are the names of the files of code, ``classes`` what they say by qualified name; ``devices`` how often
    each file names a device, as (file, device); ``unread`` the files that are too large to be read to their end,
    or damaged."""

    files: list[str]
    classes: dict[str, ClassCode]
    devices: Counter[tuple[str, str]]
    unread: list[str]


def devices_in(text: str) -> Counter[str]:
    """How often a text of code names which device."""
    return Counter(found[1] or found[2] for found in _DEVICE.finditer(text))


def read_code(archive: Archive, folder: str = "code/") -> Code:
    """Read the records ``code/**.py`` of an archive, bounded in number and size."""
    code = Code([], {}, Counter(), [])
    start = f"{archive.root}/{folder}" if archive.root else folder
    left, names = _MOST, _NAMES
    for record in archive.records:
        if not (record.name.startswith(start) and record.name.endswith(".py")):
            continue
        name = record.name[len(start) :]
        code.files.append(name)
        text = _text(archive, record, left) if len(code.files) <= _FILES else None
        if text is None:
            code.unread.append(name)
            continue
        left -= record.size
        code.devices.update({(name, device): number for device, number in devices_in(text).items()})
        module = name.removesuffix(".py").replace("/", ".")
        for found, said in _classes(text):
            names -= sum(map(len, (*said.parameters, *(said.buffers or ()), *said.tensors)))
            if names < 0 or len(code.classes) >= _CLASSES:
                code.unread.append(name)
                break
            code.classes[f"{module}.{found}"] = said
    return code


def _text(archive: Archive, record: Record, left: int) -> str | None:
    try:
        return archive.read(record, left).decode("utf-8", "replace")
    except MalformedError:
        return None


def _classes(text: str) -> Iterator[tuple[str, ClassCode]]:
    """The classes of a file in its order."""
    name = ""
    held: dict[str, frozenset[str]] = {}
    tensors: set[str] = set()
    is_module = restores = False
    for line in _LINE.finditer(text):
        head = line["head"]
        if head is not None:
            if name:
                yield name, _class(is_module, held, tensors, restores)
            found = _CLASS.match(head)
            name, is_module = (found[1], found[2] == "Module") if found else ("", False)
            held, tensors, restores = {}, set(), False
        elif line["kind"]:
            held[line["kind"]] = frozenset(found[1] for found in _QUOTED.finditer(line["names"]))
        elif line["restores"]:
            restores = True
        else:
            tensors.add(line["plain"] or line["odd"])
    if name:
        yield name, _class(is_module, held, tensors, restores)


def _class(is_module: bool, held: dict[str, frozenset[str]], tensors: set[str], restores: bool) -> ClassCode:
    parameters = held.get("__parameters__", frozenset())
    return ClassCode(is_module, parameters, held.get("__buffers__"), frozenset(tensors), restores)
