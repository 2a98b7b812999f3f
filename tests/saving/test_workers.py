"""Folders whose files other processes write: by any executor, the output is that of ``save`` alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES, manifest, sample
from safetensors.torch import load_file

import ckptool
from ckptool.base.errors import ChangedError, CkptoolError, MalformedError, OutputError, RefusedError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.edits.convert import Conversion
from ckptool.files.engine import OpenExecutor, open_engine
from ckptool.files.write import workers

Edit = Callable[[Checkpoint, str], Checkpoint]


def to(name: str, **options: Any) -> Edit:
    return Conversion(name, tied="clone", allow_loss=("all",), **options).applied


#: What is written: the edit, into a folder.
WAYS: dict[str, Edit] = {
    "as it is": lambda checkpoint, output: checkpoint,
    "strip-module": lambda checkpoint, output: ckptool.strip_module(checkpoint),
    "cast": lambda checkpoint, output: ckptool.cast(checkpoint, "bfloat16"),
    "average": lambda checkpoint, output: ckptool.average([checkpoint, checkpoint], weights=[1, 2]),
    "shards": to("safetensors", shard_size=2000),
    "cast shards": lambda checkpoint, output: to("safetensors", shard_size=900)(
        ckptool.cast(checkpoint, "float16", optimizer=True), output
    ),
    "torch shards": to("torch", shard_size=2000),
    "dcp": to("dcp"),
}
INPUTS = sorted(
    {str(fixture.path.relative_to(FIXTURES)) for fixture in manifest()}
    | {f"ranks/{path.name}" for path in (FIXTURES / "ranks").iterdir() if path.name != "MANIFEST.tsv"}
)


def content(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of the files of a folder by their names."""
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


@pytest.fixture(scope="module", params=["local", "dask"])
def engine(request: pytest.FixtureRequest) -> Iterator[OpenExecutor]:
    if request.param == "dask":
        pytest.importorskip("distributed")
    with open_engine(request.param, 2) as started:
        yield partial(nullcontext, started)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("label", WAYS)
