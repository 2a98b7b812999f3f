"""Fit the top level of a checkpoint for its reader: nest it under a key, drop training-only entries, or add some."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, Literal

from ..base.errors import TargetError
from ..base.lazy import regex
from ..base.patterns import escaped
from ..base.steps import NextStep, Step, command, suggested_output
from ..base.text import human_bytes, join_limited, quoted
from ..checkpoint.accounting import account
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import mapping
from ..formats.opening import takes_path
from ..pickles.nodes import Dict
from .averages import EMA, averages_within
from .entries import Scalar, drop, drop_entries, set_entry

Purpose = Literal["inference", "lightning"]

#: Top-level entries that only training needs, each with a name for reports.
_TRAINING: Final = (
    ("optimizer", regex(r"(?:\A|[_\-. ])[Oo]pt(?:im(?:i[sz]er)?)?s?(?=[_\-. A-Z0-9]|\Z)")),
    ("scheduler", regex(r"(?:\A|_)(?:lr_?)?sched(?:uler)?s?(?=_|\d*\Z)|\Alr_.*sched", re.I)),
    ("EMA", EMA),
    ("gradient scaler", regex(r"\A(?:(?:grad_?|amp_?|loss_?)?scaler(?=_|\Z)|amp(?=_state|\Z))", re.I)),
)
#: The entries that Lightning's ``load_from_checkpoint`` reads besides ``state_dict``, with values for a file that lacks
#: them. Lightning would migrate a file of an older version.
LIGHTNING: Final[Mapping[str, Scalar]] = {"pytorch-lightning_version": "2.0.0", "epoch": 0, "global_step": 0}


@takes_path
def wrap(checkpoint: Checkpoint, key: str = "", *, purpose: Purpose | None = None) -> Checkpoint:
    """Put the whole checkpoint under ``key`` in a new dict: the reverse of ``extract``.

    ``purpose`` "lightning" adds the entries that Lightning reads, and puts a bare state dict under "state_dict".

    >>> list(ckptool.wrap("model.pth", "state_dict"))
    ['state_dict']
    >>> list(ckptool.wrap("model.pth", purpose="lightning"))
    ['state_dict', 'pytorch-lightning_version', 'epoch', 'global_step']
    """
    if key:
        editor = GraphEditor(checkpoint.graph)
        root = editor.add(Dict([editor.add(key), checkpoint.graph.root]))
        checkpoint = checkpoint.changed(editor.done(root), [Change("wrap", "", 1, 0, f"wrapped as {quoted(key)}")])
    elif purpose is None:
        raise TargetError("the key to wrap it in is missing", path=checkpoint.path, next="for example 'state_dict'")
    return checkpoint if purpose is None else fit_for(checkpoint, purpose)


def fit_for(checkpoint: Checkpoint, purpose: str) -> Checkpoint:
    """Fit the top-level entries for a purpose; raise TargetError if it is unknown, or if that cannot be done."""
    if purpose not in _PURPOSES:
        step = "`--for inference` or `--for lightning`"
        raise TargetError(f"{purpose!r} is not a known purpose", next=step)
    return _PURPOSES[purpose](checkpoint)


def _for_inference(checkpoint: Checkpoint) -> Checkpoint:
    """Drop the top-level entries that only training needs; the last state dict always stays."""
    survey = checkpoint.survey
    causes: dict[str, str] = {}
    items = mapping(checkpoint.graph, checkpoint.graph.root) or []
    for bare in survey.state_dicts:
        if bare.path == "":  # every key of a bare state dict is a parameter, whatever its name
            items = [item for item in items if item not in set(bare.items)]
    for key, _ in items:
        name = checkpoint.graph.nodes[key]
        if isinstance(name, str) and (cause := next((word for word, form in _TRAINING if form.search(name)), "")):
            causes[name] = cause
    weights = {entry.top for entry in survey.tensors if entry.state_dict >= 0}
    entries = survey.entries
    if weights and all(entries[number].key in causes for number in weights):
        # Keep the average: no other weights are left.
        causes = {name: cause for name, cause in causes.items() if cause != "EMA"}
    changes = []
    sizes = account(survey).entry_bytes
    for cause in dict.fromkeys(causes.values()):
        names = [name for name, other in causes.items() if other == cause]
        size = sum(size for entry, size in zip(entries, sizes) if entry.key in names)
        notes = (_average_step(checkpoint),) if cause == "EMA" else ()
        summary = f"{cause} dropped: {join_limited(names)}, {human_bytes(size)}"
        changes.append(Change("drop", "", len(names), 0, summary, notes))
    averaged = [(item.path, prefix) for item in checkpoint.state_dicts for prefix in averages_within(checkpoint, item)]
    if not changes and not averaged:
        return checkpoint.changed(checkpoint.graph, [Change("drop", "", 0, 0, "no training-only entries")])
    checkpoint = drop_entries(checkpoint, causes, changes) if changes else checkpoint
    for path, prefix in averaged:
        checkpoint = drop(checkpoint, f"{escaped(prefix)}*", key=path or ".")
    return checkpoint


def _average_step(checkpoint: Checkpoint) -> NextStep:
    output = suggested_output(checkpoint.path, "ema")
    step = command("edit", checkpoint.path, output=output, steps=(Step("use_ema"),))
    return "the weights without the average stay; to take the average instead: " + step


def _for_lightning(checkpoint: Checkpoint) -> Checkpoint:
    """Add the entries that Lightning reads; a bare state dict becomes the entry ``state_dict``."""
    names = [checkpoint.graph.nodes[name] for name, _ in mapping(checkpoint.graph, checkpoint.graph.root) or []]
    if "state_dict" not in names:
        places = [item.path for item in checkpoint.state_dicts]
        if "" not in places:
            listed = join_limited([repr(place) for place in places])
            message = "Lightning reads the weights from the entry 'state_dict', and "
            message += f"they are in {listed}" if places else "there are none"
            step = command("explain", "KeyError: 'state_dict'", checkpoint.path) if places else ""
            raise TargetError(message, path=checkpoint.path, next=step)
        checkpoint = wrap(checkpoint, "state_dict")
    for name, value in LIGHTNING.items():
        if name not in names:
            checkpoint = set_entry(checkpoint, name, value)
    return checkpoint


_PURPOSES: Final[Mapping[str, Callable[[Checkpoint], Checkpoint]]] = {
    "inference": _for_inference,
    "lightning": _for_lightning,
}
