"""What ``salvage`` gives back: all that is whole, bit for bit, and never a wrong tensor."""

from __future__ import annotations

import io
import json
import shlex
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from conftest import WHOLE, sample
from crafted_files import Code, archive, entries, legacy, name, put, report_of, tensor, with_status

import ckptool
from ckptool.cli.main import run

SIZE = 24


def floats(number: int) -> bytes:
    return struct.pack(f"<{SIZE}f", *(number * 100 + n for n in range(SIZE)))


def value(extra: tuple[object, ...] = ()) -> dict[str, object]:
    def held(key: str) -> Code:
        return Code(put(("storage", name("torch", "FloatStorage"), key, "cpu", SIZE, *extra)) + b"Q")

    return {"epoch": 3, "a": tensor((SIZE,), of=held("0")), "b": tensor((SIZE,), of=held("1")), "names": ["x", "y"]}


ZIP = archive(entries(value(), {"0": floats(1), "1": floats(2)}).values())
LEGACY = legacy(value((None,)), {"0": (SIZE, floats(1)), "1": (SIZE, floats(2))})


def loaded(data: bytes) -> dict[str, Any]:
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert isinstance(found, dict)
    return found


def rescued(path: Path, out: Path, data: bytes) -> dict[str, Any] | None:
    """What salvage saves of some bytes, loaded by torch; None for a clean refusal."""
    path.write_bytes(data)
    out.unlink(missing_ok=True)
    try:
        found = ckptool.salvage(path)
    except ckptool.CkptoolError as error:
        assert error.exit_code == 3
        return None
    with found.checkpoint:
        ckptool.save(found.checkpoint, out)
    return loaded(out.read_bytes())