def test_workers_write_what_save_writes(label: str, engine: OpenExecutor, tmp_path: Path) -> None:
    """Each way with some of the fixtures; with all of them in ``make torture``."""
    written = 0
    for number, name in enumerate(sample(INPUTS, 4, first=[*WAYS].index(label))):
        whole, parts = tmp_path / f"{number}.whole", tmp_path / f"{number}.parts"
        try:
            with ckptool.open(FIXTURES / name) as checkpoint:
                ckptool.save(WAYS[label](checkpoint, str(whole)), whole)
        except CkptoolError:
            continue
        with ckptool.open(FIXTURES / name) as checkpoint:
            saved = ckptool.save(WAYS[label](checkpoint, str(parts)), parts, workers=engine)
        assert saved.size == sum(map(len, content(parts).values()))
        assert content(parts) == content(whole), name
        assert parts.is_file() or {path.stat().st_mode for path in parts.iterdir()} == {
            path.stat().st_mode for path in whole.iterdir()
        }
        written += len(content(parts)) > 1
    assert written
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of six shards and their index, whose tensors do not fit into float16."""
    state = {f"layers.{number}.weight": torch.full((40, 10), 1e30) for number in range(6)}
    state["layers.3.weight"][::2] = 1
    torch.save(state, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        ckptool.save(to("safetensors", shard_size=1700)(checkpoint, str(tmp_path / "in")), tmp_path / "in")
    assert len(os.listdir(tmp_path / "in")) == 7
    return tmp_path / "in"


@contextmanager
def dask_executor() -> Iterator[Executor]:
    """An executor of a client of Dask, whose two workers are processes of this machine."""
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        yield client.get_executor()


EXECUTORS: dict[str, Callable[[], AbstractContextManager[Executor]]] = {
    "threads": lambda: ThreadPoolExecutor(2),
    "forked": lambda: ProcessPoolExecutor(2, get_context("fork")),
    "spawned": lambda: ProcessPoolExecutor(2, get_context("spawn")),
    "dask": dask_executor,
}


@pytest.mark.parametrize("name", EXECUTORS)
def test_any_executor_writes_the_files_of_a_folder(name: str, shards: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with ckptool.open(shards) as checkpoint:
        split = to("safetensors", shard_size=900)
        whole, parts = (split(ckptool.cast(checkpoint, "float16"), "out") for _ in range(2))
        ckptool.save(whole, tmp_path / "whole")
        saved = ckptool.save(
            parts,
            tmp_path / "parts",
            workers=EXECUTORS[name],
            on_progress=lambda done, total: seen.append((done, total)),
        )
        said = [[change.what for make in edited.deferred_changes for change in make()] for edited in (whole, parts)]
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    assert seen[-1] == (saved.size, saved.size) and len(seen) == 8  # the start, and each file
    assert said[0] == said[1] != []  # the values that overflowed, which the workers counted


def test_a_folder_is_written_inside_a_running_event_loop(shards: Path, tmp_path: Path) -> None:
    """As in a cell of a notebook, in its thread or in another one."""

    async def cell() -> None:
        ckptool.save(shards, tmp_path / "cell", workers=EXECUTORS["forked"])
        await asyncio.to_thread(ckptool.save, shards, tmp_path / "thread", workers=EXECUTORS["forked"])

    asyncio.run(cell())
    assert content(tmp_path / "cell") == content(tmp_path / "thread") == content(shards)


def never() -> AbstractContextManager[Executor]:
    raise AssertionError("no worker is needed")


def test_one_file_and_a_refused_output_need_no_workers(shards: Path, tmp_path: Path) -> None:
    ckptool.save(tmp_path / "in.pth", tmp_path / "out.pth", workers=never)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    with pytest.raises(RefusedError):
        ckptool.save(shards, tmp_path / "there", workers=never)
    assert ckptool.save(shards, tmp_path / "dry", workers=never, dry_run=True).size
    with ckptool.open(shards) as checkpoint:
        checkpoint.source.name = "-"  # standard input, which no other process can open
        ckptool.save(
            to("safetensors", shard_size=1700)(checkpoint, str(tmp_path / "own")), tmp_path / "own", workers=never
        )
    assert load_file(tmp_path / "own" / "model-00001-of-00006.safetensors")


class Failing(Executor):
    """Fails at the task of this number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.number -= 1
        if self.number < 0:
            future.set_exception(OutputError("no space"))
        else:
            future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_task_that_fails_leaves_no_output(number: int, shards: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OutputError, match="no space") as caught:
        ckptool.save(shards, tmp_path / "out", workers=lambda: Failing(number))
    assert caught.value.path == str(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


class Wrong(Executor):
    """Changes a byte of each file that it wrote, at this place."""

    def __init__(self, place: int) -> None:
        self.place = place

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        with open(args[1][0], "r+b") as file:
            file.seek(self.place, os.SEEK_SET if self.place >= 0 else os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        return future


@pytest.mark.parametrize("place", [0, 9, -1])
def test_what_workers_wrote_is_read_back(place: int, shards: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptoolError) as caught:
        ckptool.save(shards, tmp_path / "out", workers=lambda: Wrong(place))
    assert caught.value.exit_code == 70
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["torch", "safetensors"])
def test_a_flipped_bit_is_found_in_whichever_file_it_would_go(target: str, shards: Path, tmp_path: Path) -> None:
    """Both with an input that is one file, and with shards that have checksums."""
    ckptool.save(to("torch", shard_size=1700)(ckptool.open(shards), str(tmp_path / "torch")), tmp_path / "torch")
    # A torch file repeats the checksums of records that it copies from a single file.
    whole = [tmp_path / "in.pth"] if target == "safetensors" else []
    for path in [*whole, *(tmp_path / "torch").glob("*.bin")]:
        data = path.read_bytes()
        with ckptool.open(path) as checkpoint:
            spans = [record.span for record in checkpoint.container.records() if "/data/" in record.name]
        for span in (spans[0], spans[-1]):
            changed = bytearray(data)
            changed[span.offset + 11] ^= 1
            path.write_bytes(changed)
            source = path if path in whole else path.parent
            with ckptool.open(source) as checkpoint, pytest.raises(MalformedError, match="does not match its checksum"):
                edited = to(target, shard_size=1700)(checkpoint, str(tmp_path / "out"))
                ckptool.save(edited, tmp_path / "out", workers=EXECUTORS["threads"])
            assert not (tmp_path / "out").exists()
        path.write_bytes(data)


def test_an_input_that_changed_is_noticed_by_the_workers(shards: Path, tmp_path: Path) -> None:
    first = next(iter(sorted(shards.glob("*.safetensors"))))
    with ckptool.open(shards) as checkpoint:
        os.utime(first, ns=(1, 1))
        with pytest.raises(ChangedError, match="changed"):
            ckptool.save(ckptool.cast(checkpoint, "bfloat16"), tmp_path / "out", workers=EXECUTORS["forked"])
    assert not (tmp_path / "out").exists()


_CARRY_OUT = workers._write


def die_once(task: Any) -> Any:
    """Write half of a file, then die, the first time; in a process of a pool."""
    mark = Path(task[0]).parent.parent / "mark"
    if not mark.exists():
        mark.touch()
        with open(task[0], "r+b") as file:
            file.write(os.urandom(os.path.getsize(task[0]) // 2))
        os.kill(os.getpid(), signal.SIGKILL)
    return _CARRY_OUT(task)


def always_die(task: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_whose_worker_died_is_written_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_write", die_once)
    ckptool.save(shards, tmp_path / "out", workers=partial(open_engine, "local", 2))
    assert content(tmp_path / "out") == content(shards) and (tmp_path / "mark").exists()


def test_workers_that_always_die_are_an_error_of_the_output(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_write", always_die)
    with pytest.raises(CkptoolError) as caught:
        ckptool.save(shards, tmp_path / "out", workers=partial(open_engine, "local", 2))
    assert caught.value.path == str(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["in", "in.pth"]


def test_a_task_that_runs_again_writes_the_same_bytes(shards: Path, tmp_path: Path) -> None:
    """Two workers may write a file at the same time, such as when a connection was lost."""

    class Twice(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            others.append(super().submit(fn, *args, **kwargs))
            return super().submit(fn, *args, **kwargs)

    others: list[Future[Any]] = []
    with ckptool.open(shards) as checkpoint:
        edited = to("torch", shard_size=1700)(checkpoint, "out")
        ckptool.save(edited, tmp_path / "whole")
        ckptool.save(edited, tmp_path / "out", workers=partial(Twice, 4))
    assert content(tmp_path / "out") == content(tmp_path / "whole") and len(others) == 7
