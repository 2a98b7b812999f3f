"""The steps of a fix, done to a checkpoint. The only place that knows how a step becomes an edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..checkpoint import Checkpoint
from ..edits import add_prefix, rename_keys, strip_prefix, strip_wrappers
from ..edits.entries import drop, extract, wrap
from .comparison import Shape
from .pairing import in_order, paired
from .steps import Step, renaming
from .wanted import chosen_of, names_of

__all__ = ["apply"]


def apply(
    checkpoint: Checkpoint, steps: Sequence[Step], wanted: Mapping[str, Shape], *, key: str | None = None
) -> Checkpoint:
    """The checkpoint after the steps, in order; ``key`` is the state dict whose names they change.

    ``wanted`` are the names and shapes that "like" and "by-order" take. Raises what the edits raise: RefusedError where
    two keys would become one.
    """
    for step in steps:
        if step.option == "extract":
            # What was at ``key`` is now the whole.
            checkpoint, key = extract(checkpoint, step.value), None
        elif step.option == "wrap":
            checkpoint = wrap(checkpoint, step.value)
        elif step.option == "drop":
            checkpoint = drop(checkpoint, [step.value])
        elif step.option in ("strip-module", "strip-prefix"):
            checkpoint = strip_prefix(checkpoint, step.value or "module.", key=key)
        elif step.option == "wrappers":
            checkpoint = strip_wrappers(checkpoint, key=key)
        elif step.option == "add-prefix":
            checkpoint = add_prefix(checkpoint, step.value, key=key)
        elif step.option in ("like", "by-order"):
            names = names_of(checkpoint, chosen_of(checkpoint, key)[0])
            have = {name: value.shape for name, value in names.items()}
            pairs = in_order(have, wanted) if step.option == "by-order" else paired(have, wanted)
            checkpoint = rename_keys(checkpoint, _mapped(pairs), key=key, what=f"named as in {step.value}:")
        else:
            checkpoint = rename_keys(checkpoint, renaming(step), key=key, what=f"{step.value}:")
    return checkpoint


def _mapped(pairs: Mapping[str, str]) -> Callable[[str], str]:
    """The function of a name that ``pairs`` are; module paths, which end with a dot, follow their parameters."""
    modules: dict[str, str] = {}
    for own, other in pairs.items():
        a, b = own.split(".")[:-1], other.split(".")[:-1]
        while a and b:
            before = modules.setdefault(".".join(a) + ".", ".".join(b) + ".")
            if a[-1] != b[-1] or before != ".".join(b) + ".":
                break
            a, b = a[:-1], b[:-1]

    def rename(name: str) -> str:
        return modules.get(name, name) if name.endswith(".") else pairs.get(name, name)

    return rename
