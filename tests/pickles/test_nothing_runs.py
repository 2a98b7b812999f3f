"""Nothing that a pickle names is imported, called or opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ckptool

HOSTILE = [
    b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
    b"(S'true'\nios\nsystem\n.",
    b"(cos\nsystem\nS'true'\no.",
    b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    b"cbuiltins\nexec\n(X\x0b\x00\x00\x00import thistR.",
    b"cbuiltins\neval\n(X\x01\x00\x00\x001tR.",
    b"cthis\ns\n.",
    b"c__main__\nClass\n)\x81}X\x01\x00\x00\x00aNsb.",
    b"csubprocess\nPopen\n(X\x04\x00\x00\x00truet}\x92.",
    b"cbuiltins\nopen\n(X\x09\x00\x00\x00/dev/nulltR.",
    b"cpickle\nloads\n(C\x05cos\n\ntR.",
    b"cantigravity\nfly\n)R0N.",
    b"\x82\x01.",
    b"Ppersistent\n.",
    b"\x97.",
    b"V\\u006f\\u0073\nVsystem\n\x93(Vtrue\ntR.",
]

#: Decodes, compares and writes each pickle, then prints every event that an audit hook saw meanwhile.
WATCHED = """
import sys
from ckptool.pickles.compare import difference
from ckptool.pickles.decode import decode
from ckptool.pickles.encode import encode
pickles = [bytes.fromhex(line) for line in sys.stdin]
seen = []
watching = True
def hook(event, arguments):
    if watching:
        seen.append((event, arguments))
decode(pickles[0])
sys.addaudithook(hook)
for data in pickles:
    graph = decode(data).graph
    if difference(graph, decode(encode(graph)).graph):
        seen.append(("changed", data))
watching = False
print(len(pickles), seen, sorted({"this", "antigravity", "subprocess", "pickle", "torch"} & set(sys.modules)))
"""


def watched(program: str, pickles: list[bytes]) -> str:
    """What a program prints about some pickles."""
    environment = os.environ | {"PYTHONPATH": str(Path(ckptool.__file__).parent.parent)}
    lines = "\n".join(data.hex() for data in pickles)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip()


def test_no_audit_event_is_raised_by_a_hostile_pickle() -> None:
    assert watched(WATCHED, HOSTILE) == f"{len(HOSTILE)} [] []"


def test_the_hook_would_have_seen_it() -> None:
    acting = WATCHED.replace("    graph = decode(data).graph", "    import this\n    graph = decode(data).graph")
    assert "'import'" in watched(acting, HOSTILE[:1])
