"""Source of docs/reference.md: the public names with their docstrings, and the files that their examples use."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Final

from tabulate import tabulate

import ckptool

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures" / "files"

#: The public names by section, in the order of the page.
SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Open, look, save": (
        *("open", "Checkpoint", "get", "inspect", "keys", "stats", "report", "load", "save", "save_in_place"),
    ),
    "What a checkpoint holds": ("TensorValue", "MappingView", "ListView", "ObjectValue"),
    "Check and compare": (
        *("scan", "validate", "diff", "match", "explain", "hash", "lock", "write_lock", "history", "undo"),
    ),
    "Edit names and devices": (*("strip_module", "strip_wrappers", "add_module", "rename", "remap", "edit"),),
    "Edit entries and values": (
        *(
            "extract",
            "wrap",
            "drop",
            "keep",
            "set",
            "merge",
            "average",
            "merge_lora",
            "extract_lora",
            "resize_lora",
            "convert_lora",
            "cast",
            "dequantize",
            "resize",
            "slim",
        ),
        "update_config",
    ),
    "Convert, publish, repair": ("convert", "sanitize", "redact", "repack", "salvage"),
    "Types": (
        *("DeviceMap", "Policy", "Scalar", "Change", "Saved", "Written", "Salvaged", "SalvagedState", "Lost"),
        *("StateDict", "TensorEntry", "Tensor", "CkptoolError", "errors"),
    ),
}

#: Files that the examples use, and the fixtures that they are copied from.
_FILES: Final = {
    "training.pth": "ddp4_training.pth",
    "model.pth": "bare.pth",
    "other.pth": "bare.pth",
    "args.pth": "args_namespace.pth",
    "cut.pth": "truncated.pth",
    "edited.pth": "ddp4_training.pth",
}


def example_files(folder: Path) -> None:
    """Create the files that the examples use in an empty folder."""
    for name, fixture in _FILES.items():
        shutil.copy(FIXTURES / fixture, folder / name)
    with ckptool.open(folder / "edited.pth") as checkpoint:
        ckptool.save_in_place(ckptool.set(checkpoint, "epoch", 42), command="set")
    with ckptool.open(folder / "training.pth") as checkpoint:
        ckptool.save(ckptool.strip_module(checkpoint), folder / "plain.pth")
    with ckptool.open(folder / "model.pth") as checkpoint:
        ckptool.save(ckptool.convert(checkpoint, "safetensors"), folder / "model.safetensors")
    with ckptool.open(folder / "plain.pth") as checkpoint:
        shards = ckptool.convert(checkpoint, "safetensors", key="state_dict", allow_loss=["all"], max_shard_size="2KB")
        ckptool.save(shards, folder / "hub")
    _adapter(folder / "adapter")
    (folder / "hub" / "config.json").write_text('{"n_layer": 2}', encoding="utf-8")


def _adapter(folder: Path) -> None:
    """Write a LoRA adapter for model.pth, and beside it a quantized model."""
    import torch  # only the examples need it
    from safetensors.torch import save_file

    codes = {"fc.weight": torch.ones(2, 4, dtype=torch.int8), "fc.SCB": torch.ones(2), "norm.weight": torch.ones(4)}
    torch.save(codes, folder.parent / "quantized.pth")
    folder.mkdir()
    shapes = {"lora_A": (1, 4), "lora_B": (2, 1)}
    factors = {f"base_model.model.fc.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    save_file(factors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": "model.pth"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def reference() -> str:
    """Return the page: a table of names and summaries per section. On the site, the docstrings follow."""
    return "\n\n".join(_section(title, names) for title, names in SECTIONS.items())


def _section(title: str, names: tuple[str, ...]) -> str:
    table = tabulate(
        [(f"`{name}`", summary(name)) for name in names], headers=("name", "what it is"), tablefmt="github"
    )
    entries = "\n".join(_directive(name) for name in names if name not in ("Scalar", "SalvagedState"))
    return f"## {title}\n\n{table}\n\n<!-- site\n```{{eval-rst}}\n{entries}\n```\n-->"


def summary(name: str) -> str:
    """Return the first sentence of a public name's docstring, as Markdown."""
    item = getattr(ckptool, name)
    if name == "Scalar":
        return f"The types of a scalar: {', '.join(kind.__name__ for kind in item.__args__)}."
    own = getattr(item, "__name__", name)
    if own not in (name, "open_checkpoint") and inspect.isfunction(item):
        return f"Another name of `{own}`."
    first = re.split(r"(?<=\.)\s", inspect.getdoc(item) or "", maxsplit=1)[0]
    return " ".join(first.split()).replace("``", "`")


def _directive(name: str) -> str:
    item = getattr(ckptool, name)
    if inspect.isfunction(item):
        return f".. autofunction:: ckptool.{name}"
    if inspect.ismodule(item):
        return f".. automodule:: ckptool.{name}\n   :members:"
    # The signature and the docstring of a tuple already describe its fields.
    members = "" if issubclass(item, tuple) else "\n   :members:"
    return f".. autoclass:: ckptool.{name}{members}"
