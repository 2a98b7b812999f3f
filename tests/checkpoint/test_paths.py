"""Paths and keys: every place has a path of its own that every command takes; two keys are one where torch says so."""

from __future__ import annotations

import enum
import math
import pathlib
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import corpus_files, examples, needs_corpus
from crafted_files import Code, call, name, ordered, plain, put, storage, tensor
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.base.errors import CkptoolError, TargetError
from ckptool.base.limits import LIMITS
from ckptool.checkpoint.paths import NO_VALUE, children, parse_steps
from ckptool.cli.main import run


class Color(enum.Enum):
    RED = 1
    BLUE = 2


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.floats(),
    st.text(max_size=6),
    st.text(st.characters(codec=None), max_size=4),
    st.text('ab."[]()#\\\n', max_size=5),
    st.binary(max_size=4),
    st.complex_numbers(allow_nan=False),
    st.sampled_from(
        [
            *(torch.float32, torch.float64, torch.int8, torch.strided, torch.sparse_coo, Color.RED, Color.BLUE, int),
            *(torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3]), pathlib.PurePosixPath("a/b")),
            *("torch.float32", "[1]", "(0)", "#1", "k" * 700, b"k" * 700, "1"),
            *(10**400, 1, True, 1.0, -0.0, 0.0, math.nan),
        ]
    ),
)
KEYS = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3), max_leaves=6
)


def saved(value: Any, path: Path, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol)
    return path


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(KEYS, max_size=8), st.integers(2, 5))
def test_every_tensor_has_a_path_of_its_own(tmp_path: Path, keys: list[Any], protocol: int) -> None:
    mapping = {key: torch.tensor([float(number)]) for number, key in enumerate(keys)}
    path = saved({"d": mapping, "n": [{key: 1} for key in keys]}, tmp_path / "a.pth", protocol)
    loaded = torch.load(path, weights_only=False)["d"]
    with ckptool.open(path) as checkpoint:
        got = ckptool.get(checkpoint, "d")
        assert [value.tolist() for value in got.values()] == [value.tolist() for value in loaded.values()]
        entries = checkpoint.survey.tensors
        assert len({entry.path for entry in entries}) == len(entries) == len(loaded)
        for entry, value in zip(entries, loaded.values()):
            assert ckptool.get(checkpoint, entry.path).tolist() == value.tolist()
            assert ckptool.keys(path, key=entry.path, all=True)["listed"] == 1
            assert parse_steps("".join(step.step for step in parse_steps(entry.path)).lstrip("."))
            assert len(ckptool.extract(checkpoint, entry.path).survey.tensors) == 1
            assert len(ckptool.drop(checkpoint, entry.path).survey.tensors) == len(entries) - 1


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(KEYS, KEYS)
def test_two_keys_are_one_where_python_says_so(tmp_path: Path, one: Any, other: Any) -> None:
    """In one dict; between two files 1 is told from True as well."""
    both = saved({one: 1, other: 2}, tmp_path / "both.pth", 4)
    assert len(ckptool.get(both, "")) == len({one: 1, other: 2})
    first, second = (saved({key: torch.ones(2)}, tmp_path / f"{key is one}.pth", 4) for key in (one, [other][0]))
    if repr(one) != repr(other) and not isinstance(one, frozenset | tuple):
        assert not ckptool.diff(first, second)["same"]
        assert ckptool.lock(first) != ckptool.lock(second)
        if max(len(repr(one)), len(repr(other))) < 500:
            assert ckptool.hash(first)["content"] != ckptool.hash(second)["content"]
    assert ckptool.diff(first, first)["same"]


def has_nan(key: Any) -> bool:
    return any(map(has_nan, key)) if isinstance(key, tuple | frozenset) else isinstance(key, float) and math.isnan(key)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(KEYS, max_size=5), KEYS, st.integers(-5, 5))
