"""The report of ``diff``: the differences between two checkpoints. Its keys are a stable contract (``schema``)."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

from ...base.errors import TargetError
from ...base.globs import MATCH_ALL, Globs, Patterns
from ...base.prefixes import unwrapper
from ...base.records import NamedTuple, TypedDict
from ...base.steps import Step
from ...base.text import join_limited, json_value, pluralize
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.programs import extra_records, program_of
from ...checkpoint.selection import dotted
from ...files.downloads import check_unchanged
from ...formats.opening import CheckpointOrPath, opened
from ...values.objects import ScalarValue
from .graphs import GraphComparison, OrderDifference, TensorPair, Unpaired, compare_graphs
from .places import Side, attribute_names, has_values, side_of
from .values import Distances, RankedDifference, ValueComparison, ValueDifference, ranked, total_distance

if TYPE_CHECKING:
    from typing import NotRequired

    from ...files.write.copying import Progress

#: Words for parts that the comparison can ignore, and what each covers.
IGNORABLE: Final = {
    "device": "location tags, torch.device objects, strings that name devices",
    "prefix": "what wrappers put into the names of state dicts: module., _orig_mod. and so on",
    "order": "the order of keys",
    "container": "format, byte order, pickle protocol, compression, dict or OrderedDict, what is around a state dict",
    "dtype": "dtypes: values are compared as numbers, which needs torch",
    "values": "values of tensors: they are not read",
    "stride": "strides",
    "sharing": "which tensors share memory",
    "requires-grad": "requires_grad, and whether a tensor is a Parameter",
    "attributes": "Python attributes of tensors",
}


class TensorCounts(TypedDict):
    """Counts of places: tensors in each file and in both, and how many of the latter differ.

    A tensor that differs only in Python attributes counts only in ``attributes_differ``.
    """

    in_a: int
    in_b: int
    in_both: int
    differ: int
    values_differ: int
    attributes_differ: int
    within_tolerance: int


class PropertyDifference(TypedDict):
    """A property that differs: of a tensor, or with the path "" of the container or program."""

    path: str
    what: str
    a: object
    b: object


class OneSided(TypedDict):
    """Something that only one file has, at its topmost place. With dtype, shape and device it is a tensor."""

    path: str
    type: str
    tensors: int
    dtype: NotRequired[str]
    shape: NotRequired[list[int]]
    device: NotRequired[str]
    value: NotRequired[object]


#: Two tensors that share memory in only one file, "a" or "b".
Sharing = TypedDict("Sharing", {"path": str, "with": str, "only_in": str})


class EntryValue(TypedDict):
    """A value that is not in a tensor; None has no ``value``."""

    type: str
    value: NotRequired[object]


class EntryDifference(TypedDict):
    """Two values outside of tensors that differ."""

    path: str
    a: EntryValue
    b: EntryValue


class DiffReport(TypedDict):
    """The report of ``diff``, schema ``ckptool.diff/1``.

    Lists are in the order of file a, except lists of values: worst first, or as sorted. ``total`` covers all
    tensors whose values differ, within the tolerance or not, except counters (``num_batches_tracked``, ``step``):
    ``counters`` is the number of those left out, 0 if nothing else differs. ``not_measured`` says why nothing was
    measured; "" if nothing had to be.
    """

    schema: Literal["ckptool.diff/1"]
    a: str
    b: str
    key: str | None
    other_key: str | None
    include: list[str]
    exclude: list[str]
    ignored: list[str]
    rtol: float | None
    atol: float | None
    same: bool
    tensors: TensorCounts
    container: list[PropertyDifference]
    program: list[PropertyDifference]
    only_in_a: list[OneSided]
    only_in_b: list[OneSided]
    changed: list[PropertyDifference]
    values: list[ValueDifference]
    within_tolerance: list[ValueDifference]
    total: Distances | None
    counters: int
    not_measured: str
    sharing: list[Sharing]
    entries: list[EntryDifference]
    order: list[OrderDifference]
    hint: str
    stat: str
    verdict: str


def diff_report(
    a: Checkpoint,
    b: Checkpoint,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Collection[str] = (),
    key: str | None = None,
    other_key: str | None = None,
    only: Globs = MATCH_ALL,
    count: bool = True,
    sort: str = "max",
    progress: Progress | None = None,
) -> DiffReport:
    """Compare two checkpoints, or with ``key`` (and ``other_key``, by default the same) one state dict of each.

    ``only`` chooses keys and entries. ``ignore`` has words from IGNORABLE. ``rtol`` and ``atol`` are as in
    torch.allclose. ``sort``, one of SORTS, is the order of values. Without ``count``, differing elements are not
    counted, and distances are not measured. Raise TargetError for an unknown word or key, or a pattern that matches in
    neither, MalformedError if bytes are missing, and UnreadableError if torch is not installed but needed for the
    verdict. If torch is needed only for figures, ``not_measured`` says so.
    """
    unknown = sorted(set(ignore) - IGNORABLE.keys())
    if unknown:
        choice = join_limited(list(IGNORABLE), most=len(IGNORABLE))
        raise TargetError(f"{unknown[0]!r} cannot be ignored", next=f"choose from {choice}")
    a, b, words = a.in_full(), b.in_full(), frozenset(ignore)
    tolerance = None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)
    if key is None and other_key is None and "container" in words:
        key, other_key = _sole_keys(a, b)
    key, other_key, _ = Scope(key, other_key, words).completed
    left, right = side_of(a, key), side_of(b, other_key)
    graphs = compare_graphs(left, right, words, dotted(only, a, b))
    comparison = ValueComparison(a, b, "dtype" in words, tolerance, count and tolerance is None, count, progress)
    for pair in graphs.tensors if "values" not in words else ():
        comparison.add(pair)
    comparison.compare()
    changed: list[PropertyDifference] = []
    differing: set[int] = set()
    attributes_differ = 0
    for place, (path, number) in enumerate(graphs.places):
        pair = graphs.tensors[number]
        properties = [_property(path, *item) for item in _properties(pair, words)]
        more = [_property(path, item.path, _plain(item.a), _plain(item.b)) for item in pair.mismatches]
        names = attribute_names(left, pair.refs[0]) | attribute_names(right, pair.refs[1]) if more else set()
        properties += [item for item in more if not _is_within(item["what"], names)]
        set_on = [item for item in more if _is_within(item["what"], names) and "attributes" not in words]
        attributes_differ += bool(set_on)
        changed += properties + set_on
        if properties:
            differing.add(place)
    comparison.measure_distances()
    check_unchanged([*a.sources, *b.sources])
    values: list[RankedDifference] = []
    unequal, far = comparison.differing(), set()
    for place, (path, number) in enumerate(graphs.places):
        found = list(comparison.differences(number, path)) if number in unequal else []
        values += found
        if not all(item.within for item in found):
            far.add(place)
    apart, close = ([item for item in values if item.within == within] for within in (False, True))
    total, counters = total_distance([*apart, *close])
    report: DiffReport = {
        "schema": "ckptool.diff/1",
        "a": a.path,
        "b": b.path,
        "key": key,
        "other_key": other_key,
        "include": list(only.include),
        "exclude": list(only.exclude),
        "ignored": sorted(words),
        "rtol": tolerance[0] if tolerance else None,
        "atol": tolerance[1] if tolerance else None,
        "same": False,
        "tensors": {
            "in_a": _tensors_in(graphs, 0),
            "in_b": _tensors_in(graphs, 1),
            "in_both": len(graphs.places),
            "differ": len(differing | far),
            "values_differ": len(far),
            "attributes_differ": attributes_differ,
            "within_tolerance": len({item.report["path"] for item in close}),
        },
        "container": [] if "container" in words else list(_container(a, b)),
        "program": [] if left.base or right.base or only else list(_program(a, b)),
        "only_in_a": [_one_sided(left, item) for item in graphs.unpaired[0]],
        "only_in_b": [_one_sided(right, item) for item in graphs.unpaired[1]],
        "changed": changed,
        "values": ranked(apart, sort),
        "within_tolerance": ranked(close, sort),
        "total": total,
        "counters": counters,
        "not_measured": comparison.reason,
        "sharing": [] if "sharing" in words else list(_sharing(graphs)),
        "entries": [
            {"path": item.path, "a": _entry_value(item.a), "b": _entry_value(item.b)} for item in graphs.mismatches
        ],
        "order": [] if "order" in words else graphs.order,
        "hint": scope_words(scope) if all(graphs.unpaired) and (scope := better_scope(left, right, words)) else "",
        "stat": "",
        "verdict": "",
    }
    differences = (report["container"], report["program"], report["only_in_a"], report["only_in_b"], report["changed"])
    report["same"] = not any((*differences, report["values"], report["sharing"], report["entries"], report["order"]))
    report["stat"] = _stat_line(report)
    if not report["same"]:
        report["verdict"] = "they differ"
    elif close:
        report["verdict"] = "the same within the tolerance"
    else:
        report["verdict"] = f"the same except for {', '.join(report['ignored'])}" if report["ignored"] else "the same"
    return report


def _tensors_in(graphs: GraphComparison, number: int) -> int:
    return len(graphs.places) + sum(item.tensors for item in graphs.unpaired[number]) + graphs.passed_over[number]


def _property(path: str, name: str, a: object, b: object) -> PropertyDifference:
    return {"path": path, "what": name, "a": json_value(a), "b": json_value(b)}


def _is_within(path: str, names: set[str]) -> bool:
    starts = [name.removeprefix(".") for name in names]
    return any(path == start or path.startswith((start + ".", start + "[")) for start in starts)


def _plain(value: ScalarValue) -> object:
    return value.type if value.value is None else value.value


def _one_sided(side: Side, item: Unpaired) -> OneSided:
    tensor, leaf = side.tensor(item.ref), side.leaf(item.ref)
    report: OneSided = {"path": item.path, "type": side.type(item.ref), "tensors": item.tensors}
    if tensor is not None:
        report |= {"dtype": tensor.dtype, "shape": list(tensor.shape), "device": tensor.location}
    if leaf is not None:
        report["value"] = json_value(leaf.value)
    return report


def _entry_value(value: ScalarValue) -> EntryValue:
    return {"type": value.type} if value.value is None else {"type": value.type, "value": json_value(value.value)}


def _sole_keys(a: Checkpoint, b: Checkpoint) -> tuple[str | None, str | None]:
    """Return the paths of the only certain state dict of each if they differ, otherwise (None, None)."""
    paths = [[item.path for item in side.state_dicts if item.confidence == "high"] for side in (a, b)]
    if len(paths[0]) != 1 or len(paths[1]) != 1 or paths[0] == paths[1]:
        return None, None
    return paths[0][0] or ".", paths[1][0] or "."


class Scope(NamedTuple):
    """The parts of two checkpoints to compare: a state dict of each, or None for the whole, and the words to ignore."""

    key: str | None
    other_key: str | None
    ignore: frozenset[str]

    @property
    def completed(self) -> Scope:
        """The scope with a key for both sides if there is one for either."""
        first, second = self.key, self.other_key
        return Scope(second if first is None else first, first if second is None else second, self.ignore)


def better_scope(a: Side, b: Side, ignore: frozenset[str]) -> Scope | None:
    """Return a scope that pairs names with the same meaning, or None if there is no better one."""
    one, other = _sole_keys(a.checkpoint, b.checkpoint)
    if one is None or other is None or a.base or b.base or a.root != a.graph.root or b.root != b.graph.root:
        one = other = None
    names, others = _names(a), _names(b)
    unwrapped = [set(map(unwrapper(side), side)) for side in (names, others)]
    if names.isdisjoint(others):
        if unwrapped[0].isdisjoint(unwrapped[1]) or "prefix" in ignore:
            return None
        return Scope(one, other, ignore | {"prefix"})
    return None if one is None else Scope(one, other, ignore)


def scope_words(scope: Scope, only: Globs = MATCH_ALL) -> str:
    """Return the parts to compare as options of ``diff``; "" for everything."""
    settings = []
    if scope.key is not None:
        settings += [Step("key", scope.key), Step("other_key", scope.other_key or scope.key)]
    settings += [Step("include", glob) for glob in only.include] + [Step("exclude", glob) for glob in only.exclude]
    if scope.ignore:
        settings.append(Step("ignore", ",".join(sorted(scope.ignore))))
    return shlex.join(word for step in settings for word in step.words)


def _names(side: Side) -> set[str]:
    nodes = side.graph.nodes
    chosen = [item for item in side.checkpoint.state_dicts if item.confidence == "high"]
    inside = [item for item in chosen if side.root in (side.graph.root, item.ref)]
    return {str(nodes[key]) for item in inside for key, _ in item.items}


def _container(a: Checkpoint, b: Checkpoint) -> Iterator[PropertyDifference]:
    for name, one, other in (
        ("format", a.format, b.format),
        ("byte order", a.container.byteorder, b.container.byteorder),
        ("protocol", a.graph.style.protocol, b.graph.style.protocol),
        ("compressed", _compressed(a), _compressed(b)),
    ):
        if one != other:
            yield _property("", name, one, other)


def _compressed(checkpoint: Checkpoint) -> bool:
    added, container = checkpoint.added, checkpoint.container
    keys = checkpoint.survey.reader.storages
    return any(added[key].compressed if key in added else container.is_compressed(key) for key in keys)


def _program(a: Checkpoint, b: Checkpoint) -> Iterator[PropertyDifference]:
    if program_of(a) is None or program_of(b) is None:
        return
    ours, theirs = extra_records(a), extra_records(b)
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            yield _property("", name, ours.get(name, "absent"), theirs.get(name, "absent"))


def _properties(pair: TensorPair, ignore: frozenset[str]) -> Iterator[tuple[str, object, object]]:
    a, b = pair.a, pair.b
    for inner in pair.inner:
        # Inner tensors of different shapes are not compared: sparse tensors with more elements, parts of larger ones.
        if inner.a.shape != inner.b.shape:
            yield f"{inner.path} shape", list(inner.a.shape), list(inner.b.shape)
        if inner.a.dtype != inner.b.dtype and "dtype" not in ignore:
            yield f"{inner.path} dtype", inner.a.dtype, inner.b.dtype
    if a == b:
        return
    same_shape = a.shape == b.shape
    for name, one, other, word in (
        ("layout", a.kind, b.kind, ""),
        ("dtype", a.dtype, b.dtype, "dtype"),
        ("shape", list(a.shape), list(b.shape), ""),
        ("stride", list(a.stride) if same_shape else [], list(b.stride) if same_shape else [], "stride"),
        ("device", a.location, b.location, "device"),
        ("requires_grad", a.requires_grad, b.requires_grad, "requires-grad"),
        ("class", a.cls or "Tensor", b.cls or "Tensor", "requires-grad"),
    ):
        if one != other and word not in ignore:
            yield name, one, other


def _sharing(graphs: GraphComparison) -> Iterator[Sharing]:
    ours: dict[str, tuple[str, str]] = {}
    theirs: dict[str, tuple[str, str]] = {}
    for path, number in graphs.places:
        a, b = graphs.tensors[number].a, graphs.tensors[number].b
        if not (has_values(a) and has_values(b)):
            continue
        one, other = ours.setdefault(a.storage, (b.storage, path)), theirs.setdefault(b.storage, (a.storage, path))
        if one[0] != b.storage:
            yield {"path": path, "with": one[1], "only_in": "a"}
        if other[0] != a.storage:
            yield {"path": path, "with": other[1], "only_in": "b"}


def _stat_line(report: DiffReport) -> str:
    """Return one line: ``2 of 312 tensors differ, 1 tensor only in A, 3 entries differ``."""
    sums = report["tensors"]
    total = pluralize(sums["in_both"], "tensor")
    words = [f"{sums['differ']:,} of {total} {'differs' if sums['differ'] == 1 else 'differ'}"]
    if not sums["in_both"]:
        words = ["no tensor in both"]
    elif all_equal(report):
        words = [f"all {total}{' in both' * (sums['in_both'] < max(sums['in_a'], sums['in_b']))} are equal"]
    if not report["same"]:
        for name, items in (("A", report["only_in_a"]), ("B", report["only_in_b"])):
            tensors, entries = sum(item["tensors"] for item in items), sum(not item["tensors"] for item in items)
            nouns = [pluralize(count, noun) for count, noun in ((tensors, "tensor"), (entries, "entry")) if count]
            words += [f"{' and '.join(nouns)} only in {name}"] if nouns else []
        if sums["attributes_differ"]:
            words.append(f"attributes of {pluralize(sums['attributes_differ'], 'tensor')} differ")
        if report["entries"]:
            words.append(f"{pluralize(len(report['entries']), 'entry')} {_differ(report['entries'])}")
        if report["order"]:
            words.append(f"keys in another order in {pluralize(len(report['order']), 'mapping')}")
        if report["sharing"]:
            words.append(f"{pluralize(len(report['sharing']), 'tie')} in one only")
        if report["container"]:
            words.append(f"the container differs in {' and '.join(item['what'] for item in report['container'])}")
        if report["program"]:
            words.append(f"{pluralize(len(report['program']), 'part')} of the program {_differ(report['program'])}")
    if sums["within_tolerance"]:
        words.append(f"{sums['within_tolerance']:,} within the tolerance")
    return ", ".join(words)


def all_equal(report: DiffReport) -> bool:
    """Return whether two checkpoints differ although all tensors in both are equal, bit for bit."""
    sums = report["tensors"]
    unequal = sums["differ"] or sums["attributes_differ"] or sums["within_tolerance"]
    return sums["in_both"] > 0 and not (unequal or report["same"] or {"values", "dtype"} & {*report["ignored"]})


def _differ(items: Sequence[object]) -> str:
    return "differs" if len(items) == 1 else "differ"


def diff(
    a: CheckpointOrPath,
    b: CheckpointOrPath,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    ignore: Collection[str] = (),
    key: str | None = None,
    other_key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
    sort: str = "max",
    progress: Progress | None = None,
) -> DiffReport:
    """Return the JSON of ``ckptool diff``, schema ``ckptool.diff/1``: ``same`` is the answer.

    Values are compared bit for bit; with ``rtol`` or ``atol`` by torch.allclose's rule, which needs torch. If they
    differ, ``values`` and ``total`` say by how much. This also needs torch; without it, ``not_measured``
    says so. ``ignore`` has words from ``comparing.diff.IGNORABLE``: device, prefix, order, container, dtype, values,
    stride, sharing, requires-grad. ``key`` and ``other_key`` (by default the same) name one state dict of each.
    ``include`` and ``exclude`` are patterns for keys and entries, with all their content. ``sort`` is the order of
    values: "max", "mean", "l2", "cosine", "differing", "file" or "name". Raise
    UnreadableError for a file that is not a checkpoint, TargetError for an unknown key or word, or a pattern that
    matches in neither.

    >>> ckptool.diff("model.pth", "other.pth")["same"]
    True
    >>> report = ckptool.diff("training.pth", "plain.pth")
    >>> report["same"], report["hint"]
    (False, '--ignore prefix')
    """
    only = Globs(include, exclude)
    with opened(a) as one, opened(b) as other:
        return diff_report(
            one,
            other,
            rtol=rtol,
            atol=atol,
            ignore=ignore,
            key=key,
            other_key=other_key,
            only=only,
            sort=sort,
            progress=progress,
        )
