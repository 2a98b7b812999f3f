"""The target of a match: names, shapes and dtypes from a checkpoint, a lock file, a model or a mapping."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Any, TypeAlias

from ...base.errors import MalformedError, RefusedError, TargetError
from ...base.globs import MATCH_ALL, Globs
from ...base.limits import LIMITS
from ...base.records import NamedTuple
from ...base.steps import command, tree_step
from ...base.text import join_limited, pluralize
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.objects import class_name, list_items, mapping
from ...checkpoint.paths import parse_steps
from ...checkpoint.selection import follow, normal_path, only_one, selected
from ...checkpoint.sharding import sharding
from ...checkpoint.survey import StateDict
from ...files.archives import open_any, read_bytes
from ...formats.opening import in_several_files, open_checkpoint
from ...formats.rank_part import Part, part_of
from ...values.torch.loads import model_state
from ..keys import by_table
from ..optimizers import optimizers, tied_keys
from .pairing import Pairing, Shape, Spec, pair_in_order, pair_names
from .state_dict_errors import StateDictError, counters_left_out, prefix_between, read_error
from .values import Values, common_precision

_SCHEMA = "ckptool.lock/1"


#: The number of parameters in each group, by the path of the optimizer.
GroupSizes: TypeAlias = Mapping[str, tuple[int, ...]]


class MatchTarget(NamedTuple):
    """A state dict that another one should fit; ``path`` is its place in its file ("" for the whole file).

    ``source`` is the file or the callable; ``kind`` is "checkpoint", "lock", "model", "error" or "names". ``others``
    are the paths of other state dicts in the file. ``tied`` maps second names of tensors to the first. ``in_order``
    says that the names are in the order of the model, unlike safetensors, for example, which sorts by dtype and name.
    ``groups`` are the parameter group sizes of optimizers in the same file. ``values`` gives a few rows of each tensor;
    None if only names and shapes are known. ``part`` describes the larger checkpoint if the file is one part of it,
    otherwise None.
    """

    source: str
    kind: str
    path: str
    tensors: Mapping[str, Spec]
    others: tuple[str, ...] = ()
    tied: Mapping[str, str] = MappingProxyType({})
    in_order: bool = True
    groups: GroupSizes = MappingProxyType({})
    values: Values | None = None
    part: Part | None = None

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of its values by name."""
        return {name: spec.shape for name, spec in self.tensors.items()}


def match_target(
    target: Any, model: str | None = None, key: str | None = None, *, preferred: str | None = None
) -> MatchTarget:
    """Return the target for a path, a model, or a mapping of names to tensors.

    ``model`` names a callable that is imported and run instead. ``key`` chooses among the state dicts in a file;
    ``preferred`` is the path of one to take if it exists. Raise TargetError if there is nothing to match with.
    """
    if (target is None) == (model is None):
        raise TargetError("match takes a target or a model, one of them", next="name a file, or `--model=`")
    if model is None and isinstance(target, str | os.PathLike):
        name = os.fspath(target)
        if _is_lock(name):
            return _target_in_lock(name, key, preferred)
        with open_checkpoint(name) as checkpoint:
            found = target_in_checkpoint(checkpoint, key, preferred=preferred)
        return found._replace(values=Values(name, found.path))
    if isinstance(target, Checkpoint):
        return target_in_checkpoint(target, key, preferred=preferred)
    if key is not None:
        raise TargetError("another key goes with a file: a model has one state dict")
    if model is not None:
        return _target_of_names(model_state(model), model, "model")
    state = target.state_dict() if hasattr(target, "state_dict") else target
    if not isinstance(state, Mapping):
        raise TargetError(f"a {type(target).__name__} is not a path, a model or a mapping")
    return _target_of_names(state, type(target).__name__, "names")


def target_in_error(checkpoint: Checkpoint, text: str, source: str) -> MatchTarget:
    """Return the model that refused a checkpoint, as far as the message of ``load_state_dict`` describes it.

    That is its keys, and the shapes of the keys that it shares with the checkpoint. Raise TargetError if the text has
    no such message, or one about another checkpoint.
    """
    error = read_error(text)
    if error is None:
        what = "there is no message of load_state_dict in it: Missing key(s), Unexpected key(s) or size mismatch"
        raise TargetError(what, path=source)
    dicts = [(item.path, specs_of(checkpoint, item)) for item in checkpoint.state_dicts]
    error = error.with_keys_of(name for _, specs in dicts for name in specs)
    given = {*error.unexpected, *(item.key for item in error.mismatched)}
    if given and not any(given & specs.keys() for _, specs in dicts):
        prefix = next((found for _, specs in dicts if (found := prefix_between(given, specs))), "")
        # If the keys lack the same words once more, the model wants none of them.
        wanted_keys = error.missing if prefix and prefix_between(error.missing, error.unexpected) == prefix else ()
        error, given = error.with_prefix(prefix), {prefix + key for key in given}
        error = error._replace(missing=wanted_keys or error.missing)
    # If the model was given a dict around the state dict, it has none of the dict's keys.
    around = not any(given <= specs.keys() for _, specs in dicts) and given <= _keys_around(checkpoint)
    place, have = next(
        ((path, specs) for path, specs in dicts if not _contradicted(error, specs)), ("", dict[str, Spec]())
    )
    if not have and not around:
        _, specs = max(dicts, key=lambda item: len(given & item[1].keys()), default=("", dict[str, Spec]()))
        odd = join_limited(_contradicted(error, specs), most=3)
        what = f"the message is about another checkpoint: what it says of {odd} is not so in this one"
        raise TargetError(what, path=checkpoint.path)
    if error.cut and (error.missing or error.unexpected):
        what = "the message names only some of the keys: its lists end with '...'"
        raise TargetError(what, path=source, next="give the whole message, or match the file with one of the model")
    wanted = {name: spec for name, spec in have.items() if name not in error.unexpected}
    wanted |= {item.key: wanted[item.key]._replace(shape=item.wanted) for item in error.mismatched}
    inside = () if have else max((specs for _, specs in dicts), key=len, default={})
    wanted |= {name: Spec(None, "") for name in (*error.missing, *counters_left_out(error, inside))}
    return MatchTarget(source, "error", place, wanted, in_order=False)


