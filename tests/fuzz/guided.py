"""Coverage-guided fuzzing of the decoders, by Atheris: anything but ckptool's own errors is a find.

`make fuzz FUZZ=--atheris` gives each decoder its share of ten minutes, in a process of its own; `FUZZ='1h --atheris'`
more. Needs the extra "fuzz" (Python 3.11 to 3.13). What is found is left in tests/fuzz/findings/atheris.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

__all__ = ["TARGETS", "guided"]

FINDINGS = Path(__file__).parent / "findings" / "atheris"
#: Processor time and memory for one input: less than what is promised, as these are small.
_SECONDS, _MEGABYTES = 10, 1024


def _pickle(data: bytes) -> None:
    from ckptool.pickles.decode import decode

    decode(data)


def _zip(data: bytes) -> None:
    from ckptool.files.sources import BytesSource
    from ckptool.files.zips.reader import read_archive

    archive = read_archive(BytesSource(data))
    for record in archive.records[:20]:
        archive.local(record)
        archive.read(record, 1 << 20)


def _container(data: bytes) -> None:
    """Whatever the format: tar, legacy, and all that is told by the first bytes."""
    from ckptool.checkpoint.checkpoint import Checkpoint
    from ckptool.files.sources import BytesSource
    from ckptool.formats import read_container

    source = BytesSource(data)
    _ = Checkpoint.of("<bytes>", source, read_container(source)).survey


def _header(data: bytes) -> None:
    from ckptool.files.sources import BytesSource
    from ckptool.formats.safetensors.header import read_header

    # The length is made right: otherwise most inputs end there.
    read_header(BytesSource(len(data).to_bytes(8, "little") + data))


def _metadata(data: bytes) -> None:
    from ckptool.formats.dcp.listing import read_listing

    read_listing(data, ".metadata")


#: Decoders by name: the kind of inputs to begin with, and what is called.
TARGETS: dict[str, tuple[str, Callable[[bytes], None]]] = {
    "pickle": ("zip", _pickle),
    "zip": ("zip", _zip),
    "tar": ("tar", _container),
    "legacy": ("legacy", _container),
    "safetensors-header": ("safetensors", _header),
    "dcp-metadata": ("dcp", _metadata),
}


def guided(seconds: float) -> int:
    """Run each decoder for its share of the time; returns 1 when one of them broke."""
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("atheris is not installed: pip install 'ckptool[fuzz]' (Python 3.11 to 3.13)")
        return 2
    bad = 0
    FINDINGS.mkdir(parents=True, exist_ok=True)
    for name, (kind, _) in TARGETS.items():
        with tempfile.TemporaryDirectory(prefix="ckptool-atheris-") as corpus:
            _begin(name, kind, Path(corpus))
            options = [f"-max_total_time={max(1, int(seconds / len(TARGETS)))}", f"-artifact_prefix={FINDINGS}/{name}-"]
            options += [f"-timeout={_SECONDS}", f"-rss_limit_mb={_MEGABYTES}", "-max_len=8192", "-print_final_stats=1"]
            command = [sys.executable, str(Path(__file__)), name, *options, corpus]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            lines = done.stderr.splitlines()
            runs = next((line.split()[-1] for line in lines if "number_of_executed_units" in line), "?")
            print(f"{name}: {runs} inputs, {'broken' if done.returncode else 'nothing found'}", flush=True)
            if done.returncode:
                bad = 1
                print("\n".join(line for line in (done.stdout + done.stderr).splitlines()[-40:]))
    return bad


def _begin(name: str, kind: str, corpus: Path) -> None:
    """Clean inputs and some mutations of them."""
    import io
    import zipfile

    from fuzz.cases import Case, bases, built

    for number, base in enumerate(dict.fromkeys(bases(kind))):
        files = built(Case(kind, base, ()))
        data = files.get("", files.get(".metadata", b""))
        if name == "pickle":
            try:
                with zipfile.ZipFile(io.BytesIO(data)) as archive:
                    data = archive.read(next(inner for inner in archive.namelist() if inner.endswith("data.pkl")))
            except (zipfile.BadZipFile, StopIteration, NotImplementedError):
                continue
        if name == "safetensors-header":
            data = data[8 : 8 + int.from_bytes(data[:8], "little")]
        if len(data) <= 8192:
            (corpus / str(number)).write_bytes(data)


def _serve(name: str) -> None:
    """The process of one decoder: Atheris never returns from here."""
    import atheris

    with atheris.instrument_imports(include=["ckptool"]):
        pass
    from ckptool.base.errors import CkptoolError

    function = TARGETS[name][1]

    def one(data: bytes) -> None:
        with contextlib.suppress(CkptoolError):  # the documented errors
            function(data)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    _serve(sys.argv[1])
