"""Infer a recipe from two sides that hold the same model in two layouts.

Only what is known for sure becomes a rule: equal names, an order of rows that values from both sides show, stacks and
padding that they prove, transposes that are not square, and dimensions of size 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...base.lazy import regex
from ...base.records import NamedTuple
from .fused import Fusion, Side, find_fusions, in_order
from .names import Comparison, Shape
from .stacks import Stack, find_stacks, padded_rows, with_hole

_NUMBER: Final = regex(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])|(?<=[A-Za-z_])\d+(?=\.)")
#: The axes of both sides of a transposed matrix.
_TURNED: Final = ("o, i", "i, o")
#: The letters of holes, in their order.
_HOLES: Final = "LMNPQRSTUV"


class _Rule(NamedTuple):
    """Names and axes of both sides; "" for a tensor that only gets another name."""

    a: tuple[tuple[str, str], ...]
    b: tuple[tuple[str, str], ...]

    @property
    def names(self) -> list[str]:
        """The names of both sides."""
        return [name for name, _ in (*self.a, *self.b)]


def inferred_recipe(own: Side, target: Side, rest: Comparison) -> str:
    """Return the TOML of a recipe after which all keys load, or "" if some part of it would be a guess.

    ``rest`` compares the names that the file has under the likely names, by which ``own`` lists its tensors.
    """
    pairs: dict[str, tuple[str, str] | None] = dict.fromkeys(rest.loads, ("", ""))
    pairs |= {item.key: _same_elements(own.shape(item.key), target.shape(item.key)) for item in rest.sizes}
    shared: dict[str, int] = {}
    for name in [name for name, axes in pairs.items() if axes is None]:
        shared[name] = padded_rows(name, own, target)
        if not shared[name]:
            return ""
    added = {_rows(target, name) - rows for name, rows in shared.items() if rows < _rows(target, name)}
    if len(added) > 1 or (added and any(_rows(own, name) > rows for name, rows in shared.items())):
        return ""  # a recipe has one size of padding
    pairs |= {name: _padded(rows, own, target, name) for name, rows in shared.items()}
    if _TURNED in pairs.values():  # then squares may be transposed as well
        pairs |= {name: _square(name, own, target) for name in rest.loads if _is_square(own.shape(name))}
    rules = [_Rule(((own.label(name), axes[0]),), ((name, axes[1]),)) for name, axes in pairs.items() if axes]
    if len(rules) < len(pairs):
        return ""
    used: set[str] = set()
    for wholes, parts, whole_names, part_names in (
        (own, target, rest.unexpected, rest.missing),
        (target, own, rest.missing, rest.unexpected),
    ):
        fusions = find_fusions(
            {name: wholes.specs[name].shape for name in whole_names},
            {name: parts.specs[name].shape for name in part_names},
        )
        for fusion in (in_order(fusion, wholes, parts) for fusion in fusions):
            if fusion is None:
                return ""
            used.update((fusion.whole, *fusion.parts))
            sides = _fused(fusion, wholes, parts)
            labelled = [tuple((own.label(name), axes) for name, axes in side) for side in sides]
            rules.append(_Rule(labelled[0], sides[1]) if wholes is own else _Rule(labelled[1], sides[0]))
        left = [[name for name in names if name not in used] for names in (whole_names, part_names)]
        for stack in find_stacks(wholes, parts, *left):
            used.update((stack.whole, *(name for names in stack.parts for name in names)))
            whole, split = _stacked(stack, own, parts)
            rules.append(_Rule(whole, split) if wholes is own else _Rule(split, whole))
    if (all(axes == ("", "") for axes in pairs.values()) and len(rules) == len(pairs)) or not used.issuperset(
        (*rest.missing, *rest.unexpected)
    ):
        return ""
    changed = [rule for rule in rules if rule.a != rule.b]
    keep = ['rest = "keep"\n'] if len(changed) < len(rules) else []
    sizes = [f'[numbers]\n_ = "={size}"\n' for size in added]
    return "\n".join([*keep, *sizes, *map(_text, _folded(changed))])


def _same_elements(have: Shape, wanted: Shape) -> tuple[str, str] | None:
    """Return the axes of both sides if the shapes show that the elements are the same; None if they do not."""
    if have is None or wanted is None:
        return None
    if len(have) == 2 and have == wanted[::-1] and have[0] != have[1]:
        return _TURNED
    sizes = [size for size in have if size != 1]
    if sizes != [size for size in wanted if size != 1]:
        return None
    letters = iter("abcdefgh")
    names = [next(letters, "z") for _ in sizes]
    return _with_ones(have, names), _with_ones(wanted, names)


def _rows(side: Side, name: str) -> int:
    return (side.shape(name) or (0,))[0]


def _padded(rows: int, own: Side, target: Side, name: str) -> tuple[str, str]:
    """Return the axes of a tensor on both sides, which share its first ``rows`` rows."""
    rest = [letter for letter, _ in zip("ijkl", (own.shape(name) or ())[1:])]
    texts = (str(rows) if _rows(side, name) == rows else f"({rows}|_)" for side in (own, target))
    a, b = (", ".join([text, *rest]) for text in texts)
    return a, b


def _stacked(stack: Stack, own: Side, parts: Side) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return names and axes of a stack and of its parts; ``own`` tells the names in the file."""
    shapes = [parts.shape(names[0]) or () for names in stack.parts]
    lengths = [shape[stack.axis] for shape in shapes]
    sections = ["s"] * len(lengths) if len({*lengths}) == 1 else [str(length) for length in lengths]
    others = [letter for letter, _ in zip("ijkl", shapes[0][1:])]
    texts = [f"({'|'.join(sections)})" if len(sections) > 1 else sections[0], *sections]
    whole, *each = (", ".join([*others[: stack.axis], text, *others[stack.axis :]]) for text in texts)
    labelled = [[own.label(name) if parts is own else name for name in names] for names in stack.parts]
    whole_name = stack.whole if parts is own else own.label(stack.whole)
    return ((whole_name, f"e, {whole}"),), tuple(zip(map(with_hole, labelled), each))