def _keys_around(checkpoint: Checkpoint) -> set[str]:
    graph, keys = checkpoint.graph, set[str]()
    for item in checkpoint.state_dicts:
        try:
            steps = parse_steps(item.path)
        except TargetError:
            continue  # the path is too long to be spelled
        for end in range(len(steps)):
            place = follow(graph, steps[:end])
            entries = mapping(graph, place.ref) if place is not None else None
            keys.update(str(graph.nodes[key]) for key, _ in entries or ())
    return keys


def _contradicted(error: StateDictError, specs: Mapping[str, Spec]) -> list[str]:
    """Return the keys of a message that a state dict lacks, or has in another shape, or that are not missing in it."""
    keys = [key for key in error.unexpected if key not in specs] + [key for key in error.missing if key in specs]
    saved = {item.key: (None, item.saved) for item in error.mismatched}
    return keys + [key for key, shapes in saved.items() if key not in specs or specs[key].shape not in shapes]


def comparable(target: MatchTarget, specs: Iterable[Spec]) -> MatchTarget:
    """Return the target with values in a dtype in which they can be compared with tensors of these specs."""
    if target.values is None:
        return target
    rounding = common_precision(*({spec.dtype for spec in side} for side in (specs, target.tensors.values())))
    return target._replace(values=target.values.rounded(rounding))


def candidate_dicts(checkpoint: Checkpoint, key: str | None) -> list[StateDict]:
    """Return the state dict at ``key``, or all of high confidence, or all others; raise TargetError without any."""
    candidates = selected(checkpoint, key) or checkpoint.state_dicts
    if not candidates:
        if modules := checkpoint.survey.modules:
            message = f"it holds a pickled module at {modules[0] or 'the root'}, not a state dict"
            from ..sanitize.sanitizer import loadable_step  # imported only for files with a module

            raise TargetError(message, path=checkpoint.path, next=loadable_step(checkpoint))
        part = part_of(checkpoint)
        step = command("inspect", part.folder) if part and part.folder else tree_step(checkpoint.path)
        message = "there is no state dict in it" + (f": {part.message}" if part else "")
        raise TargetError(message, path=checkpoint.path, next=step)
    return candidates


def specs_of(checkpoint: Checkpoint, state_dict: StateDict) -> dict[str, Spec]:
    """Return the spec of every value in a state dict, tensor or not, in order."""
    graph, reader = checkpoint.graph, checkpoint.survey.reader
    specs = {}
    for key, value in state_dict.items:
        tensor = reader.tensor(value)
        if tensor is None:
            spec = Spec(None, class_name(graph, value))
        else:
            how = sharding(reader, value, tensor)
            part = how.slices(tensor.shape) or how.here if how is not None and not how.is_whole(tensor.shape) else ""
            shapeless = tensor.kind in ("unknown", "nested", "jagged")  # torch does not read it from the pickle
            spec = Spec(None if shapeless else tensor.shape, tensor.dtype, part)
        specs[str(graph.nodes[key])] = spec
    return specs


def target_in_checkpoint(
    checkpoint: Checkpoint, key: str | None = None, *, preferred: str | None = None
) -> MatchTarget:
    """Return the state dict at ``key``, else at ``preferred``, else the largest one; raise TargetError without any."""
    candidates = candidate_dicts(checkpoint, key)
    place = normal_path(preferred) if preferred is not None else None
    best = max(candidates, key=lambda item: (item.path == place, len(item.items)))
    others = tuple(item.path for item in candidates if item is not best)
    specs = specs_of(checkpoint, best)
    tensors = {name for name, spec in specs.items() if spec.shape is not None and 0 not in spec.shape}
    same = tied_keys(checkpoint, best).items()
    tied = {name: names[0] for name, names in same if name != names[0] and name in tensors}
    in_order = checkpoint.container.keeps_order
    groups = group_sizes(checkpoint)
    values, part = Values(checkpoint, best.path), part_of(checkpoint)
    return MatchTarget(checkpoint.path, "checkpoint", best.path, specs, others, tied, in_order, groups, values, part)


