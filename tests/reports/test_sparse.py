"""The indices of sparse tensors: what validate says of them is what torch says when it checks them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.safety.torch_lists import NEWEST

LAYOUTS = {"csr": torch.sparse_csr, "csc": torch.sparse_csc, "bsr": torch.sparse_bsr, "bsc": torch.sparse_bsc}


def coordinate(indices: list[list[int]], shape: tuple[int, ...], is_coalesced: bool | None = None) -> torch.Tensor:
    places = torch.tensor(indices, dtype=torch.int64).view(len(indices), -1)
    values = torch.ones(places.shape[1])
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=False, is_coalesced=is_coalesced)


def compressed(
    layout: str, ends: Any, places: Any, shape: tuple[int, ...], values: torch.Tensor | None = None
) -> torch.Tensor:
    parts = torch.tensor(ends), torch.tensor(places, dtype=torch.int64)
    if values is None:
        values = torch.ones(*parts[1].shape, *((2, 2) if layout.startswith("b") else ()))
    return torch.sparse_compressed_tensor(*parts, values, shape, layout=LAYOUTS[layout], check_invariants=False)


def accepted(path: Path) -> bool:
    """Whether torch 2.14 loads it: it checks indices always, torch 2.13 where that is switched on."""
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        try:
            torch.load(path, weights_only=True)
        except (RuntimeError, ValueError):
            return False
    return True


def checked(path: Path) -> dict[str, Any]:
    return {check["name"]: check for check in ckptool.validate(path, {"torch": NEWEST})["checks"]}


def agrees(tensor: torch.Tensor, folder: Path) -> bool:
    """Save a tensor, and return whether torch takes it, which validate must say, too."""
    path = folder / "sparse.pt"
    torch.save({"a": torch.ones(2), "adj": tensor}, path)
    good = accepted(path)
    report = ckptool.validate(path, {"torch": NEWEST})
    checks = checked(path)
    assert report["valid"] == good, checks["indices"]
    assert (checks["indices"]["status"], checks["weights-only"]["status"]) == (
        ("pass", "pass") if good else ("fail", "warning")
    )
    return good


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tensor", "good"),
    [
        (coordinate([[0, 1], [1, 0]], (2, 2)), True),
        (coordinate([[0, 2], [1, 0]], (2, 2)), False),
        (coordinate([[1, 0], [1, 0]], (2, 2)), True),
        (coordinate([[1, 0], [1, 0]], (2, 2), is_coalesced=True), False),
        (coordinate([[0, 0], [1, 1]], (2, 2), is_coalesced=True), False),
        (coordinate([[], []], (2, 2)), True),
        (compressed("csr", [0, 1, 2], [0, 1], (2, 2)), True),
        (compressed("csr", [0, 1, 2], [0, 2], (2, 2)), False),
        (compressed("csr", [0, 2, 2], [1, 0], (2, 2)), False),
        (compressed("csr", [1, 1, 2], [0, 1], (2, 2)), False),
        (compressed("csr", [0, 1], [0], (2, 2)), False),
        (compressed("csr", [[0, 1, 2], [0, 0, 2]], [[0, 1], [0, 1]], (2, 2, 2)), True),
        (compressed("csr", [[0, 1, 2], [0, 0, 2]], [[0, 1], [0, 2]], (2, 2, 2)), False),
        (compressed("csc", [0, 1, 2, 2], [0, 2], (2, 3)), False),
        (compressed("bsr", [0, 1, 2], [0, 2], (4, 6)), True),
        (compressed("bsr", [0, 1, 2], [0, 3], (4, 6)), False),
        (compressed("bsc", [0, 1, 2, 2], [0, 1], (4, 6)), True),
        (compressed("bsc", [0, 1, 2, 2], [0, 2], (4, 6)), False),
    ],
)
def test_indices_are_judged_as_torch_judges_them(tensor: torch.Tensor, good: bool, tmp_path: Path) -> None:
    assert agrees(tensor, tmp_path) == good


@settings(max_examples=examples(60))
@given(st.data())
def test_any_indices(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("sparse")
    number = st.integers(-1, 3)
    count = data.draw(st.integers(0, 4))
    row = st.lists(number, min_size=count, max_size=count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if data.draw(st.booleans()):
            coalesced = data.draw(st.sampled_from((None, False, True)))
            agrees(coordinate([data.draw(row), data.draw(row)], (2, 3), coalesced), folder)
        else:
            ends = [0, *sorted(data.draw(st.lists(st.integers(0, count), min_size=1, max_size=3))), count]
            agrees(compressed(data.draw(st.sampled_from(("csr", "csc"))), ends, data.draw(row), (2, 3)), folder)


def test_before_torch_2_14_it_is_a_warning(tmp_path: Path) -> None:
    torch.save({"adj": coordinate([[0, 7], [1, 0]], (2, 2))}, tmp_path / "a.pt")
    assert not ckptool.validate(tmp_path / "a.pt", {"torch": NEWEST})["valid"]
    report = ckptool.validate(tmp_path / "a.pt", {"torch": "2.13"})
    checks = {check["name"]: check["status"] for check in report["checks"]}
    assert report["valid"] and (checks["indices"], checks["weights-only"]) == ("warning", "pass")
    torch.load(tmp_path / "a.pt", weights_only=True)


class Rebuilt:
    """An object that a pickle makes by the function with which torch rebuilds sparse tensors."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_sparse_tensor, self.arguments


SHAPES = [(), (0,), (3,), (2, 3), (0, 3), (2, 3, 1)]


@pytest.mark.parametrize("shape", [(), (4,), (4, 4), (2, 4, 4)])
@pytest.mark.parametrize("layout", ["coo", *LAYOUTS])
def test_indices_of_any_shape_are_judged(layout: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Only a damaged or hostile file has most of these."""
    path = tmp_path / "a.pt"
    for own in SHAPES:
        indices, values = torch.zeros(own, dtype=torch.int64), torch.ones(own)
        if layout == "coo":
            made = Rebuilt(torch.sparse_coo, (indices, torch.ones(3), torch.Size(shape), False))
        else:
            made = Rebuilt(LAYOUTS[layout], (indices, indices, values, torch.Size(shape)))
        torch.save({"adj": made}, path)
        assert checked(path)["indices"]["status"] == "fail" or accepted(path), own