def wrong(found: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """The keys under which a tensor is another than it was."""
    return [
        key
        for key, item in found.items()
        if isinstance(item, torch.Tensor)
        and not (isinstance(whole.get(key), torch.Tensor) and oracle.difference(item, whole[key]) == "")
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [ZIP, LEGACY], ids=["zip", "legacy"])
def test_cut_at_every_offset(seed: bytes, tmp_path: Path) -> None:
    """Exactly the tensors whose bytes lie before the cut, and everything that is no tensor."""
    whole = loaded(seed)
    # A zip tells the end of a record by the descriptor behind it.
    behind = 16 if seed is ZIP else 0
    ends = {key: seed.index(floats(number)) + 4 * SIZE for key, number in (("a", 1), ("b", 2))}
    for size in sample(range(len(seed)), 3):
        assert report_of(tmp_path / "cut.pth", seed[:size])["status"] != "valid", size
        found = rescued(tmp_path / "cut.pth", tmp_path / "out.pth", seed[:size])
        there = {key for key, end in ends.items() if end + behind <= size}
        if found is None:
            assert not there, size
            continue
        assert {key for key, item in found.items() if isinstance(item, torch.Tensor)} == there, size
        assert wrong(found, whole) == [], size
        assert (found["epoch"], found["names"]) == (3, ["x", "y"])


def seed_of_torch() -> bytes:
    out = io.BytesIO()
    torch.save(OrderedDict((f"layer{n}.weight", torch.arange(32.0).reshape(4, 8) + 100 * n) for n in range(3)), out)
    return out.getvalue()


SEED = seed_of_torch()


def with_flip(data: bytes, offset: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 1 << bit
    return bytes(changed)


@pytest.mark.sampled
def test_one_flipped_bit_never_gives_a_wrong_tensor(tmp_path: Path) -> None:
    """One bit of each seventh byte, another one from byte to byte; of each third byte in ``make torture``."""
    assert 2000 < len(SEED) < 3000
    whole = loaded(SEED)
    losses = 0
    for offset in range(0, len(SEED), 3 if WHOLE else 7):
        flipped = with_flip(SEED, offset, (offset * 5 + 3) % 8)
        try:
            found = rescued(tmp_path / "flipped.pth", tmp_path / "out.pth", flipped)
        except (ValueError, RuntimeError):  # torch refuses the output: see below
            continue
        losses += found is None or len(found) < 3
        assert found is None or wrong(found, whole) == [], offset
    assert losses > 40


@pytest.mark.parametrize("record", [b".storage_alignment", b".data/serialization_id"])
def test_torch_loads_what_is_saved_after_a_flip_in_a_small_record(record: bytes, tmp_path: Path) -> None:
    begin = SEED.index(b"archive/" + record)
    payload = SEED.index(b"PK\x07\x08", begin) - 1
    found = rescued(tmp_path / "flipped.pth", tmp_path / "out.pth", with_flip(SEED, payload, 7))
    assert found is not None and wrong(found, loaded(SEED)) == []


def entry_of(data: bytes, record: bytes) -> int:
    """Where the directory's entry of a record begins."""
    return data.rindex(b"archive/" + record) - 46


@pytest.mark.sampled
def test_what_is_valid_after_a_flip_in_the_directory_loads_unchanged(tmp_path: Path) -> None:
    """Bits of an entry of the directory and of the end records: every third, or all in ``make torture``."""
    path, whole = tmp_path / "flipped.pth", loaded(SEED)
    entry, end = entry_of(SEED, b"version"), SEED.index(b"PK\x06\x06")
    bad = []
    for offset in (*range(entry, entry + 46 + len("archive/version")), *range(end, len(SEED))):
        for bit in sample(range(8), 3, first=offset):
            if report_of(path, with_flip(SEED, offset, bit))["status"] == "valid":
                try:
                    good = wrong(loaded(path.read_bytes()), whole) == []
                except (RuntimeError, ValueError):
                    good = False
                bad += [] if good else [(offset - entry, offset - end, bit)]
    assert bad == []


def test_every_flip_in_a_payload_is_caught(tmp_path: Path) -> None:
    for number in (1, 2):
        begin = ZIP.index(floats(number))
        for offset in range(begin, begin + 4 * SIZE):
            changed = bytearray(ZIP)
            changed[offset] ^= 1 << offset % 8
            report = report_of(tmp_path / "flipped.pth", bytes(changed))
            assert (report["status"], with_status(report, "fail")) == ("invalid", ["checksums"]), offset


def test_every_flip_in_a_pickle_is_caught(tmp_path: Path) -> None:
    begin = ZIP.index(b"\x80\x02")
    for offset in range(begin, ZIP.index(b"PK\x07\x08")):
        changed = bytearray(ZIP)
        changed[offset] ^= 1 << offset % 8
        assert report_of(tmp_path / "flipped.pth", bytes(changed))["status"] != "valid", offset


# -- what it keeps ----------------------------------------------------------------------------------------------


def saved(path: Path, obj: object, share: float, old: bool = False) -> int:
    """Save it with torch, cut it at a share of its size; how many bytes are left."""
    torch.save(obj, path, _use_new_zipfile_serialization=not old)
    size = int(path.stat().st_size * share)
    path.write_bytes(path.read_bytes()[:size])
    return size


def test_holes_in_lists_are_none(tmp_path: Path) -> None:
    path, out = tmp_path / "list.pth", tmp_path / "out.pth"
    tensors = [torch.arange(300.0) + n for n in range(4)]
    saved(path, {"list": [1, *tensors, "end"], "tuple": tuple(tensors)}, 0.6)
    said = say("salvage", path, "-o", out)
    assert said.code == 1
    found = torch.load(out, weights_only=True)
    assert found["list"][0] == 1 and found["list"][-1] == "end" and len(found["list"]) == 6
    kept = [item is not None for item in found["list"][1:-1]]
    assert kept == sorted(kept, reverse=True) and any(kept) and not all(kept)
    assert all(item is None or torch.equal(item, tensors[n]) for n, item in enumerate(found["list"][1:-1]))


def test_what_was_shared_stays_shared(tmp_path: Path) -> None:
    path, out = tmp_path / "tied.pth", tmp_path / "out.pth"
    base = torch.arange(400.0)
    tied = torch.nn.Parameter(torch.ones(400))
    obj = {
        "base": base,
        "view": base[10:20],
        "t": base.reshape(20, 20).t(),
        "one": tied,
        "two": tied,
        "lost": torch.zeros(4000),
    }
    saved(path, obj, 0.5)
    assert run(["salvage", "-q", str(path), "-o", str(out)]) == 1
    found = torch.load(out, weights_only=True)
    assert list(found) == ["base", "view", "t", "one", "two"]
    assert found["base"].data_ptr() + 40 == found["view"].data_ptr()
    assert found["t"].data_ptr() == found["base"].data_ptr()
    assert found["one"] is found["two"]
    assert found["t"].stride() == (1, 20)


def test_nothing_whole_writes_nothing(tmp_path: Path) -> None:
    path, out = tmp_path / "cut.pth", tmp_path / "out.pth"
    path.write_bytes(ZIP[: ZIP.index(floats(1)) + 8])
    assert (say("salvage", path, "-o", out).code, out.exists()) == (3, False)


# -- linear time -----------------------------------------------------------------------------------------------


def test_a_folder_in_the_archive_whose_name_is_too_long_is_renamed(tmp_path: Path) -> None:
    """Names of torch's own records would be longer than its reader supports."""
    path, out = tmp_path / "long.pth", tmp_path / "out.pth"
    path.write_bytes(archive(entries(root="x" * 500).values()))
    assert say("salvage", path, "-o", out).code in (0, 1)
    assert torch.load(out, weights_only=True).keys() == torch.load(path, weights_only=True).keys()
    assert ckptool.validate(out)["status"] == "valid"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_cut_module_is_saved_with_the_parameters_that_are_whole(is_legacy: bool, tmp_path: Path) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    path, out = tmp_path / "in.pt", tmp_path / "out.pt"
    torch.save({"epoch": 1, "model": layers}, path, _use_new_zipfile_serialization=not is_legacy)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    said = say("salvage", path, "-o", out)
    assert said.code == 1, said.all
    loaded = torch.load(out, weights_only=False)["model"]
    saved = {name: value for name, value in loaded.named_parameters() if value is not None}
    # A legacy file has the storages in the order of their addresses, so the first half may have weights alone.
    assert 3 <= len(saved) < 16
    assert all(torch.equal(value, layers.state_dict()[name]) for name, value in saved.items())


# -- what is whole ----------------------------------------------------------------------------------------------

#: Optimizers, with what makes them keep several values for each parameter.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9},
}
#: How programs nest the model and the optimizer: the paths of both, and the entry of the optimizer.
LAYOUTS = {
    "plain": ("model", "optimizer", "optimizer"),
    "Lightning": ("state_dict", "optimizer_states[0]", "optimizer_states"),
    "nested": ("run.model", "run.optimizer", "run.optimizer"),
}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))