def _target_of_names(values: Mapping[str, Any], source: str, kind: str) -> MatchTarget:
    """Return a mapping of names to tensors or specs as a target; raise TargetError if a name is not a string."""
    specs: dict[str, Spec] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise TargetError(f"its key {name!r} is not a string", path=source)
        if isinstance(value, Spec):
            specs[name] = value
            continue
        dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        try:
            shape: Shape = tuple(int(size) for size in value.shape)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            # Either not a tensor, or a parameter of a lazy module, which has no shape yet.
            shape = None
        specs[name] = Spec(shape, dtype)
    return MatchTarget(source, kind, "", specs)


def _is_lock(path: str) -> bool:
    """Return whether a file begins like JSON, as no checkpoint does."""
    if in_several_files(path):
        return False
    with closing(open_any(path)) as source:
        return source.read(0, min(source.size, 256)).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _target_in_lock(path: str, key: str | None, preferred: str | None) -> MatchTarget:
    import json

    try:
        document = json.loads(read_bytes(path, LIMITS.pickle_bytes).decode("utf-8-sig"))
        if document["schema"] != _SCHEMA:
            raise KeyError(document["schema"])
        places = {
            "" if place == "." else place: {name: _spec_in_lock(entry) for name, entry in entries.items()}
            for place, entries in document["state_dicts"].items()
        }
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        step = f"make one with '{command('lock', 'CHECKPOINT', output='LOCK').line}'"
        raise MalformedError("it begins like JSON, and is not a lock file", path=path, next=step) from error
    named = key if key is not None else preferred
    place = normal_path(named) if named is not None else None
    if not places or (key is not None and place not in places):
        there = join_limited([repr(name or ".") for name in places]) or "none"
        raise TargetError(f"no state dict at {key or '.'!r}; there is {there}", path=path)
    best = max(places, key=lambda name: (name == place, len(places[name])))
    others = tuple(name for name in places if name != best) if key is None else ()
    return MatchTarget(path, "lock", best, places[best], others)


def _spec_in_lock(entry: Mapping[str, Any]) -> Spec:
    """Return the spec of an entry; raise ValueError, KeyError or TypeError for one that no lock has."""
    if "shape" not in entry:
        return Spec(None, str(entry["type"]))
    if not isinstance(entry["dtype"], str) or not all(type(size) is int and size >= 0 for size in entry["shape"]):
        raise ValueError(entry)
    return Spec(tuple(entry["shape"]), entry["dtype"])


def rename_like(
    checkpoint: Checkpoint,
    target: MatchTarget,
    *,
    by_order: bool = False,
    key: str | None = None,
    only: Globs = MATCH_ALL,
) -> Checkpoint:
    """Give a checkpoint the names of a target: only names that surely correspond, or all in order with ``by_order``.

    Names surely correspond if they agree apart from a prefix, or if a few rows of both tensors are equal. Raise
    TargetError for several state dicts without ``key``, RefusedError if no name has a certain partner, or if the shapes
    differ by order.
    """
    candidates = candidate_dicts(checkpoint, key)
    own = only_one(checkpoint, candidates)
    wanted, source = target.shapes, target.source
    specs = specs_of(checkpoint, own)
    have = {name: spec.shape for name, spec in specs.items()}
    if by_order and None not in wanted.values():
        # If the target has tensors only, other values have no place in the order.
        have = {name: shape for name, shape in have.items() if shape is not None}
    target = comparable(target, specs.values())
    rounding = target.values.rounding if target.values is not None else ""
    pairing = Pairing(Values(checkpoint, candidates[0].path, rounding), target.values)
    try:
        table = pair_in_order(have, wanted) if by_order else pair_names(have, wanted, pairing)
    except RefusedError as error:
        step = command("match", checkpoint.path, source)
        raise RefusedError(f"by order {error.what}", path=checkpoint.path, next=step) from error
    if not table:
        way = "`--by-order` takes names one by one, where shapes agree"
        raise RefusedError("no key can be matched by its name and shape", path=checkpoint.path, next=way)
    renamed = by_table(checkpoint, table, key=key, only=only, label=f"renamed like {source}")
    unsure = [name for name, other in table.items() if name != other and not pairing.sure(name, other)]
    if not unsure:
        return renamed
    notes = [f"the order of rows was not checked: {pluralize(len(unsure), 'name')} by order and shape alone"]
    wrong = [table[name] for name in unsure if pairing.rearranged(name, table[name])]
    if wrong:
        them = f"{join_limited(wrong, most=3)}: the target has the same values in another order or under another name"
        notes.append(f"the values contradict {pluralize(len(wrong), 'name')}, {them}")
    *before, last = renamed.changes
    return renamed.replace(changes=(*before, last._replace(notes=(*last.notes, *notes))))


def group_sizes(checkpoint: Checkpoint) -> GroupSizes:
    """Return how many parameters each group of each optimizer has."""
    nodes = checkpoint.graph.nodes
    return {
        optimizer.path: tuple(len(list_items(nodes[group.params])) for group in optimizer.groups)
        for optimizer in optimizers(checkpoint.graph)
    }
