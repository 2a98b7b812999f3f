"""What differs between two checkpoints, as plain data: the work of ``ckptool diff``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from shlex import quote
from typing import Final, NamedTuple

from ...base.errors import TargetError
from ...base.prefixes import unwrapping
from ...base.text import listed
from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.programs import extra_records, program_of
from ...checkpoint.tensors import Tensor, view_id
from ...files.sources import FileSource
from ...values.elements import dtype_of
from ...values.interpretation import Reading, lazy_bits
from .closeness import Closeness, closeness, has_numbers, has_values
from .equality import Bits, compared
from .places import Leaf, Side, side_of
from .walk import Both, Facet, Only, Order, walked

#: What can be left out of the comparison, and what it covers.
IGNORABLE: Final = {
    "device": "location tags, torch.device objects, texts that name devices",
    "prefix": "what wrappers put into the names of state dicts: module., _orig_mod. and so on",
    "order": "the order of keys",
    "container": "format, byte order, pickle protocol, compression, dict or OrderedDict, what is around a state dict",
    "dtype": "dtypes: values are compared as numbers, which needs torch",
    "stride": "strides",
    "sharing": "which tensors share memory",
    "requires-grad": "requires_grad, and whether a tensor is a Parameter",
}


class Changed(NamedTuple):
    """A property of a tensor, or of the container ("" for the path), that differs."""

    path: str
    what: str
    a: object
    b: object


class Values(NamedTuple):
    """Tensors whose values differ; ``part`` is the place within a tensor that is made of tensors, "" for itself.

    ``first`` is the index of the first element that differs, ``differing`` counts them, -1 where it was not counted.
    ``close`` is there where numbers were compared, and ``within`` says that none is further than the tolerance.
    """

    path: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    first: tuple[int, ...]
    differing: int
    close: Closeness | None
    within: bool


class Sharing(NamedTuple):
    """Two tensors that share memory in one of them only: ``where`` is "a" or "b"."""

    path: str
    other: str
    where: str


class Difference(NamedTuple):
    """Everything that differs, each list in the order of the first file but ``values``, which is worst first.

    ``in_a`` and ``in_b`` count the places of tensors; ``tensors`` those at which something differs in what both have,
    ``values_differ`` those of them whose values do. ``close`` are tensors that differ within the tolerance.
    """

    keys: tuple[str | None, str | None]
    in_a: int
    in_b: int
    paired: int
    tensors: int
    values_differ: int
    container: list[Changed]
    program: list[Changed]
    only_a: list[Only]
    only_b: list[Only]
    changed: list[Changed]
    values: list[Values]
    close: list[Values]
    sharing: list[Sharing]
    entries: list[Facet]
    order: list[Order]
    hint: str

    @property
    def same(self) -> bool:
        """Does nothing differ of what was not ignored?"""
        found = (self.container, self.program, self.only_a, self.only_b, self.changed, self.values)
        return not any((*found, self.sharing, self.entries, self.order))


def differences(
    a: Checkpoint,
    b: Checkpoint,
    *,
    key: str | None = None,
    other_key: str | None = None,
    ignore: Collection[str] = (),
    tolerance: tuple[float, float] | None = None,
    count: bool = True,
    progress: Callable[[int], None] | None = None,
) -> tuple[Difference, Side, Side]:
    """Compare two checkpoints, or with ``key`` (and ``other_key``, the same if not given) one state dict of each.

    ``ignore`` are words of IGNORABLE; ``tolerance`` is (rtol, atol), of torch.allclose's rule. Without ``count`` the
    elements that differ are not counted. Raises TargetError for a word or key that there is not, MalformedError where
    bytes are missing, UnreadableError where numbers must be compared and torch is not installed.
    """
    wrong = sorted(set(ignore) - IGNORABLE.keys())
    if wrong:
        known = listed(list(IGNORABLE), most=len(IGNORABLE))
        raise TargetError(f"{wrong[0]!r} is nothing that can be ignored", next=f"there are {known}")
    words = frozenset(ignore)
    if key is None and other_key is None and "container" in words:
        key, other_key = _sole_keys(a, b)
    elif key is not None or other_key is not None:
        key, other_key = (key if key is not None else other_key), (other_key if other_key is not None else key)
    left, right = side_of(a, key), side_of(b, other_key)
    found = walked(left, right, words)
    values = _Values(a, b, words, tolerance, count, progress)
    for both in found.tensors:
        values.note(both)
    values.compare()
    changed: list[Changed] = []
    far: list[Values] = []
    close: list[Values] = []
    touched = differ = 0
    for path, number in found.pairs:
        both = found.tensors[number]
        facts = [Changed(path, *fact) for fact in _facts(both, words)]
        facts += [Changed(path, facet.path, _told(facet.a), _told(facet.b)) for facet in both.facets]
        changed += facts
        told = [item._replace(path=path) for item in values.of(number)]
        outside = [item for item in told if not item.within]
        far += outside
        close += [item for item in told if item.within]
        differ += bool(outside)
        touched += bool(outside or facts)
    for source in (*a.sources, *b.sources):
        if isinstance(source, FileSource):
            source.check_unchanged()
    count_a, count_b = (sum(item.tensors for item in items) for items in (found.only_a, found.only_b))
    result = Difference(
        (key, other_key),
        len(found.pairs) + count_a + found.passed_over[0],
        len(found.pairs) + count_b + found.passed_over[1],
        len(found.pairs),
        touched,
        differ,
        [] if "container" in words else _container(a, b),
        [] if left.base or right.base else _program(a, b),
        found.only_a,
        found.only_b,
        changed,
        sorted(far, key=_badness, reverse=True),
        sorted(close, key=_badness, reverse=True),
        [] if "sharing" in words else _sharing(found.pairs, found.tensors),
        found.entries,
        [] if "order" in words else found.order,
        _hint(left, right, words) if found.only_a and found.only_b else "",
    )
    return result, left, right


def _told(leaf: Leaf) -> object:
    """A value, or the type of what is no value."""
    return leaf.type if leaf.value is None else leaf.value


def _badness(item: Values) -> tuple[float, ...]:
    return item.close.badness if item.close is not None else (float(item.differing), 0.0)


def _sole_keys(a: Checkpoint, b: Checkpoint) -> tuple[str | None, str | None]:
    """Where the wrappers differ: the one state dict of each that is surely one. (None, None) for the whole objects."""
    found = [[item.path for item in side.state_dicts if item.confidence == "high"] for side in (a, b)]
    if len(found[0]) != 1 or len(found[1]) != 1 or found[0] == found[1]:
        return None, None
    return found[0][0] or ".", found[1][0] or "."


def _hint(a: Side, b: Side, ignore: frozenset[str]) -> str:
    """Options that bring names together which stand for each other; "" for none."""
    one, other = _sole_keys(a.checkpoint, b.checkpoint)
    keys = f"--key {quote(one)} --other-key {quote(other)}" if one is not None and other is not None else ""
    if a.base or b.base or a.root != a.graph.root or b.root != b.graph.root:
        keys = ""
    names, twins = (_names(side) for side in (a, b))
    bare, others = (set(map(unwrapping(side), side)) for side in (names, twins))
    words = sorted({*ignore, "prefix"}) if names.isdisjoint(twins) and not bare.isdisjoint(others) else []
    prefix = f"--ignore {','.join(words)}" if words and "prefix" not in ignore else ""
    if keys and names.isdisjoint(twins) and not prefix:
        return ""
    return " ".join(filter(None, (keys, prefix)))


def _names(side: Side) -> set[str]:
    """The keys of the state dicts that are surely some, and are compared."""
    nodes = side.graph.nodes
    chosen = [item for item in side.checkpoint.state_dicts if item.confidence == "high"]
    inside = [item for item in chosen if side.root in (side.graph.root, item.ref)]
    return {str(nodes[key]) for item in inside for key, _ in item.items}


def _container(a: Checkpoint, b: Checkpoint) -> list[Changed]:
    """What differs in how the object is stored."""
    facts = (
        ("format", a.format, b.format),
        ("byte order", a.container.byteorder, b.container.byteorder),
        ("protocol", a.graph.style.protocol, b.graph.style.protocol),
        ("compressed", _compressed(a), _compressed(b)),
    )
    return [Changed("", what, one, other) for what, one, other in facts if one != other]


def _program(a: Checkpoint, b: Checkpoint) -> list[Changed]:
    """What differs in two programs beside their weights: the code that runs, and what it holds."""
    if program_of(a) is None or program_of(b) is None:
        return []
    ours, theirs = extra_records(a), extra_records(b)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [Changed("", name, ours.get(name, "absent"), theirs.get(name, "absent")) for name in names]


def _compressed(checkpoint: Checkpoint) -> bool:
    bodies = (checkpoint.body(key) for key in checkpoint.survey.reader.storages)
    return any(body.compressed for body in bodies if body is not None)


def _facts(both: Both, ignore: frozenset[str]) -> Iterator[tuple[str, object, object]]:
    """(what, in a, in b) of each property that differs."""
    a, b = both.a, both.b
    for part in both.parts:
        # Values of other sizes are not compared: sparse tensors with more elements, parts of larger ones.
        if part.a.shape != part.b.shape:
            yield f"{part.path} shape", list(part.a.shape), list(part.b.shape)
        if part.a.dtype != part.b.dtype and "dtype" not in ignore:
            yield f"{part.path} dtype", part.a.dtype, part.b.dtype
    if a == b:
        return
    if a.kind != b.kind:
        yield "layout", a.kind, b.kind
    if a.dtype != b.dtype and "dtype" not in ignore:
        yield "dtype", a.dtype, b.dtype
    if a.shape != b.shape:
        yield "shape", list(a.shape), list(b.shape)
    elif a.stride != b.stride and "stride" not in ignore:
        yield "stride", list(a.stride), list(b.stride)
    if a.location != b.location and "device" not in ignore:
        yield "device", a.location, b.location
    if "requires-grad" not in ignore:
        if a.requires_grad != b.requires_grad:
            yield "requires_grad", a.requires_grad, b.requires_grad
        if a.cls != b.cls:
            yield "class", a.cls or "Tensor", b.cls or "Tensor"


def _sharing(pairs: list[tuple[str, int]], tensors: list[Both]) -> list[Sharing]:
    """Tensors that share a storage with an earlier one in one of the files only."""
    found: list[Sharing] = []
    ours: dict[str, tuple[str, str]] = {}
    theirs: dict[str, tuple[str, str]] = {}
    for path, number in pairs:
        a, b = tensors[number].a, tensors[number].b
        if not (has_values(a) and has_values(b)):
            continue
        one, other = ours.setdefault(a.storage, (b.storage, path)), theirs.setdefault(b.storage, (a.storage, path))
        if one[0] != b.storage:
            found.append(Sharing(path, one[1], "a"))
        if other[0] != a.storage:
            found.append(Sharing(path, other[1], "b"))
    return found


class _Values:
    """The values of pairs of tensors; each pair of stored tensors is compared once, however often it stands there."""

    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        ignore: frozenset[str],
        tolerance: tuple[float, float] | None,
        count: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.a, self.b, self.progress = a, b, progress
        self.mixed = "dtype" in ignore
        self.tolerance = tolerance
        self.count = count and tolerance is None
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.numbers: dict[object, int] = {}
        #: How pairs are read of which one is conjugated or negated lazily, and the other is not.
        self.turned: dict[int, tuple[Reading, Reading]] = {}
        #: Indices within sparse tensors and the like: a tolerance makes no sense for them.
        self.exact: set[int] = set()
        #: Of each pair of tensors: (part, number in ``pairs``).
        self.jobs: list[list[tuple[str, int]]] = []
        self.bits: list[Bits] = []
        self.close: dict[int, Closeness] = {}

    def note(self, both: Both) -> None:
        parts = [("", both.a, both.b), *((part.path, part.a, part.b) for part in both.parts)]
        jobs: list[tuple[str, int]] = []
        for name, a, b in parts:
            if a.shape != b.shape or not has_values(a) or not has_values(b):
                continue
            if a.dtype != b.dtype and not (self.mixed and has_numbers(a) and has_numbers(b)):
                continue
            marks: tuple[object, ...] = (view_id(a), view_id(b))
            # What one of them turns round lazily, the other may hold turned round.
            lazy = not name and any(facet.path in ("conj", "neg") for facet in both.facets)
            readings = tuple(
                Reading(tensor, "elements", *lazy_bits(side, ref))
                for side, ref, tensor in zip((self.a, self.b), both.refs, (a, b) if lazy else ())
            )
            marks += readings
            if marks not in self.numbers:
                self.numbers[marks] = len(self.pairs)
                self.pairs.append((a, b))
                if readings:
                    self.turned[self.numbers[marks]] = (readings[0], readings[1])
            jobs.append((name, self.numbers[marks]))
            dtype = dtype_of(a)
            if name and dtype is not None and not dtype.floating and not dtype.name.startswith("complex"):
                self.exact.add(self.numbers[marks])
        self.jobs.append(jobs)

    def compare(self) -> None:
        alike = [number for number, (a, b) in enumerate(self.pairs) if a.dtype == b.dtype]
        turned = {at: self.turned[number] for at, number in enumerate(alike) if number in self.turned}
        pairs = [self.pairs[number] for number in alike]
        told = compared(self.a, self.b, pairs, turned, count=self.count, progress=self.progress)
        # Other dtypes are other bytes.
        self.bits = [Bits(0, -1)] * len(self.pairs)
        for number, bits in zip(alike, told):
            self.bits[number] = bits
        if self.tolerance is None and len(alike) == len(self.pairs):
            return
        rtol, atol = self.tolerance or (0.0, 0.0)
        for number, (a, b) in enumerate(self.pairs):
            if self.bits[number].first < 0 or not (has_numbers(a) and has_numbers(b)):
                continue
            if number in self.exact:
                self.close[number] = closeness((self.a, a), (self.b, b), 0.0, 0.0)
            elif self.tolerance is not None or a.dtype != b.dtype:
                self.close[number] = closeness((self.a, a), (self.b, b), rtol, atol)

    def of(self, number: int) -> list[Values]:
        """What differs in the values of a pair of tensors; the paths are left to the caller."""
        found = []
        for part, job in self.jobs[number]:
            bits, close = self.bits[job], self.close.get(job)
            a = self.pairs[job][0]
            if bits.first < 0 or (close is not None and not close.far and not close.max_abs):
                continue  # equal, or equal as numbers: -0.0 and 0.0
            within = close is not None and not close.far
            differing = close.far if close is not None else bits.differing
            found.append(Values("", part, a.dtype, a.shape, _index(bits.first, a.shape), differing, close, within))
        return found


def _index(number: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the element with this number, counting along the last dimension first."""
    index: list[int] = []
    for size in reversed(shape):
        number, place = divmod(number, max(size, 1))
        index.append(place)
    return tuple(reversed(index))
