"""average against torch's own sums."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from conftest import FIXTURES, Fixture
from output_checks import checked, every, saved
from tensor_storages import tensors
from zip_copies import deflated

import ckptool
from ckptool.base.errors import RefusedError, TargetError
from ckptool.base.globs import Globs
from ckptool.checkpoint.paths import parse_path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def averaged(paths: list[Path], out: Path, **how: Any) -> Any:
    opened = [ckptool.open(path) for path in paths]
    ckptool.save(ckptool.average(opened, **how), out, force=True)
    for checkpoint in opened:
        checkpoint.close()
    return checked(out, *paths)


def mean(values: list[torch.Tensor], weights: list[float], wide: torch.dtype = torch.float64) -> torch.Tensor:
    """Whole storages, so that what is shared stays so; the first one's integers."""
    total = sum(value.to(wide) * weight for value, weight in zip(values, weights))
    assert isinstance(total, torch.Tensor)
    return (total / sum(weights)).to(values[0].dtype)


def perturbed(path: Path, out: Path, seed: int) -> Path:
    """A copy with other floats; everything else, sharing included, is the same."""
    loaded = oracle.load(path)
    torch.manual_seed(seed)
    seen: set[int] = set()
    for _, tensor in tensors(loaded):
        strided = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
        if not strided or not tensor.is_floating_point() or tensor.untyped_storage().data_ptr() in seen:
            continue
        if tensor.dtype is torch.float4_e2m1fn_x2:
            continue
        seen.add(tensor.untyped_storage().data_ptr())
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), 0, (count,))
        flat.copy_((torch.randn(count) * 3).to(tensor.dtype))
    return saved(loaded, out)


@every
@pytest.mark.parametrize("count", [2, 4])
def test_every_file(item: Fixture, count: int, out: Path, tmp_path: Path) -> None:
    with ckptool.open(item.path) as checkpoint:
        states = [parse_path(found.path) for found in checkpoint.state_dicts if found.confidence == "high"]
    paths = [perturbed(item.path, tmp_path / f"{seed}.pth", seed) for seed in range(count)]
    weights = [1.0, 2.0, 0.25, -0.5][:count]
    loaded = [oracle.load(path) for path in paths]
    if not states:
        with pytest.raises(RefusedError, match="no floating tensor"):
            averaged(paths, out, weights=weights)
        return
    parts = []
    for value in loaded:
        inside = []
        for steps in states:
            state = value
            for step in steps:
                state = state[step]
            if any(key.endswith("._packed_params._packed_params") for key in state):
                # The scale of a quantized layer of torch.ao is a float tensor, and its codes have no mean.
                with pytest.raises(RefusedError, match="quantized weights"):
                    averaged(paths, out, weights=weights)
                return
            inside += [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor)]
        parts.append(inside)
    seen: set[int] = set()
    for same in zip(*parts, strict=True):
        first = same[0]
        strided = first.layout is torch.strided and not first.is_nested and not first.is_meta
        if not strided or not first.is_floating_point() or first.dtype is torch.float4_e2m1fn_x2:
            continue
        if first.untyped_storage().data_ptr() in seen:
            continue
        seen.add(first.untyped_storage().data_ptr())
        # The stored bytes: a negative bit is that of the first.
        flat = [torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for t in same]
        flat[0].copy_(mean(flat, weights))
    if not seen:
        with pytest.raises(RefusedError, match="no floating tensor"):
            averaged(paths, out, weights=weights)
        return
    assert oracle.difference(loaded[0], averaged(paths, out, weights=weights)) == ""


@pytest.mark.parametrize("weights", [[math.inf, 1], [math.nan, 1], [1, -1], [1e308, -1e308], [0, 0], [10**400, 1]])
def test_weights_without_a_ratio(weights: list[float], tmp_path: Path) -> None:
    paths = [saved({"a.w": torch.ones(2)}, tmp_path / f"{number}.pth") for number in range(2)]
    with pytest.raises(TargetError, match=r"sum is not zero|must be finite"):
        ckptool.average(paths, weights=weights)


def test_large_tensors_are_averaged_in_pieces(tmp_path: Path, out: Path) -> None:
    """The files are read in pieces that do not go together: one of them has its storages compressed."""
    states = [{"a.w": torch.randn(700_001), "b.w": torch.randn(300_003).half()} for _ in range(2)]
    paths = [saved(state, tmp_path / f"{number}.pth") for number, state in enumerate(states)]
    found = averaged([paths[0], deflated(paths[1], tmp_path / "deflated.pth")], out)
    assert oracle.difference({k: mean([s[k] for s in states], [1, 1]) for k in states[0]}, found) == ""