def test_set_gives_what_the_same_assignment_gives(tmp_path: Path, keys: list[Any], key: Any, value: int) -> None:
    """Where a key has a spelling, ``set`` is ``mapping[key] = value``, also for a key that is equal to another one."""
    mapping = dict.fromkeys(keys, 100)
    spelled = saved({key: 1}, tmp_path / "key.pth", 4)
    with ckptool.open(spelled) as checkpoint:
        step, *_ = [one.step for one in children(checkpoint.graph, checkpoint.graph.root)]
    # A NaN, also one in a tuple, is equal to nothing once it was saved and loaded.
    assume(not step.startswith("[#") and not has_nan(key))
    path = saved({"d": mapping}, tmp_path / "a.pth", 4)
    with ckptool.open(path) as checkpoint:
        try:
            after = ckptool.set(checkpoint, f"d{step}", value)
        except TargetError:
            assert key not in mapping or parse_steps(f"d{step}")[-1].value is NO_VALUE
            return
        out = tmp_path / "out.pth"
        ckptool.save(after, out, force=True)
    wanted = {"d": mapping | {key: value}}
    loaded = torch.load(out, weights_only=False)
    assert list(loaded["d"].values()) == list(wanted["d"].values())
    assert list(map(type, loaded["d"])) == list(map(type, wanted["d"]))
    assert loaded["d"][key] == value


@pytest.mark.parametrize("text", ["a..b", ".a", "a[", "a[b'x]", "a]", "[(1", "[frozenset{1}]", "a(#1)", "[#]", "[1]a"])
def test_what_is_not_a_path(text: str) -> None:
    with pytest.raises(TargetError, match="is not a path"):
        parse_steps(text)


@given(st.text("ab.[]()#\"'\\{},1_ xe+-", max_size=12))
def test_a_text_is_a_path_or_not(text: str) -> None:
    """Nothing else is raised, and what is read is spelled so that it is read as the same."""
    try:
        steps = parse_steps(text)
    except TargetError:
        return
    again = "".join(step.step for step in steps)
    assert parse_steps(again.removeprefix(".")) == steps


# -- what is not a dict -----------------------------------------------------------------------------------------------


def odd(tmp_path: Path) -> Path:
    """Tensors in every corner of a pickle: arguments, states, slots, elements, keys, attributes called like keys."""
    numbers = iter(range(100))

    def one() -> Code:
        return tensor((1,), (1,), of=storage(str(next(numbers)), 1))

    made = call(name("pkg", "Made"), one(), 5, (one(),)).raw
    held = made + put({"x": one(), "y": [one()]}) + b"b"  # BUILD
    slots = made + put((None, {"s": one()})) + b"b"
    bare = made + put([one(), one()]) + b"b"
    items = made + b"(" + one().raw + one().raw + b"e"
    pairs = (
        made + b"(" + put("x") + one().raw + put(0) + one().raw + b"u(" + one().raw + b"e" + put({"x": one()}) + b"b"
    )
    filled = ordered().raw + put({"_metadata": {"a": {"version": one()}}, "other": one()}) + b"b"
    keyed = b"}(" + put((one(), 1)) + one().raw + put(one()) + put(1) + b"u"
    named = call(call(name("builtins", "getattr"), name("pkg", "Outer"), "Inner"), one()).raw
    deep: Any = one()
    for number in range(300):
        deep = {"k" * (number % 40): deep} if number % 2 else [one(), deep] if number < 4 else [deep]
    parts = [
        held,
        slots,
        bare,
        items,
        pairs,
        filled,
        keyed,
        named,
        put(deep),
        call(name("builtins", "set"), [one(), one()]).raw,
    ]
    value = Code(b"](" + b"".join(parts) + b"e")
    path = tmp_path / "odd.pth"
    path.write_bytes(plain(value, {str(number): struct.pack("<f", number) for number in range(40)}))
    return path


def test_every_corner_has_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = odd(tmp_path)
    with ckptool.open(path) as checkpoint:
        entries = checkpoint.survey.tensors
        assert len({entry.path for entry in entries}) == len(entries)
        assert {entry.tensor.storage for entry in entries} == checkpoint.survey.reader.storages.keys()
        for entry in entries:
            assert ckptool.get(checkpoint, entry.path).tensor == entry.tensor
            assert ckptool.keys(path, key=entry.path, all=True)["tensors"][0]["path"] == entry.path
        told = {entry["path"] for entry in ckptool.stats(path, all=True)["tensors"]}
        assert told == {entry.path for entry in entries}
    for entry in entries[::7]:
        assert run(["get", str(path), entry.path]) == 0
        assert run(["extract", str(path), entry.path, "-o", str(tmp_path / "o.pth"), "--force"]) == 0
    capsys.readouterr()


