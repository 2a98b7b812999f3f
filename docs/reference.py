"""Source of docs/reference.md: the public names with their docstrings, and the files of their examples."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ckptool
from ckptool.base.text import join_limited

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "files"

#: The public names in the order of the page.
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Open, look, save": (
        *("open", "Checkpoint", "get", "inspect", "keys", "stats", "report", "load", "save", "save_in_place"),
    ),
    "What a checkpoint holds": ("TensorValue", "MappingView", "ListView", "ObjectValue"),
    "Check and compare": (
        *("scan", "validate", "diff", "match", "explain", "hash", "lock", "write_lock", "history", "undo"),
    ),
    "Edit names and devices": (
        *("strip_prefix", "strip_module", "strip_wrappers", "add_prefix", "add_module", "rename", "remap_devices"),
        *("remap", "edit"),
    ),
    "Edit entries and values": (
        *("extract", "wrap", "drop", "keep", "set_entry", "unset", "merge", "average", "cast", "slim", "update_config"),
    ),
    "Convert, publish, repair": ("convert", "sanitize", "redact", "repack", "salvage"),
    "Types": (
        *("DeviceMap", "Policy", "Scalar", "Change", "Saved", "Written", "Salvaged", "Lost"),
        *("StateDict", "TensorEntry", "Tensor", "CkptoolError", "errors"),
    ),
}

#: The files of the examples, by the fixtures that they are copies of.
_FILES: Final = {
    "training.pth": "ddp4_training.pth",
    "model.pth": "bare.pth",
    "other.pth": "bare.pth",
    "args.pth": "args_namespace.pth",
    "cut.pth": "truncated.pth",
    "edited.pth": "ddp4_training.pth",
}


def example_files(folder: Path) -> None:
    """Put the files of the examples into an empty folder."""
    for name, fixture in _FILES.items():
        shutil.copy(FIXTURES / fixture, folder / name)
    with ckptool.open(folder / "edited.pth") as checkpoint:
        ckptool.save_in_place(ckptool.set_entry(checkpoint, "epoch", 42), command="set")
    with ckptool.open(folder / "training.pth") as checkpoint:
        ckptool.save(ckptool.strip_prefix(checkpoint), folder / "plain.pth")
    with ckptool.open(folder / "model.pth") as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "safetensors"), folder / "model.safetensors")
    with ckptool.open(folder / "plain.pth") as checkpoint:
        shards = ckptool.convert(checkpoint, "safetensors", key="state_dict", allow_loss=["all"], max_shard_size="2KB")
        ckptool.save(shards, folder / "hub")
    (folder / "hub" / "config.json").write_text('{"n_layer": 2}', encoding="utf-8")


def reference() -> str:
    """The page: each public name with its signature, its docstring and its example."""
    parts = []
    for title, names in SECTIONS.items():
        parts += [f"## {title}", *(_entry(name) for name in names)]
    return "\n\n".join(parts)


def _entry(name: str) -> str:
    item = getattr(ckptool, name)
    own = "open" if name == "open" else getattr(item, "__name__", name)
    if own != name and inspect.isfunction(item):
        return f"### `{name}`\n\nAnother name of [`{own}`](#{own})."
    if name == "Scalar":
        return f"### `{name}`\n\nThe types of a scalar: {', '.join(f'`{kind.__name__}`' for kind in item.__args__)}."
    text = markdown(inspect.getdoc(item) or "") + _members(item)
    return f'<a id="{name}"></a>\n\n### `{name}{_signature(item)}`\n\n{text}'


def _signature(item: Any) -> str:
    """The parameters with their defaults, without types; none of what is not called."""
    if inspect.ismodule(item) or (inspect.isclass(item) and not issubclass(item, tuple)):
        return ""
    texts: list[str] = []
    for parameter in inspect.signature(item).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        texts.append(f"{parameter.name}{default}")
    return f"({', '.join(texts)})"


def _members(item: Any) -> str:
    """What a class has beside the mapping or tuple that it is."""
    if not inspect.isclass(item) or issubclass(item, tuple | Exception):
        return ""
    public = {name: value for name, value in vars(item).items() if not name.startswith("_")}
    names = [f"`{name}`" for name, value in public.items() if callable(value) or inspect.isdatadescriptor(value)]
    return f"\n\nIt has {join_limited(names, most=len(names))}." if names else ""


def markdown(doc: str) -> str:
    """A docstring as Markdown: its examples in blocks of code, its names in single backticks."""
    return "\n".join(_lines(doc))


def _lines(doc: str) -> Iterator[str]:
    code = False
    for line in doc.replace("::\n", "").splitlines():
        if line.startswith(">>>") and not code:
            yield "```pycon"
            code = True
        elif code and not line:
            yield "```"
            code = False
        yield line if code else line.replace("``", "`")
    if code:
        yield "```"
