"""Read image sizes, windows and sequence lengths from the shapes of position tables, and name what resizes them.

Sources: ``resample_abs_pos_embed`` and ``resize_rel_pos_bias_table`` in timm/layers; ``interpolate_pos_encoding`` in
the vision models of transformers; ``WindowAttention`` and ``attn_mask`` of Swin Transformer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import Final

from ...base.lazy import regex
from ...base.records import NamedTuple
from ...base.text import join_limited, pluralize
from .names import Shape
from .state_dict_errors import Mismatch

_POSITIONS: Final = regex(
    r"(?:pos_?emb|position_?emb|positional|pos_table|relative_position|relative_coords|attention_bias|rel_pos|\bwpe\b|embed_positions"
    r"|position_ids|attn_mask|rotary|freqs_cis|(?:cos|sin)_cached|attn\.(?:masked_)?bias\Z)",
    re.IGNORECASE,
)
#: Buffers that a model computes itself when it is built. A copy without them loses nothing.
_COMPUTED: Final = regex(
    r"(?:relative_position_index|attention_bias_idxs|relative_coords_table|attn_mask|position_ids|inv_freq|freqs_cis|(?:cos|sin)_cached"
    r"|rotary_emb\.freqs|attn\.(?:masked_)?bias)\Z"
)
#: Tables that may have the heads first.
_TABLE: Final = regex(r"(?:relative_position_bias_table|attention_biases)\Z")
#: The convolution that cuts an image into patches.
_PATCHES: Final = regex(r"(?:patch|conv1|conv_proj)")
#: How many tokens may stand before the patches: a class token, one for distillation, registers.
_OTHERS: Final = (1, 0, 2, 5, 4, 9, 8)
#: The rows for the class token at the end of the tables of BEiT.
_BEIT: Final = 3


def is_position(item: Mismatch) -> bool:
    """Return whether a tensor has another size only because of the image size or the sequence length."""
    if not _POSITIONS.search(item.key):
        return False
    if is_computed(item.key):
        return True
    if len(item.saved) != len(item.wanted) or len(item.saved) < 2:
        return False
    channels = range(-1, 2) if _TABLE.search(item.key) else (-1, 1) if len(item.saved) == 4 else (-1,)
    return any(item.saved[axis] == item.wanted[axis] for axis in channels)


def is_computed(key: str) -> bool:
    """Return whether a model computes this tensor itself when it is built."""
    return bool(_COMPUTED.search(key))


class _Places(NamedTuple):
    """Positions on both sides, in words, what makes one of the other, and what is said of both."""

    saved: str
    wanted: str
    help: str
    both: str = ""


def other_positions(items: Sequence[Mismatch], shapes: Mapping[str, Shape]) -> str:
    """Say how the positions differ, and what helps; ``shapes`` are all shapes in the file."""
    tables = [item for item in items if not is_computed(item.key)]
    patch = _patch_size(shapes)
    places = next(filter(None, (read(tables or items, items, patch) for read in _READERS)))
    parts = [
        f"{places.saved} in the file, {places.wanted} in the model{places.both}",
        *([places.help] if tables else []),
    ]
    if len(tables) < len(items):
        ends = list(dict.fromkeys(item.key.rpartition(".")[2] for item in items if is_computed(item.key)))
        them = "them" if len(ends) > 1 else "it"
        parts.append(f"the model computes {join_limited(ends)} itself: load without {them}")
    return "; ".join(parts)


def _patch_size(shapes: Mapping[str, Shape]) -> int:
    """Return the side of a patch in pixels, the kernel of the convolution that cuts the image; 0 if unknown."""
    for name, shape in shapes.items():
        if shape is not None and len(shape) == 4 and shape[2] == shape[3] > 1 and _PATCHES.search(name):
            return shape[2]
    return 0


def _grid(rows: int, columns: int, patch: int) -> str:
    """Return words for a grid of patches, with the size of the image if the size of a patch is known."""
    return f"{rows}x{columns} patches" + (f" (images of {rows * patch}x{columns * patch})" if patch else "")


def _by_windows(tables: Sequence[Mismatch], items: Sequence[Mismatch], patch: int) -> _Places | None:
    """Read the windows of Swin, and the whole images of BEiT, which is one window."""
    windows = ((item, _window(item.key, item.saved), _window(item.key, item.wanted)) for item in items)
    item, saved, wanted = next((one for one in windows if one[1] and one[2]), (items[0], 0, 0))
    if not saved:
        return None
    masks = [one for one in items if one.key.endswith("attn_mask") and len(one.saved) == len(one.wanted) == 3]
    sides = [f"windows of {side}x{side}" if saved != wanted else "" for side in (saved, wanted)]
    if masks:  # (windows, cells, cells), the largest in the first stage
        grids = [
            max(_side(shape[0]) * _side(shape[1]) for shape in every) for every in zip(*(one[1:] for one in masks))
        ]
    else:
        grids = [0, 0] if _odd_side(item.saved[0]) else [saved, wanted]
    images = [_grid(side, side, patch) if side else "" for side in grids]
    words = [" in ".join(filter(None, pair)) for pair in zip(sides if masks or not all(images) else ("", ""), images)]
    table = tables[0]
    call = f"timm.layers.resize_rel_pos_bias_table(table, ({wanted}, {wanted}), {tuple(table.wanted)})"
    return _Places(
        f"another image or window size: {words[0]}",
        words[1],
        f"{call} interpolates each {table.key.rpartition('.')[2]}, or build the model with the sizes of the file",
    )


def _window(key: str, shape: Sequence[int]) -> int:
    """Return the side of the window that a tensor describes; 0 if it describes none."""
    end = key.rpartition(".")[2]
    first, second, *_ = (*shape, 0, 0)
    if end == "relative_position_bias_table" and len(shape) == 3:  # (heads, 2 * side - 1, 2 * side - 1)
        return (second + 1) // 2
    if end == "relative_position_bias_table":
        return _odd_side(first) or _odd_side(first - _BEIT)
    if end == "relative_position_index":
        return _side(first) or _side(first - 1)
    if end == "relative_coords_table":
        return (second + 1) // 2
    return _side(second) if end == "attn_mask" and len(shape) == 3 else 0


def _odd_side(rows: int) -> int:
    """Return the window side of a table with ``(2 * side - 1) ** 2`` rows; 0 for another number of rows."""
    side = _side(rows)
    return (side + 1) // 2 if side % 2 else 0


def _side(count: int) -> int:
    """Return the side of a square of ``count`` cells; 0 for another count."""
    side = isqrt(max(count, 0))
    return side if side * side == count else 0


def _by_axis(tables: Sequence[Mismatch], items: Sequence[Mismatch], patch: int) -> _Places | None:
    """Read relative positions along one axis, as in SAM and MViT: ``2 * side - 1`` rows."""
    item = next((one for one in tables if re.search(r"rel_pos_[hwt]\Z", one.key)), None)
    if item is None:
        return None
    saved, wanted = ((shape[0] + 1) // 2 for shape in (item.saved, item.wanted))
    call = f"torch.nn.functional.interpolate(table.T[None], size={item.wanted[0]}, mode='linear')[0].T"
    return _Places(
        f"another image size: {item.key.rpartition('.')[2]} is for {saved:,} patches in a row",
        f"{wanted:,}",
        f"{call} resizes it, or build the model with the image size of the file",
    )


def _by_patches(tables: Sequence[Mismatch], items: Sequence[Mismatch], patch: int) -> _Places | None:
    """Read a table with one position for each patch of an image."""
    item = tables[0]
    if len(item.saved) == 4:  # (1, rows, columns, width) or (1, width, rows, columns)
        last = item.saved[-1] == item.wanted[-1]
        here, there = ((shape[1:3] if last else shape[2:]) for shape in (item.saved, item.wanted))
        table = "table.permute(0, 3, 1, 2)" if last else "table"
        call = f"torch.nn.functional.interpolate({table}, size=({there[0]}, {there[1]}), mode='bicubic')"
        saved, wanted = (_grid(grid[0], grid[1], patch) for grid in (here, there))
        return _Places(f"another image size: {saved}", wanted, f"{call} resizes {item.key}")
    counts = _positions(item)
    others = next((number for number in _OTHERS if all(_side(count - number) > 1 for count in counts)), None)
    if others is None or not (patch or len(item.saved) == 3):
        return None
    sides = [_side(count - others) for count in counts]
    both = f", besides {pluralize(others, 'position')} for other tokens" if others else ""
    name = "image_size" if (hugging_face := re.search(r"position_(?:embedding|ids)", item.key)) else "img_size"
    build = (
        f"build the model with {name}={sides[0] * patch}" if patch else f"build the model with the {name} of the file"
    )
    if hugging_face:
        how = f"{build} and call it with interpolate_pos_encoding=True"
    else:
        call = f"timm.layers.resample_abs_pos_embed(table, {[sides[1], sides[1]]}, num_prefix_tokens={others})"
        how = f"{call} interpolates {item.key}, or {build}"
    saved, wanted = (_grid(side, side, patch) for side in sides)
    return _Places(f"another image size: {saved}", wanted, how, both)


def _positions(item: Mismatch) -> tuple[int, int]:
    """Return how many positions both tables have: the first size that differs."""
    return next((pair for pair in zip(item.saved, item.wanted) if pair[0] != pair[1]), (0, 0))


def _by_length(tables: Sequence[Mismatch], items: Sequence[Mismatch], patch: int) -> _Places:
    """Read a table with one position for each token of a text."""
    saved, wanted = _positions(tables[0])
    return _Places(
        f"another length: {tables[0].key} has {pluralize(saved, 'position')}",
        f"{wanted:,}",
        f"build the model with max_position_embeddings={saved} (elsewhere called n_positions, block_size, img_size)",
    )


_READERS: Final[Sequence[Callable[[Sequence[Mismatch], Sequence[Mismatch], int], _Places | None]]] = (
    _by_windows,
    _by_axis,
    _by_patches,
    _by_length,
)