def test_between_formats_and_byte_orders(tmp_path: Path, out: Path) -> None:
    path = FIXTURES / "big_endian.pth"
    state = oracle.load(path)
    legacy = saved(state, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    plain = saved({key: value + value for key, value in state.items()}, tmp_path / "plain.pth")
    for paths in ([path, legacy, plain], [plain, path, legacy], [legacy, plain, path]):
        loaded = [oracle.load(one) for one in paths]
        for key, value in loaded[0].items():
            if value.is_floating_point():
                value.copy_(mean([one[key] for one in loaded], [1.0] * 3))
        assert oracle.difference(loaded[0], averaged(paths, out)) == ""


def test_a_choice_of_keys_and_state_dicts(tmp_path: Path, out: Path) -> None:
    states = [{"net": {"a.w": torch.full((2,), n), "b.w": torch.full((int(n),), n)}, "ema": {"a.w": torch.ones(1) * n}}
              for n in (1.0, 3.0)]  # fmt: skip
    paths = [saved(state, tmp_path / f"{number}.pth") for number, state in enumerate(states)]
    for only in (Globs([], ["b.*"]), Globs(["a.*"]), Globs(['net["a*']), Globs([], ['*["b*'])):
        found = averaged(paths, out, **only.patterns, key="net")
        assert found["net"]["a.w"].tolist() == [2.0, 2.0] and found["net"]["b.w"].tolist() == [1.0]
        assert found["ema"]["a.w"].tolist() == [1.0]


def test_what_does_not_go_together(tmp_path: Path) -> None:
    base = {"a.w": torch.ones(4), "b.w": torch.ones(2)}
    flat = torch.ones(8)
    others = {
        "shape": ({**base, "b.w": torch.ones(3)}, r"'b\.w' is float32 \[3\] here and float32 \[2\]"),
        "dtype": ({**base, "b.w": torch.ones(2).half()}, r"'b\.w' is float16"),
        "missing": ({"a.w": base["a.w"]}, r"no tensor 'b\.w'"),
        "layout": ({**base, "a.w": torch.ones(8)[::2]}, "slim"),
        "shared": ({"a.w": flat[:4], "b.w": flat[4:6]}, "slim"),
    }
    path = saved(base, tmp_path / "in.pth")
    with ckptool.open(path) as checkpoint:
        for name, (value, words) in others.items():
            with ckptool.open(saved(value, tmp_path / name)) as other, pytest.raises(RefusedError, match=words):
                ckptool.average([checkpoint, other])
        with pytest.raises(TargetError):
            ckptool.average([checkpoint])


def test_what_is_not_averaged_does_not_change(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pth", tmp_path / "b.pth"]
    for number, path in enumerate(paths):
        both = torch.arange(10.0) * (number + 1)
        torch.save({"a": both[:5], "b": both[5:]}, path)
    checkpoints = [ckptool.open(path) for path in paths]
    with pytest.raises(RefusedError, match="shares its storage"):
        ckptool.average(checkpoints, include=["a"])


def test_a_negative_bit_in_one_input_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a.pth", tmp_path / "b.pth"]
    torch.save({"w": torch._neg_view(torch.tensor([1.0, 2.0]))}, paths[0])
    torch.save({"w": torch.tensor([5.0, 7.0])}, paths[1])
    with pytest.raises(RefusedError, match="negative bit"):
        ckptool.average([ckptool.open(path) for path in paths])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("weights", [None, [0.5, 1.5], [-0.3, 1e-3]])
def test_differences_from_a_base_are_added(dtype: str, weights: list[float] | None, tmp_path: Path, out: Path) -> None:
    torch.manual_seed(3)
    own = getattr(torch, dtype)
    states = [{"w": torch.randn(50, 7).to(own), "n": torch.tensor(number)} for number in range(4)]
    a, b, c, base = (state["w"].double() for state in states)
    one, other = weights or [1.0, 1.0]
    expected = (a + one * (b - base) + other * (c - base)).to(own)
    paths = [saved(state, tmp_path / f"{number}.pth") for number, state in enumerate(states)]
    found = averaged(paths[:3], out, weights=weights, base=paths[3])
    assert oracle.difference({"w": expected, "n": states[0]["n"]}, found) == ""


def test_weights_of_differences(tmp_path: Path) -> None:
    paths = [saved({"w": torch.ones(2)}, tmp_path / f"{number}.pth") for number in range(3)]
    for weights in ([1], [1, 2, 3], [math.inf, 1], [10**400, 1]):
        with pytest.raises(TargetError):
            ckptool.average(paths, weights=weights, base=paths[0])
    with pytest.raises(TargetError):
        ckptool.average(paths[:1], base=paths[0])


def test_a_flipped_bit_in_the_base_is_found(tmp_path: Path) -> None:
    paths = [saved({"w": torch.randn(100)}, tmp_path / f"{number}.pth") for number in range(3)]
    data = bytearray(paths[2].read_bytes())
    data[data.index(oracle.load(paths[2])["w"].numpy().tobytes()) + 7] ^= 1
    paths[2].write_bytes(data)
    said = say("average", paths[0], paths[1], "--base", paths[2], "-o", tmp_path / "out.pth")
    assert said.code == 3 and not (tmp_path / "out.pth").exists(), said.all


@pytest.mark.parametrize("name", ["epoch", "global_step", "step", "iteration", "iter"])
@pytest.mark.parametrize("latest", [0, 1, 2])
def test_entries_come_from_the_latest(name: str, latest: int, tmp_path: Path, out: Path) -> None:
    torch.manual_seed(2)
    numbers = [3, 3, 3]
    numbers[latest] = 12
    files = [{"state_dict": {"a.w": torch.randn(5)}, name: n, "lr": 0.1 * i} for i, n in enumerate(numbers)]
    paths = [saved(file, tmp_path / f"{number}.pth") for number, file in enumerate(files)]
    weights = [0.5, 0.25, 0.125]
    expected = {**files[latest], "state_dict": {"a.w": mean([f["state_dict"]["a.w"] for f in files], weights)}}  # type: ignore[index]
    assert oracle.difference(expected, averaged(paths, out, weights=weights)) == ""
    said = say("average", *paths, "-o", out, "--force")
    assert f"{latest}.pth, the latest ({name} 12): {name} and lr" in " ".join(said.out.split())