def _is_square(shape: Shape) -> bool:
    return shape is not None and len(shape) == 2 and shape[0] == shape[1] > 1


def _square(name: str, own: Side, target: Side) -> tuple[str, str] | None:
    """Return the axes of a square matrix on both sides, by one line of values; None if these do not tell."""
    row, column = (target.line(name, axis) for axis in (0, 1))
    line = own.line(name, 0)
    if not line or row == column:
        return None
    return ("", "") if line == row else _TURNED if line == column else None


def _with_ones(shape: Sequence[int], names: Sequence[str]) -> str:
    letters = iter(names)
    return ", ".join("1" if size == 1 else next(letters) for size in shape)


def _fused(
    fusion: Fusion, wholes: Side, parts: Side
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return names and axes of the whole and of its parts."""
    shape = wholes.shape(fusion.whole) or ()
    lengths = [(parts.shape(name) or ())[fusion.part_axis] for name in fusion.parts]
    sections = ["e"] * len(lengths) if len(set(lengths)) == 1 else [str(length) for length in lengths]
    others = [letter for letter, _ in zip("ijkl", shape[1:])]
    turned = fusion.axis != fusion.part_axis
    own = [*others[: fusion.axis], f"({'|'.join(sections)})", *others[fusion.axis :]]
    at, rest = fusion.part_axis, others[::-1] if turned else others
    its = [[*rest[:at], section, *rest[at:]] for section in sections]
    return ((fusion.whole, ", ".join(own)),), tuple((name, ", ".join(axes)) for name, axes in zip(fusion.parts, its))


# -- one rule for all layers


def _folded(rules: Sequence[_Rule]) -> Iterator[_Rule]:
    """Yield the rules; those that differ only in numbers become one, with holes."""
    groups: dict[object, list[_Rule]] = {}
    for rule in rules:
        shape = tuple(_NUMBER.sub("#", name) for name in rule.names), tuple(axes for _, axes in (*rule.a, *rule.b))
        groups.setdefault((len(rule.a), shape), []).append(rule)
    work = [*groups.values()][::-1]
    while work:
        group = work.pop()
        columns = _columns(group)
        # A hole counts from 0, as layers do, or follows from such a hole; other numbers stay as they are.
        counts = [column for column in columns if {*column} == _first(column)]
        odd = next((at for at, column in enumerate(columns) if not _follows(column, counts)), None)
        if odd is not None:
            work += [
                [rule for rule, own in zip(group, columns[odd]) if own == each] for each in sorted({*columns[odd]})
            ][::-1]
            continue
        holes = _holes(columns) if len(group) > 1 else None
        if holes is None:
            yield from group
            continue
        names = _filled(group[0].names, holes)
        a = tuple((name, axes) for name, (_, axes) in zip(names, group[0].a))
        b = tuple((name, axes) for name, (_, axes) in zip(names[len(a) :], group[0].b))
        yield _Rule(a, b)


def _columns(group: Sequence[_Rule]) -> list[tuple[int, ...]]:
    """Return the numbers in the names of rules that differ only in these, by their place."""
    return list(zip(*([int(number) for name in rule.names for number in _NUMBER.findall(name)] for rule in group)))


def _follows(column: Sequence[int], counts: Sequence[Sequence[int]]) -> bool:
    """Return whether a column of numbers is constant, or has the same distance to all numbers of a hole."""
    return len({*column}) == 1 or any(len({a - b for a, b in zip(column, other)}) == 1 for other in counts)


def _first(column: Sequence[int]) -> set[int]:
    """Return as many numbers, from 0 on, as a column has different ones."""
    return set(range(len({*column})))


def _filled(names: Sequence[str], holes: Sequence[str]) -> list[str]:
    """Return names with holes in place of their numbers."""
    texts = iter(holes)
    return [_NUMBER.sub(lambda _: next(texts), name) for name in names]


def _holes(columns: Sequence[tuple[int, ...]]) -> list[str] | None:
    """Return the text for each number in the names of rules; None if names that differ would become one."""
    known: list[tuple[str, tuple[int, ...]]] = []
    holes = []
    for column in columns:
        if len(set(column)) == 1:
            holes.append(str(column[0]))
            continue
        steps = ((letter, {a - b for a, b in zip(column, other)}) for letter, other in known)
        letter, step = next(((letter, step.pop()) for letter, step in steps if len(step) == 1), ("", 0))
        if not letter and len(known) < len(_HOLES):
            letter = _HOLES[len(known)]
            known.append((letter, column))
        elif not letter:
            return None
        holes.append(f"{{{letter}{step:+d}}}" if step else f"{{{letter}}}")
    rules = {*zip(*(column for _, column in known))}
    return holes if len(rules) == len(columns[0]) else None


def _text(rule: _Rule) -> str:
    sides = []
    for side in (rule.a, rule.b):
        texts = [f'"{name} : {axes}"' if axes else f'"{name}"' for name, axes in side]
        sides.append(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
    return f"[[rule]]\na = {sides[0]}\nb = {sides[1]}\n"
