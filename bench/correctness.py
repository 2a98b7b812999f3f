"""Check with torch that an edited checkpoint holds what it should; exits 1 with a sentence if not.

`python bench/correctness.py strip|remap|cast|five INPUT OUTPUT`. Everything is read through mmap, one tensor at a time.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from files import PREFIX, TAG

if TYPE_CHECKING:
    pass


def _load(path: str) -> tuple[dict[str, Any], set[str]]:
    """The state dict and the location tags that its storages have in the file."""
    import torch

    tags: set[str] = set()

    def keep_on_cpu(storage: Any, tag: str) -> Any:
        tags.add(tag)
        return storage

    state: dict[str, Any] = torch.load(path, map_location=keep_on_cpu, mmap=True)
    return state, tags


def check(edit: str, source: str, output: str) -> str:
    """What is wrong with `output`, as a sentence; empty if nothing is."""
    import torch
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present as strip

    expected, _ = _load(source)
    found, tags = _load(output)
    if edit == "strip":
        strip(expected, PREFIX)  # torch's own idea of the job, `_metadata` included
    if edit == "cast":
        for name, tensor in expected.items():
            expected[name] = tensor.to(torch.bfloat16)
    if edit == "five":
        strip(expected, PREFIX)
        found = found["state_dict"]
        named = {f"model.net.{name}": tensor for name, tensor in expected.items()}
        if list(found) != list(named) or any(not torch.equal(found[name], named[name]) for name in named):
            return "the five edits did not do what they say"
        return "" if tags == {"cpu"} else "the tags are not those of the five edits"
    wanted_tags = {"cpu"} if edit == "remap" else {TAG}
    if list(found) != list(expected):
        return "the keys, or their order, are not the expected ones"
    if tags != wanted_tags:
        return f"the location tags are {sorted(tags)}, not {sorted(wanted_tags)}"
    if getattr(found, "_metadata", None) != getattr(expected, "_metadata", None):
        return "_metadata is not as expected"
    for name, tensor in expected.items():
        if tensor.dtype != found[name].dtype or not torch.equal(tensor, found[name]):
            return f"the tensor {name} differs"
    return ""


if __name__ == "__main__":
    sys.exit(check(*sys.argv[1:]) or 0)
