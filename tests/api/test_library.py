"""The library: what ``import ckptool`` gives, against torch and against the code that people write by hand."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from conftest import CHECKPOINTS, FIXTURES, GENERATORS, LOADABLE, ROOT, Fixture, by_name

import ckptool
from ckptool.base import errors
from ckptool.base.map_location import check_device, restored_location
from ckptool.files.sources import Span
from ckptool.formats.planning import plan_of
from ckptool.pickles.encode import encode

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Edit = Callable[[ckptool.Checkpoint], ckptool.Checkpoint]

#: What no edit is made of: cut files, and archives that two readers see differently.
REFUSED = {"truncated.pth", "truncated_legacy.pth", "zip_leading.pth", "zip_two_pickles.pth", "legacy_protocol0.pth"}
EDITABLE = [item for item in CHECKPOINTS if item.path.name not in REFUSED]
editable = pytest.mark.parametrize("fixture", EDITABLE, ids=by_name)


def fixture_path(name: str) -> str:
    return str(FIXTURES / name)


# -- load ---------------------------------------------------------------------------------------------------------

#: (file, key to give, path in the loaded object)
STATES: list[tuple[str, str | None, list[str | int]]] = [
    ("bare.pth", None, []),
    ("wrapped_module.pth", None, ["state_dict"]),
    ("ddp4_training.pth", None, ["state_dict"]),
    ("py2_legacy.pth", None, ["state_dict"]),
    ("list_of_states.pt", "[0]", [0]),
    ("list_of_states.pt", "[1]", [1]),
    ("nested_twice.pth", None, ["checkpoint", "model"]),
    ("nested_twice.pth", "checkpoint.model", ["checkpoint", "model"]),
    ("gan.pth", "netG", ["netG"]),
    ("dotted_names.pth", 'callbacks["a.b"]', ["callbacks", "a.b"]),
    ("mean_std.pth", None, ["model"]),
    ("mean_std.pth", "normalizer", ["normalizer"]),
    ("some_module.pth", ".", []),
    ("shared_views.pth", None, []),
    ("big_endian.pth", None, []),
]


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize(("name", "key", "steps"), STATES, ids=lambda value: str(value))
@pytest.mark.parametrize("prefix", [None, "module.", "module", "conv1."])
def test_load_equals_the_three_lines_of_everybody(
    name: str, key: str | None, steps: list[str | int], prefix: str | None
) -> None:
    state: Any = torch.load(fixture_path(name), map_location="cpu", weights_only=True)
    for step in steps:
        state = state[step]
    loaded = ckptool.load(fixture_path(name), map_location="cpu", strip_prefix=prefix, key=key)
    if prefix is None:
        assert type(loaded) is type(state) and oracle.difference(state, loaded) == ""
        return
    head = prefix.removesuffix(".") + "."
    naive = {(k[len(head) :] if k.startswith(head) else k): v for k, v in state.items()}
    assert isinstance(loaded, dict)
    assert oracle.difference(naive, dict(loaded)) == ""


def test_a_model_takes_what_load_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GENERATORS)
    from demo_model import SegNet  # type: ignore[import-not-found]

    model = SegNet()
    loaded = ckptool.load(fixture_path("ddp4_training.pth"), map_location="cpu", strip_prefix="module.")
    assert str(model.load_state_dict(loaded, strict=True)) == "<All keys matched successfully>"
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
    assert model.eval()(torch.zeros(1, 3, 16, 16)).shape == (1, 5, 16, 16)


@pytest.mark.parametrize(
    ("name", "how", "kind", "words"),
    [
        ("tensor.pt", {}, errors.TargetError, "no state dict"),
        ("gan.pth", {}, errors.TargetError, "2 state dicts: 'netG' and 'netD'"),
        ("gan.pth", {"key": "netX"}, errors.TargetError, "netX"),
        ("gan.pth", {"key": "net["}, errors.TargetError, "not a path"),
        ("wrapped.pth", {"strip_prefix": ""}, errors.TargetError, "prefix"),
        ("collision.pth", {"strip_prefix": "module."}, errors.RefusedError, "'module.a'"),
        ("hostile_system.pth", {}, errors.UnreadableError, "torch.load refuses"),
        ("lfs_pointer.pth", {}, errors.NotACheckpointError, "Git LFS"),
        ("truncated.pth", {}, errors.MalformedError, "cut"),
        ("nowhere.pth", {}, errors.UnreadableError, "no such file"),
    ],
)
def test_load_says_what_is_wrong(name: str, how: dict[str, Any], kind: type, words: str) -> None:
    with pytest.raises(ckptool.CkptoolError) as caught:
        ckptool.load(fixture_path(name), "cpu", **how)
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert caught.value.path == fixture_path(name) or words in ("prefix", "not a path")


# -- locations ----------------------------------------------------------------------------------------------------


TAGS = ["cpu", "cuda", "cuda:0", "cuda:1", "meta", "mps", "xpu:0"]
LOCATIONS: list[Any] = [None, "cpu", "cuda:0", "meta", {}, {"cuda:1": "cuda:0"}, {"cuda:0": "cpu", "cpu": "cuda:0"}]


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("location", LOCATIONS, ids=str)
@pytest.mark.parametrize("tag", TAGS)
def test_lands_on_as_torch_decides(tag: str, location: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function, with the last step, which needs the device, replaced by its argument."""
    monkeypatch.setattr(torch.serialization, "default_restore_location", lambda _storage, place: place)
    decide: Callable[..., str] = torch.serialization._get_restore_location(location)  # type: ignore[no-untyped-call]
    assert restored_location(tag, location) == decide(None, tag)


