"""The benchmark group for remote files: an S3 server on loopback that waits before each answer, as one far away does.

`python -m bench.remote FILE` is that server, from its start to the end of its stdin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench import files, peers
from bench.files import Spec, made
from bench.jobs import Each, Group, Job, Row, Target
from bench.measure import child_environment
from bench.references import command

DELAY, BANDWIDTH = 0.05, 125_000_000  # seconds, bytes per second
ADDRESS: Final = "s3://bucket/model.pth"
LOCAL, KEYS, QUICK = "keys, on the disk", "keys, on S3", "validate --quick, on S3"
S3FS: Final = "s3fs + torch.load to meta"
_LOAD: Final = (
    "import sys, s3fs, torch\n"
    "with s3fs.S3FileSystem().open(sys.argv[1]) as file:\n"
    "    print(*torch.load(file, map_location='meta'), sep='\\n')"
)


def group(tool: list[str], spec: Spec, work: Path) -> Group:
    """List and check one object, against the same file on the disk and what people write with s3fs and torch."""
    path = work / spec.name
    local = command(tool, "keys", source=path)._replace(name=LOCAL)
    keys, quick = (
        Job(name, (*tool, *words, ADDRESS)) for name, words in ((KEYS, ("keys",)), (QUICK, ("validate", "--quick")))
    )
    shows = partial(peers.shows, files.tensor_names(spec.tensors))
    load = peers.job_of(work / "peers", "s3fs", S3FS, ("-c", _LOAD, ADDRESS), path, shows)
    real = spec == files.REMOTE
    rows = (
        Row(KEYS, LOCAL, Target(each=0.25) if real else None, Each(LOCAL, 1), reader=real),
        Row(KEYS, S3FS, Target(ratio=1 / 12) if real else None, reader=real),
        Row(QUICK, target=Target(seconds=2.5) if real else None, reader=real),
    )
    return Group(
        "remote", spec.label, (local, keys._replace(proof=shows(keys.words)), quick, load), rows,
        (made(lambda unfinished: files.make(spec, unfinished), path),),
        cache=f"S3 on loopback, {DELAY * 1000:g} ms before each answer, {BANDWIDTH / 1e6:g} MB/s",
        skip=_without_obstore, during=lambda: serving(path),
    )  # fmt: skip


def _without_obstore() -> str:
    return "" if find_spec("obstore") else "obstore is not installed"


@contextmanager
def serving(path: Path) -> Iterator[None]:
    """Run the server in another process, and set the variables that lead to it."""
    words = (sys.executable, "-m", "bench.remote", str(path))
    pipe = subprocess.PIPE
    before = dict(os.environ)
    with subprocess.Popen(
        words, cwd=files.ROOT, env=child_environment(), stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin and process.stdout
        url, key, secret = process.stdout.readline().split()
        os.environ.update(AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret)
        try:
            yield
        finally:
            process.stdin.close()
            os.environ.clear()
            os.environ.update(before)


def _main(path: Path) -> None:
    sys.path.insert(0, str(files.ROOT / "tests"))
    server: Any = import_module("remote.server")
    with server.Server(delay=DELAY, bandwidth=BANDWIDTH) as found:
        found.put("bucket", "model.pth", path.read_bytes())
        print(found.url, server.KEY, server.SECRET, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