def stepped(name: str, model: torch.nn.Module, state: dict[str, Any] | None = None) -> torch.optim.Optimizer:
    """An optimizer after one step, which begins with this state."""
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **OPTIMIZERS[name])
    if state is not None:
        optimizer.load_state_dict(state)
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    return optimizer  # type: ignore[no-any-return]


def training(layout: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if layout == "Lightning":
        return {"epoch": 3, "state_dict": parts["model"], "optimizer_states": [parts["optimizer"]]}
    return {"epoch": 3, **parts} if layout == "plain" else {"epoch": 3, "run": parts}


def inner(loaded: dict[str, Any], layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of the model and of the optimizer."""
    if layout == "Lightning":
        return loaded["state_dict"], loaded["optimizer_states"][0]
    parts = loaded if layout == "plain" else loaded["run"]
    return parts["model"], parts["optimizer"]


def count(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(count, value.values() if isinstance(value, dict) else value))
    return int(isinstance(value, torch.Tensor))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_state_says_whether_it_is_whole_and_training_starts_from_the_weights(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    model = network()
    whole = training(layout, model, stepped(name, model))
    own, optimizer, entry = LAYOUTS[layout]
    totals = dict(zip((own, optimizer), map(count, inner(whole, layout))))
    seen = set()
    for share in (0.2, 0.4, 0.6, 0.7, 0.8, 0.9):
        saved(Path("cut.pth"), whole, share)
        try:
            found = ckptool.salvage("cut.pth")
        except ckptool.CkptoolError:
            continue
        states = {state["path"]: state for state in found.states}
        assert {path: state["total"] for path, state in states.items()} == totals
        assert sum(state["saved"] for state in states.values()) == found.saved
        assert sum(state["total"] - state["saved"] for state in states.values()) == len(found.lost)
        said = say("salvage", "cut.pth", "-o", f"out{share}.pth")
        report = json.loads(say("salvage", "cut.pth", "-o", f"out{share}.pth", "--force", "--json").out)
        assert report["states"] == list(found.states)
        found.checkpoint.close()
        loaded = torch.load(f"out{share}.pth", weights_only=True)
        assert [states[path]["saved"] for path in totals] == [*map(count, inner(loaded, layout))]
        for path, state in states.items():
            is_whole = state["saved"] == state["total"]
            line = f"all {state['total']} tensors" if is_whole else f"{state['saved']} of {state['total']} tensors; inc"
            assert (f"  {path}: {line}" in said.out) == bool(found.lost)
        is_broken = states[own]["saved"] == totals[own] and states[optimizer]["saved"] < totals[optimizer]
        assert states[optimizer]["drop"] == (entry if is_broken else "") and states[own]["drop"] == ""
        assert report["next"] == (said.out.rpartition("\n  -> ")[2].strip() if is_broken else "")
        if not is_broken:
            seen.add("model")
            continue
        seen.add("optimizer")
        lacks, state = states[optimizer]["lacks"], inner(loaded, layout)[1]
        if lacks:
            with pytest.raises(KeyError) as error:
                stepped(name, network(), state)
            assert error.value.args[0] in lacks and f"KeyError: {error.value}" in said.out
        else:
            stepped(name, network(), state)
        words = shlex.split(report["next"])
        assert say(*words[1:]).code == 0
        rest = torch.load(words[-1], weights_only=True)
        assert rest.keys() == whole.keys() - {entry} and rest["epoch"] == 3
        assert count(rest) == totals[own]
        again = network()
        again.load_state_dict((rest["run"] if layout == "nested" else rest)[own.rpartition(".")[2]])
        assert all(torch.equal(again.state_dict()[key], value) for key, value in inner(whole, layout)[0].items())
    assert seen == {"model", "optimizer"}