#: torch 2.13 segfaults when it swaps the bytes of a tensor that it puts on meta.
CRASHES = {("big_endian.pth", "meta")}
LANDINGS = [(item, location) for item in LOADABLE for location in ("cpu", "meta") if item.path.name not in REFUSED]
LANDINGS = [(item, location) for item, location in LANDINGS if (item.path.name, location) not in CRASHES]


@pytest.mark.parametrize(
    ("fixture", "location"), LANDINGS, ids=lambda value: getattr(value, "path", Path(str(value))).name
)
def test_inspect_says_where_torch_puts_the_tensors(fixture: Fixture, location: str) -> None:
    report = ckptool.inspect(fixture.path, map_location=location)
    try:
        loaded = torch.load(fixture.path, map_location=location, weights_only=True)
    except (RuntimeError, NotImplementedError, AttributeError):
        pytest.skip("torch itself cannot load these there")
    found = {str(tensor.device) for tensor in _tensors(loaded)}
    assert found <= {item["lands_on"] for item in report["devices"]}
    assert found or not any(item["tensors"] for item in report["devices"])


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


# -- device maps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "moves"),
    [
        (ckptool.DeviceMap("cpu"), {"cuda:0": "cpu", "mps": "cpu", "cpu": "cpu", "meta": "meta"}),
        (ckptool.DeviceMap("cuda:0"), {"cuda:1": "cuda:0", "cuda": "cuda:0", "cpu": "cpu", "meta": "meta"}),
        (ckptool.DeviceMap("cuda:0", include_cpu=True), {"cpu": "cuda:0", "meta": "cuda:0", "xpu:1": "cuda:0"}),
        (ckptool.DeviceMap(map={"cuda:1": "cuda:0"}), {"cuda:1": "cuda:0", "cuda:0": "cuda:0", "cuda:11": "cuda:11"}),
        (ckptool.DeviceMap(map={"cuda:*": "cpu"}), {"cuda:7": "cpu", "cuda": "cpu", "xpu:0": "xpu:0", "cpu": "cpu"}),
        # A swap is one step: what arrives is not moved again.
        (ckptool.DeviceMap(map={"cuda:0": "cuda:1", "cuda:1": "cuda:0"}), {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}),
        # The first that applies: the device itself, then the star, then visible, then to.
        (ckptool.DeviceMap(map={"cuda:*": "cpu", "cuda:1": "meta"}), {"cuda:1": "meta", "cuda:0": "cpu"}),
        (ckptool.DeviceMap("cpu", {"cuda:1": "cuda:0"}), {"cuda:1": "cuda:0", "cuda:0": "cpu", "xpu:0": "cpu"}),
        (ckptool.DeviceMap(visible=(1, 3)), {"cuda:1": "cuda:0", "cuda:3": "cuda:1", "cpu": "cpu", "cuda": "cuda"}),
        (ckptool.DeviceMap(visible=(3,), map={"cuda:1": "cpu"}), {"cuda:3": "cuda:0", "cuda:1": "cpu"}),
        (ckptool.DeviceMap(visible=(3,), map={"cuda:3": "cuda:5"}), {"cuda:3": "cuda:5"}),
    ],
    ids=str,
)
def test_a_device_map_moves(devices: ckptool.DeviceMap, moves: dict[str, str]) -> None:
    devices.check()
    assert {device: devices(device) for device in moves} == moves


@pytest.mark.parametrize(
    "devices",
    [
        ckptool.DeviceMap(),
        ckptool.DeviceMap("gpu"),
        ckptool.DeviceMap(map={"cuda:1": "cuda0"}),
        ckptool.DeviceMap(map={"": "cpu"}),
        ckptool.DeviceMap(map={"cuda:1": "cuda:*"}),
        ckptool.DeviceMap(visible=(1, 1)),
    ],
    ids=str,
)
def test_what_is_no_device_map(devices: ckptool.DeviceMap) -> None:
    with pytest.raises(errors.TargetError):
        devices.check()
    with ckptool.open(fixture_path("gan.pth")) as checkpoint, pytest.raises(errors.TargetError):
        ckptool.remap(checkpoint, devices)


TARGETS = ["cpu", "meta", "mps", "cuda", "cuda:0", "cuda:9", "xpu", "xpu:0", "hpu", "hpu:1", "mtia", "mtia:0"]
NO_TARGETS = ["cpu:0", "cuda0", "CUDA:0", "Cpu", "gpu", "gpu:0", "", "cuda:", "cuda:x", "cuda:0:1", "meta:x", "xla:0"]
NO_TARGETS += ["cuda:-1", " cpu", "cuda:0 ", "cuda:\u0660", "cpu\n"]