def shared_lists(count: int) -> Code:
    """Two and more OrderedDicts that are made of one list of pairs."""
    pairs = b"](" + b"".join(put(f"module.k{number}") + b"K\x01\x86" for number in range(count)) + b"e\x85q\x01"
    head = b"ccollections\nOrderedDict\nq\x02" + pairs
    return Code(head + b"0](" + b"h\x02h\x01R" * count + b"e")


def test_a_list_that_many_mappings_are_made_of_is_not_followed_for_each(tmp_path: Path) -> None:
    path = tmp_path / "shared.pth"
    path.write_bytes(plain(shared_lists(3000)))
    for command in (["keys", "--all"], ["inspect"], ["strip-module", "--dry-run"]):
        assert run([*command, str(path)]) == 3
    report = ckptool.validate(path)
    assert not report["valid"] and "share so many entries" in report["error"]


@pytest.mark.parametrize(
    "name", ["builtins set", "builtins frozenset", "builtins tuple", "builtins list", "collections deque", "torch Size"]
)
def test_a_list_that_many_calls_copy_is_not_followed_for_each(name: str, tmp_path: Path) -> None:
    path, count = tmp_path / "shared.pth", 3000
    numbers = b"](" + b"".join(b"M" + number.to_bytes(2, "little") for number in range(count)) + b"e\x85q\x01"
    head = b"c" + name.replace(" ", "\n").encode() + b"\nq\x02" + numbers
    path.write_bytes(plain(Code(head + b"0](" + b"h\x02h\x01R" * count + b"e")))
    for command in (["inspect"], ["keys", "--all"], ["hash"], ["sanitize", "--dry-run"]):
        assert run([*command, str(path)]) == 3
    assert run(["get", str(path), "."]) == 3
    assert "share so many entries" in ckptool.validate(path)["error"]


def test_lists_and_dicts_of_one_value_are_no_alarm(tmp_path: Path) -> None:
    """A million zeros are one node, and a hundred sets of a thousand numbers are of their own."""
    held = {"zeros": [0] * 300_000, "sets": [set(range(1000)) for _ in range(100)], "same": [{"a": 1}] * 100_000}
    path = saved(held, tmp_path / "a.pth")
    assert ckptool.validate(path)["valid"]
    assert ckptool.get(path, "zeros") == held["zeros"]
    assert ckptool.get(path, "sets[7]") == held["sets"][7]


def test_an_edit_of_one_leaves_the_other_that_is_made_of_the_same_list(tmp_path: Path) -> None:
    path, out = tmp_path / "shared.pth", tmp_path / "out.pth"
    path.write_bytes(plain(shared_lists(2)))
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.set(checkpoint, '[0]["module.k1"]', 7), out)
    assert [dict(one) for one in torch.load(out)] == [
        {"module.k0": 1, "module.k1": 7},
        {"module.k0": 1, "module.k1": 1},
    ]


def test_a_tensor_at_a_million_places_is_cut_off_and_said_so(tmp_path: Path) -> None:
    path = tmp_path / "places.pth"
    body = tensor((1,), (1,), of=storage("0", 1)).raw + b"q\x01](" + b"h\x01" * 300_000 + b"e\x86"
    for _ in range(6):
        body = b"}" + put("k" * 100) + body + b"s"
    path.write_bytes(plain(Code(body), {"0": bytes(4)}))
    with ckptool.open(path) as checkpoint:
        assert len(checkpoint.survey.tensors) == LIMITS.places + 1
        assert all(len(entry.path) < 2 * LIMITS.path_chars for entry in checkpoint.survey.tensors)
    report = ckptool.validate(path)
    assert "places" in report["not_checked"] and report["coverage"] == "partial"
    assert ckptool.keys(path, all=True)["in_file"] == 300_001


@needs_corpus
def test_paths_of_the_corpus_are_different() -> None:
    for path in corpus_files()[:40]:
        try:
            with ckptool.open(path) as checkpoint:
                paths = [entry.path for entry in checkpoint.survey.tensors]
                assert len(set(paths)) == len(paths), path
                for entry in checkpoint.survey.tensors[:: max(len(paths) // 5, 1)]:
                    assert ckptool.get(checkpoint, entry.path or ".").tensor == entry.tensor
        except CkptoolError:
            continue
