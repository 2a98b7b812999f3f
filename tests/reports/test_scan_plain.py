"""Small pickles of plain data are weights-only; one that hides something in a string or in bytes is not."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
from crafted_files import SYSTEM, dumped

from ckptool.reports.scan import scan_file

EVIL = dumped(SYSTEM)
VALUES: tuple[tuple[str, Any], ...] = (
    ("weights-only", {"epoch": 3, "lr": 0.1, "names": ["a", "b"], "on": True}),
    ("weights-only", [{"loss": n / 2, "step": n} for n in range(30)]),
    ("weights-only", (1, (2, 3), [], {}, None, "text")),
    ("weights-only", {"text": "x" * 600, "more": ["y" * 200] * 3}),
    ("weights-only", {"crop": bytes(200), "mask": b"\1\0" * 40, "id": b"7"}),
    ("weights-only", {"bytes": b"(lp0\nI1\na."}),
    ("weights-only", {"type": "torch.nn.Linear", "cfg": "x = 1"}),
    ("weights-only", {"bytes": b"\x80\x04N."}),
    ("unsafe", {"bytes": b"N." + EVIL}),
    ("unsafe", {"text": base64.b64encode(pickle.dumps({"x": EVIL})).decode()}),
    ("unsafe", {"bytes": EVIL}),
    ("unsafe", {"bytes": b"cos\nsystem\n(S'true'\ntR."}),
    ("unsafe", {"text": EVIL.decode("latin-1")}),
    ("unsafe", {"text": "cos\nsystem\n(S'true'\ntR."}),
    ("program", {"_target_": "os.system", "command": "true"}),
    ("program", {"text": '{"_target_": "os.system"}'}),
    ("unknown", {"text": "!!python/object/apply:os.system ['true']"}),
    ("unknown", {"bytes": b"PK\x03\x04" + bytes(40)}),
    ("unknown", {"bytes": b"PK\x05\x06" + bytes(18)}),
    ("unknown", {"zip": "PK\x05\x06" + "\0" * 18, "other": "PK\x03\x04"}),
)


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_verdict_on_small_pickles(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    found = []
    for _, value in VALUES:
        path.write_bytes(pickle.dumps(value, protocol))
        scan = scan_file(str(path))
        assert scan["kind"] == "pickle"
        found.append((scan["verdict"], value))
    assert found == list(VALUES)