@pytest.mark.parametrize("target", TARGETS + NO_TARGETS)
def test_a_target_is_what_torch_could_restore(target: str) -> None:
    """torch restores a storage to the device, or knows the device and misses it; else it is no target."""
    try:
        storage: Any = torch.zeros(1).untyped_storage()
        torch.serialization.default_restore_location(storage, target)  # type: ignore[no-untyped-call]
        known = True
    except (RuntimeError, AttributeError, AssertionError, NotImplementedError) as error:
        known = "don't know how to restore" not in str(error) and "nvalid device string" not in str(error)
    assert known is (target in TARGETS) or target in ("xla:0", "cuda:-1", "meta:x", "cuda:x")
    if target in TARGETS:
        check_device(target)
    else:
        with pytest.raises(errors.TargetError):
            check_device(target)


# -- edits are pure -------------------------------------------------------------------------------------------------


EDITS: dict[str, Edit] = {
    "strip": ckptool.strip_module,
    "wrappers": ckptool.strip_wrappers,
    "add": ckptool.add_module,
    "cpu": lambda checkpoint: ckptool.remap(checkpoint, ckptool.DeviceMap("cpu"), strings=True),
    "gpu": lambda checkpoint: ckptool.remap(checkpoint, ckptool.DeviceMap("cuda:1", include_cpu=True)),
}


def output(checkpoint: ckptool.Checkpoint) -> bytes:
    """The file that a checkpoint would be saved as."""
    plan, _ = plan_of(checkpoint)
    return b"".join(p.source.read(p.offset, p.size) if isinstance(p, Span) else p for p in plan.pieces)


def facts(checkpoint: ckptool.Checkpoint) -> object:
    """Everything that can be seen of a checkpoint."""
    return (
        encode(checkpoint.graph),
        checkpoint.changes,
        checkpoint.edited,
        [entry._replace(tensor=entry.tensor) for entry in checkpoint.survey.tensors],
        checkpoint.state_dicts,
        checkpoint.survey.devices,
        list(checkpoint.survey.reader.storages.items()),
    )


@editable
def test_an_edit_leaves_its_input_alone(fixture: Fixture) -> None:
    with ckptool.open(fixture.path) as checkpoint, ckptool.open(fixture.path) as untouched:
        before = facts(untouched)
        for name, edit in EDITS.items():
            try:
                edited = edit(checkpoint)
                edited.survey  # noqa: B018
                output(edited)
            except errors.RefusedError:
                assert fixture.path.name == "collision.pth"
            assert facts(checkpoint) == before, name


# -- the rest of the library ------------------------------------------------------------------------------------------


def test_open_takes_a_path_and_closes_its_file() -> None:
    for path in (fixture_path("bare.pth"), Path(fixture_path("bare.pth"))):
        with ckptool.open(path) as checkpoint:
            assert checkpoint.path == fixture_path("bare.pth")
            assert "bare.pth" in repr(checkpoint) and "torch-zip" in repr(checkpoint)
        assert checkpoint.source.fd == -1  # type: ignore[attr-defined]
        assert len(checkpoint.survey.tensors) == 9  # what was read stays
        checkpoint.close()


def test_a_failed_open_leaves_no_file_open(tmp_path: Path) -> None:
    fds = Path("/proc/self/fd")
    if not fds.is_dir():
        pytest.skip("there is no /proc")
    before = len(list(fds.iterdir()))
    for name in ("truncated.pth", "lfs_pointer.pth", "empty.pth", "truncated_legacy.pth", "bare.pkl"):
        for _ in range(3):
            try:
                ckptool.open(fixture_path(name)).close()
            except ckptool.CkptoolError as error:
                assert error.path == fixture_path(name)
    assert len(list(fds.iterdir())) <= before


def test_errors_have_facts_as_fields() -> None:
    with pytest.raises(errors.NotACheckpointError) as caught:
        ckptool.open(fixture_path("lfs_pointer.pth"))
    error = caught.value
    assert (error.kind, error.next, error.exit_code) == ("git-lfs-pointer", "git lfs pull fetches it", 3)
    assert str(error) == f"{error.path}: {error.what}"
    assert isinstance(error, ckptool.CkptoolError)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, ckptool.CkptoolError)}
    assert codes == {2, 3, 4, 5, 70}


def test_each_public_name_is_listed_once_and_the_same_everywhere() -> None:
    """A type checker, a lazy import and ``from ckptool import *`` know the same names."""
    tree = ast.parse((ROOT / "ckptool" / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    typed = [alias.asname or alias.name for node in checked.body for alias in getattr(node, "names", ())]
    lazily = list(ckptool._MODULES)
    assert sorted(typed) == sorted(lazily)
    assert ckptool.__all__ == sorted([*typed, "__version__", "errors"])
    functions = [getattr(ckptool, name) for name in ckptool.__all__]
    assert len({id(function) for function in functions}) == len(functions)
