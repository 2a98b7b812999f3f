"""Count the lines of each room and compare them with its budget in ``budgets.json``; ``make check`` prints the result.

A room may have 105 % of its budget. One that has more has a ``limit`` beside its budget, which may only be lowered:
``python tests/project/lines.py --lower`` does so where lines were removed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGETS = Path(__file__).with_name("budgets.json")


class Room(NamedTuple):
    """A room: its lines with blank lines and docstrings, its budget, and its recorded limit (0 if it has none)."""

    name: str
    lines: int
    budget: int
    limit: int

    @property
    def allowed(self) -> int:
        return max(self.budget * 105 // 100, self.limit)


def lines(folder: Path, pattern: str) -> int:
    """Return the number of lines in the text files of a folder that match a pattern."""
    files = (path for path in folder.glob(pattern) if path.is_file() and "__pycache__" not in path.parts)
    return sum(data.count(b"\n") for path in files if b"\0" not in (data := path.read_bytes()))


def rooms() -> list[Room]:
    """Return every room of the package, its modules at the top level as ``ckptool``, and the tests with their data."""
    package = ROOT / "ckptool"
    counted = {path.name: lines(path, "**/*.py") for path in package.iterdir() if (path / "__init__.py").is_file()}
    counted |= {"ckptool": lines(package, "*.py"), "tests": lines(ROOT / "tests", "**/*")}
    budgets = json.loads(BUDGETS.read_text(encoding="utf-8"))
    assert budgets.keys() == counted.keys(), "a room without a budget, or a budget without its room"
    return [Room(name, counted[name], row["budget"], row.get("limit", 0)) for name, row in budgets.items()]


def lower() -> None:
    """Lower each recorded limit to the present lines, rounded up to 50, and remove those that are not needed."""
    rows = {}
    for room in rooms():
        limit = min(room.limit, -(-room.lines // 50) * 50)
        rows[room.name] = {"budget": room.budget} | ({"limit": limit} if limit > room.budget * 105 // 100 else {})
    text = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    BUDGETS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    if arguments == ["--lower"]:
        lower()
    print(f"{'room':<12}{'lines':>8}{'budget':>8}{'of it':>7}")
    for room in rooms():
        note = f"  limit {room.limit:,}, may only be lowered" if room.limit else ""
        note = f"  too many: {room.allowed:,} are allowed" if room.lines > room.allowed else note
        print(f"{room.name:<12}{room.lines:>8,}{room.budget:>8,}{room.lines / room.budget:>7.0%}{note}")
    return any(room.lines > room.allowed for room in rooms())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
