"""Each room keeps to its budget of lines."""

from __future__ import annotations

import pytest
from project.lines import Room, rooms


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.name)
def test_a_room_keeps_to_its_budget(room: Room) -> None:
    message = f"{room.lines:,} lines, {room.allowed:,} are allowed: see 'The budgets' in docs/architecture.md"
    assert room.lines <= room.allowed, message
