"""Fit a checkpoint for its reader: with averaged weights (EMA, SWA) under the names of the model, nested under a key,
without training-only entries, or with those that Lightning reads.

Averages are another state dict (timm, Lightning's callbacks), keys under a prefix in the model's own state dict (LitEma
of Stable Diffusion: ldm/modules/ema.py), or the whole file (torch.optim.swa_utils.AveragedModel).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, Literal

from ..base.errors import RefusedError, TargetError
from ..base.globs import escaped
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.steps import AnyStep, Step, command, option, suggested_output, tree_step
from ..base.text import human_bytes, join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import mapping, values_of
from ..checkpoint.selection import selected
from ..checkpoint.survey import StateDict, account
from ..formats.opening import takes_path
from ..pickles.nodes import Dict, Ref
from .entries import Scalar, drop, drop_entries, set_entry, unset
from .keys import strip_prefix

#: Names of entries and modules that hold averages.
EMA: Final = regex(r"(?:\A|[_\-.])ema(?=[_\-.\d]|\Z)", re.I)
_AVERAGES: Final = regex(r"(?:^|[._\"])(?:ema|swa|avg|averaged)(?:[._\"]|$)", re.IGNORECASE)
#: The counters of an average, beside its tensors.
_COUNTERS: Final = frozenset(("decay", "num_updates", "n_averaged", "initted", "step"))


class _Source(NamedTuple):
    """An average: the path of its state dict, the prefix of its keys there ("" for all), and its values by name."""

    path: str
    prefix: str
    values: Mapping[str, Ref]


def is_average(path: str) -> bool:
    """Return whether a path names averaged weights."""
    return bool(_AVERAGES.search(path))


def averages_within(checkpoint: Checkpoint, item: StateDict) -> Iterator[str]:
    """Yield the prefixes under which a state dict also holds the average of its weights, such as ``model_ema.``."""
    names = [str(checkpoint.graph.nodes[key]) for key, _ in item.items]
    heads = {name.partition(".")[0] for name in names if "." in name}
    averages = [head for head in heads if EMA.search(head)]
    own = [name for name in names if name.partition(".")[0] not in averages]
    bare = {each.replace(".", "") for name in own for each in (name, name.partition(".")[2])}
    for head in averages:
        rest = {name.partition(".")[2] for name in names if name.startswith(f"{head}.")} - _COUNTERS
        if rest and {name.replace(".", "") for name in rest} <= bare:
            yield f"{head}."


@takes_path
def use_ema(checkpoint: Checkpoint, *, key: str | None = None) -> Checkpoint:
    """Give a model its averaged weights, under its own names, and remove the average.

    Tensors that the average lacks, such as buffers, stay. ``key`` is the path of the model's state dict. Raise
    RefusedError if there is no average, or it is not clear which model or which names it belongs to.
    """
    sources = list(_sources(checkpoint))
    apart = {source.path for source in sources if not source.prefix}
    models = [item for item in selected(checkpoint, key) if item.path not in apart]
    pairs = [
        (model, source, names)
        for model in models
        for source in sources
        if (not source.prefix or source.path == model.path) and (names := _names_for(checkpoint, model, source))
    ]
    for model, source, _ in pairs:
        if sum(other.path == model.path or each == source for other, each, _ in pairs) > 1:
            step = f"name the model with {option('key', model.path or '.')}, or drop the other average first"
            what = f"there are several: {join_limited([_where(each) for _, each, _ in pairs])}"
            raise RefusedError(what, path=checkpoint.path, next=step)
    if not pairs and not models and len(sources) == 1:
        return _alone(checkpoint, sources[0])
    if not pairs:
        what, hint = _nothing(checkpoint, sources)
        raise RefusedError(what, path=checkpoint.path, next=hint)
    editor, changes, nodes = GraphEditor(checkpoint.graph), [], checkpoint.graph.nodes
    for model, source, names in pairs:
        items = mapping(checkpoint.graph, model.ref) or []
        new = [(name, source.values[names[str(nodes[name])]] if nodes[name] in names else old) for name, old in items]
        editor.refill(model.ref, new)
        stay = [str(nodes[name]) for name, _ in model.items if nodes[name] not in names]
        stay = [name for name in stay if not source.prefix or not name.startswith(source.prefix)]
        notes = (f"without an average, and unchanged: {join_limited(stay, most=3)}",) if stay else ()
        what = f"{pluralize(len(names), 'tensor')} taken from {_where(source)}"
        changes.append(Change("use-ema", model.path, len(names), len(stay), what, notes))
    checkpoint = checkpoint.changed(editor.done(), changes)
    for _, source, _ in pairs:
        prefix, path = source.prefix, source.path
        checkpoint = drop(checkpoint, f"{escaped(prefix)}*", key=path or ".") if prefix else unset(checkpoint, path)
    return checkpoint


def _where(source: _Source) -> str:
    return f"{source.prefix}*" if source.prefix else source.path or "the whole file"


def _sources(checkpoint: Checkpoint) -> Iterator[_Source]:
    """Yield the averages: state dicts whose path or counter says so, and parts of other state dicts."""
    nodes, reader = checkpoint.graph.nodes, checkpoint.survey.reader
    for item in checkpoint.state_dicts:
        values = {str(nodes[key]): ref for key, ref in item.items if reader.tensor(ref) is not None}
        tensors = {name: ref for name, ref in values.items() if name not in _COUNTERS}
        if is_average(item.path) or "n_averaged" in values:
            if tensors:
                yield _Source(item.path, "", tensors)
            continue
        for prefix in averages_within(checkpoint, item):
            inside = {name: ref for name, ref in tensors.items() if name.startswith(prefix)}
            yield _Source(item.path, prefix, {n: ref for n, ref in inside.items() if n[len(prefix) :] not in _COUNTERS})


def _names_for(checkpoint: Checkpoint, model: StateDict, source: _Source) -> dict[str, str]:
    """Return the names of the average by the names of the model; {} if they are not the same model.

    The names are equal, except that one may lack a first module (``model.``, ``module.``), or all dots. Raise
    RefusedError if they can be paired in several ways, or a shape differs.
    """
    nodes, reader = checkpoint.graph.nodes, checkpoint.survey.reader
    own = {str(nodes[key]): ref for key, ref in model.items}
    own = {name: ref for name, ref in own.items() if not source.prefix or not name.startswith(source.prefix)}
    heads = dict.fromkeys(["", *(name.partition(".")[0] + "." for name in own if "." in name)])
    first = next(iter(source.values), source.prefix)[len(source.prefix) :].partition(".")[0] + "."
    starts = [source.prefix, source.prefix + first]
    # Names without dots may stand for any name that differs from them only in dots.
    dotted = any("." in name[len(source.prefix) :] for name in source.values)
    for spelled in _SPELLINGS if dotted else (_without_dots,):
        found: list[dict[str, str]] = []
        for start in starts:
            theirs = {spelled(name[len(start) :]): name for name in source.values if name.startswith(start)}
            for head in heads if len(theirs) == len(source.values) else ():
                ours = [(spelled(name[len(head) :]), name) for name in own if name.startswith(head)]
                pairs = {name: theirs[short] for short, name in ours if short in theirs}
                if {*pairs.values()} == {*theirs.values()} and pairs not in found:
                    found.append(pairs)
        if len(found) > 1 or any(len({*pairs.values()}) < len(pairs) for pairs in found):
            what = f"the names of {_where(source)} could stand for several names of the model"
            raise RefusedError(what, path=checkpoint.path)
        for name, other in found[0].items() if found else ():
            tensors = reader.tensor(own[name]), reader.tensor(source.values[other])
            if len({None if tensor is None else tensor.shape for tensor in tensors}) > 1:
                raise RefusedError(f"{quoted(name)} and {quoted(other)} differ in shape", path=checkpoint.path)
        if found:
            return found[0]
    return {}


def _without_dots(name: str) -> str:
    return name.replace(".", "")


_SPELLINGS: Final[tuple[Callable[[str], str], ...]] = (str, _without_dots)


def _alone(checkpoint: Checkpoint, source: _Source) -> Checkpoint:
    """Give the only weights, which are an average, the names of the model: without counters and ``module.``."""
    item = next(each for each in checkpoint.state_dicts if each.path == source.path)
    counters = sorted(_COUNTERS.intersection(str(checkpoint.graph.nodes[key]) for key, _ in item.items))
    key = source.path or "."
    note = Change("use-ema", source.path, 0, len(source.values), "all weights are an average")
    checkpoint = checkpoint.changed(checkpoint.graph, [note])
    checkpoint = drop(checkpoint, counters, key=key) if counters else checkpoint
    wrapped = all(name.startswith("module.") for name in source.values)
    return strip_prefix(checkpoint, "module.", key=key) if wrapped else checkpoint


def _nothing(checkpoint: Checkpoint, sources: Collection[_Source]) -> tuple[str, AnyStep]:
    if sources:
        names = join_limited([_where(source) for source in sources])
        return f"no model in it has the names of the average ({names})", command("keys", checkpoint.path)
    if "averaging_state" in values_of(checkpoint.graph, checkpoint.graph.root):
        return "state_dict holds the averaged weights already (WeightAveraging of Lightning)", ""
    if checkpoint.survey.modules:
        steps, output = (
            (Step("sanitize"), Step("as_state_dict"), Step("use_ema")),
            suggested_output(checkpoint.path, "ema"),
        )
        return "its models are pickled modules", command("edit", checkpoint.path, steps=steps, output=output)
    return "it holds no averaged weights that ckptool can tell by name", tree_step(checkpoint.path)


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
    if purpose not in ("inference", "lightning"):
        raise TargetError(f"{purpose!r} is not a known purpose", next="`--for inference` or `--for lightning`")
    return _for_inference(checkpoint) if purpose == "inference" else _for_lightning(checkpoint)


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
    step = command("edit", checkpoint.path, output=suggested_output(checkpoint.path, "ema"), steps=(Step("use_ema"),))
    average: AnyStep = "the weights without the average stay; to take the average instead: " + step
    for cause in dict.fromkeys(causes.values()):
        names = [name for name, other in causes.items() if other == cause]
        size = sum(size for entry, size in zip(entries, sizes) if entry.key in names)
        notes = (average,) if cause == "EMA" else ()
        summary = f"{cause} dropped: {join_limited(names)}, {human_bytes(size)}"
        changes.append(Change("drop", "", len(names), 0, summary, notes))
    averaged = [(item.path, prefix) for item in checkpoint.state_dicts for prefix in averages_within(checkpoint, item)]
    if not changes and not averaged:
        return checkpoint.changed(checkpoint.graph, [Change("drop", "", 0, 0, "no training-only entries")])
    checkpoint = drop_entries(checkpoint, causes, changes) if changes else checkpoint
    for path, prefix in averaged:
        checkpoint = drop(checkpoint, f"{escaped(prefix)}*", key=path or ".")
    return checkpoint


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
