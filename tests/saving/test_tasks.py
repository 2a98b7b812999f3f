"""Outputs in tasks: of any size, in any order, carried out more than once, the output is that of ``save``."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES, WHOLE, manifest, sample

import ckptool
from ckptool import tasks
from ckptool.base.errors import ChangedError, CkptoolError, MalformedError, OutputError, RefusedError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.edits.outputs import Conversion
from ckptool.edits.vocabulary import VOCABULARY
from ckptool.files.codec import Word
from ckptool.files.engine import open_engine
from ckptool.files.sources import FolderPlan, Plan
from ckptool.files.tasks import Cutter, DoneJson, TaskJson
from ckptool.files.write.output import StagedFile
from ckptool.saving import Tasks, WriteRequest, prepared, write_output

Edit = Callable[[Checkpoint, str], Checkpoint]
TRAINING = FIXTURES / "ddp4_training.pth"


def to(name: str, **options: Any) -> Edit:
    conversion = Conversion(name, tied="clone", allow_loss=("all",), **options)
    return conversion.applied


#: What is written: the name of the output, and the edit.
WAYS: dict[str, tuple[str, Edit]] = {
    "as it is": ("out", lambda checkpoint, output: checkpoint),
    "strip-module": ("out", lambda checkpoint, output: ckptool.strip_module(checkpoint)),
    "slim": ("out", lambda checkpoint, output: ckptool.slim(checkpoint)),
    "cast": ("out", lambda checkpoint, output: ckptool.cast(checkpoint, "bfloat16")),
    "average": ("out", lambda checkpoint, output: ckptool.average([checkpoint, checkpoint], weights=[1, 2])),
    "safetensors": ("out.safetensors", to("safetensors")),
    "cast to safetensors": (
        "out.safetensors",
        lambda checkpoint, output: to("safetensors")(ckptool.cast(checkpoint, "float16", optimizer=True), output),
    ),
    "shards": ("out", to("safetensors", shard_size=2000)),
    "torch": ("out.pth", to("torch")),
    "legacy": ("out.pth", to("legacy")),
    "dcp": ("out", to("dcp")),
}
INPUTS = sorted(
    {str(fixture.path.relative_to(FIXTURES)) for fixture in manifest()}
    | {f"ranks/{path.name}" for path in (FIXTURES / "ranks").iterdir() if path.name != "MANIFEST.tsv"}
)


def content(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of the files of a folder by their names."""
    files = path.rglob("*") if path.is_dir() else [path]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}


def in_disorder(found: list[int], seed: int = 0) -> Callable[[Iterable[TaskJson]], Generator[DoneJson, None, None]]:
    """Carry out tasks from their JSON, in another order, some of them twice; ``found`` gets their number."""

    def carry_out(cut: Iterable[TaskJson]) -> Generator[DoneJson, None, None]:
        lines = [json.dumps(task) for task in cut]
        found.append(len(lines))
        chance = random.Random(seed)
        again = chance.sample(lines, len(lines) // 3)
        for line in chance.sample([*lines, *again], len(lines) + len(again)):
            yield json.loads(json.dumps(tasks.carry_out_line(line)))

    return carry_out


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", INPUTS)
def test_an_output_in_tasks_is_that_of_save(name: str, tmp_path: Path) -> None:
    """Each input in three or four of the ways, other ones than the input before; in all in ``make torture``."""
    try:
        checkpoint = ckptool.open(FIXTURES / name)
    except CkptoolError:
        pytest.skip("not a checkpoint")
    with checkpoint:
        for label, (output, edit) in sample([*WAYS.items()], 3, first=INPUTS.index(name)):
            whole, parts = tmp_path / label / "whole", tmp_path / label / "parts"
            whole.mkdir(parents=True)
            parts.mkdir()
            try:
                edited = edit(checkpoint, str(whole / output))
                ckptool.save(edited, whole / output)
            except CkptoolError:
                continue
            for size in (1 << 30, 700):
                found: list[int] = []
                edited = edit(checkpoint, str(parts / output))
                how = Tasks(size, in_disorder(found, size))
                write_output(WriteRequest(edited, str(parts / output), size == 700), tasks=how)
                assert content(parts / output) == content(whole / output), (label, size)
                assert found[0] > 1 or size > 700 or sum(map(len, content(whole / output).values())) < 5000
            assert os.listdir(parts) == [output]


@pytest.fixture(scope="module")
def dask() -> Iterator[Executor]:
    pytest.importorskip("distributed")
    with open_engine("dask", 2) as engine:
        yield engine


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("label", WAYS)
def test_dask_writes_what_save_writes(label: str, dask: Executor, tmp_path: Path) -> None:
    """Every fixture in two or three formats, by tasks in two processes of Dask; all formats in ``make torture``."""
    output, edit = WAYS[label]
    written = 0
    for number, name in enumerate(sample(INPUTS, 4, first=[*WAYS].index(label))):
        whole, parts = tmp_path / f"{number}.whole", tmp_path / f"{number}.parts"
        whole.mkdir()
        parts.mkdir()
        try:
            with ckptool.open(FIXTURES / name) as checkpoint:
                ckptool.save(edit(checkpoint, str(whole / output)), whole / output)
        except CkptoolError:
            continue
        with ckptool.open(FIXTURES / name) as checkpoint:
            plan = ckptool.plan(edit(checkpoint, str(parts / output)), parts / output)
            ckptool.run(plan, dask, task_size=20_000)
        assert content(parts / output) == content(whole / output), name
        written += 1
    assert written > (100 if WHOLE else 25)


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
def test_any_executor_carries_out_a_plan(name: str, tmp_path: Path) -> None:
    with ckptool.open(TRAINING) as checkpoint:
        edited = ckptool.strip_module(checkpoint)
        ckptool.save(edited, tmp_path / "whole.pth")
        seen: list[tuple[int, int]] = []
        with EXECUTORS[name]() as pool:
            plan = ckptool.plan(edited, tmp_path / "parts.pth")
            how = {"task_size": 3000, "on_progress": lambda done, total: seen.append((done, total))}
            saved = ckptool.run(plan, pool, **how)  # type: ignore[arg-type]
    assert (tmp_path / "parts.pth").read_bytes() == (tmp_path / "whole.pth").read_bytes()
    assert saved.size == seen[-1][0] == seen[-1][1]
    assert len(seen) > 5


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_plan_is_carried_out_inside_a_running_event_loop(name: str, tmp_path: Path) -> None:
    """As in a cell of a notebook; in a thread of its own, other coroutines go on meanwhile."""
    went_on = threading.Event()

    async def other() -> None:
        went_on.set()

    async def cell() -> None:
        with EXECUTORS[name]() as pool:
            ckptool.run(ckptool.plan(TRAINING, tmp_path / "cell.pth"), pool, task_size=3000)
            plan, waited = ckptool.plan(TRAINING, tmp_path / "thread.pth"), []

            def on_progress(done: int, total: int) -> None:
                waited.append(went_on.wait(60))

            thread = asyncio.create_task(asyncio.to_thread(ckptool.run, plan, pool, on_progress=on_progress))
            await asyncio.sleep(0)  # the thread is started
            await asyncio.gather(thread, other())
            assert waited and all(waited)

    asyncio.run(cell())
    for output in ("cell.pth", "thread.pth"):
        assert (tmp_path / output).read_bytes() == TRAINING.read_bytes()


def test_a_plan_without_an_executor_is_carried_out_here(tmp_path: Path) -> None:
    ckptool.run(ckptool.plan(TRAINING, tmp_path / "copy.pth"))
    assert (tmp_path / "copy.pth").read_bytes() == TRAINING.read_bytes()


def test_a_plan_refuses_an_output_that_exists(tmp_path: Path) -> None:
    (tmp_path / "there.pth").write_bytes(b"")
    with pytest.raises(RefusedError):
        ckptool.plan(TRAINING, tmp_path / "there.pth")


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
def test_a_task_that_fails_leaves_no_output(number: int, tmp_path: Path) -> None:
    plan = ckptool.plan(TRAINING, tmp_path / "out.pth")
    with pytest.raises(OutputError, match="no space"):
        ckptool.run(plan, Failing(number), task_size=3000)
    assert os.listdir(tmp_path) == []


# -- what a task is


def cut(checkpoint: Checkpoint, output: Path, size: int) -> list[TaskJson]:
    plan = prepared(WriteRequest(checkpoint, str(output))).plan
    files = plan.files if isinstance(plan, FolderPlan) else [("", plan)]
    return list(Cutter([StagedFile(str(output) + name, file) for name, file in files], VOCABULARY, size))


def test_the_same_plan_has_the_same_tasks(tmp_path: Path) -> None:
    with ckptool.open(TRAINING) as one, ckptool.open(TRAINING) as two:
        output = tmp_path / "out.safetensors"
        first = cut(to("safetensors")(ckptool.cast(one, "bfloat16"), str(output)), output, 2000)
        second = cut(to("safetensors")(ckptool.cast(two, "bfloat16"), str(output)), output, 2000)
    assert first == second
    assert len({task["task"] for task in first}) == len(first) > 1


@pytest.mark.parametrize("size", [100, 1000, 10**6])
def test_tasks_have_about_the_size_that_was_asked_for_and_every_byte_once(size: int, tmp_path: Path) -> None:
    with ckptool.open(TRAINING) as checkpoint:
        found = cut(checkpoint, tmp_path / "out.pth", size)
    places = [
        (write["at"], piece["Span"][2]) for task in found for write in task["writes"] for piece in write["pieces"]
    ]
    at = 0
    for begin, length in sorted(places):
        assert begin == at
        at += length
    assert at == TRAINING.stat().st_size
    assert max(task["bytes"] for task in found) <= size


def test_a_large_cast_is_divided(tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.arange(3 << 20, dtype=torch.float32)}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        edited = ckptool.cast(checkpoint, "bfloat16")
        found: list[int] = []
        write_output(WriteRequest(edited, str(tmp_path / "parts.pth")), tasks=Tasks(1 << 20, in_disorder(found)))
        ckptool.save(ckptool.cast(checkpoint, "bfloat16"), tmp_path / "whole.pth")
    assert found[0] >= 6
    assert content(tmp_path / "parts.pth") == content(tmp_path / "whole.pth")


def test_overflows_are_counted_over_all_tasks(tmp_path: Path) -> None:
    import torch

    values = torch.full((3 << 20,), 1e30)
    values[::1000] = 1
    torch.save({"w": values}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        whole, parts = ckptool.cast(checkpoint, "float16"), ckptool.cast(checkpoint, "float16")
        ckptool.save(whole, tmp_path / "whole.pth")
        write_output(WriteRequest(parts, str(tmp_path / "parts.pth")), tasks=Tasks(1 << 20, in_disorder([])))
        summaries = [
            [change.what for make in edited.deferred_changes for change in make()] for edited in (whole, parts)
        ]
    assert summaries[0] == summaries[1] != []


def changed_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("size", [1 << 30, 64, 300])
@pytest.mark.parametrize("target", ["safetensors", "legacy"])
def test_a_flipped_bit_is_found_whichever_tasks_have_its_neighbours(size: int, target: str, tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.arange(50.0), "b": torch.arange(70.0)[::2], "c": torch.ones(3)}, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        offsets = [record.span.offset for record in checkpoint.container.records() if "/data/" in record.name]
    for offset in offsets:
        shutil.copy(tmp_path / "in.pth", tmp_path / "bad.pth")
        changed_byte(tmp_path / "bad.pth", offset + 11)
        with ckptool.open(tmp_path / "bad.pth") as checkpoint:
            edited = to(target)(checkpoint, str(tmp_path / "out"))
            with pytest.raises(MalformedError, match="does not match its checksum"):
                write_output(WriteRequest(edited, str(tmp_path / "out")), tasks=Tasks(size, in_disorder([])))
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["dcp4", "ranks/fsdp2_3", "ranks/zero3_bf16_3", "ranks/megatron_tp2"])
@pytest.mark.parametrize("size", [1 << 30, 100])
def test_a_flipped_bit_of_a_folder_is_found(name: str, size: int, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(FIXTURES / name, folder)
    with ckptool.open(folder) as checkpoint:
        names = {entry.tensor.storage for entry in checkpoint.survey.tensors if entry.state_dict >= 0}
        spans = [
            record.span
            for record in checkpoint.container.records()
            if record.crc and record.span.size > 8 and not record.compressed and {record.key, *record.part_of} & names
        ]
    for span in random.Random(size).sample(spans, min(len(spans), 4)):
        path = Path(span.source.name)
        data, times = path.read_bytes(), path.stat()
        changed_byte(path, span.offset + span.size - 3)
        with ckptool.open(folder) as checkpoint, pytest.raises(MalformedError, match="does not match its checksum"):
            edited = to("safetensors")(checkpoint, str(tmp_path / "out.safetensors"))
            write_output(WriteRequest(edited, str(tmp_path / "out.safetensors")), tasks=Tasks(size, in_disorder([])))
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert not (tmp_path / "out.safetensors").exists()


def test_a_task_of_another_input_is_refused(tmp_path: Path) -> None:
    shutil.copy(TRAINING, tmp_path / "in.pth")
    with ckptool.open(tmp_path / "in.pth") as checkpoint:
        (task,) = cut(checkpoint, tmp_path / ".out.ckptool-part", 1 << 30)
    (tmp_path / ".out.ckptool-part").write_bytes(bytes(TRAINING.stat().st_size))
    os.utime(tmp_path / "in.pth", ns=(1, 1))
    with pytest.raises(ChangedError, match="changed since the plan was made") as caught:
        tasks.carry_out_line(json.dumps(task))
    assert caught.value.path == str(tmp_path / "in.pth")


def hostile(task: TaskJson, **parts: Any) -> str:
    """A task with other parts, whose id is that of its content."""
    from ckptool.files.tasks import _id

    changed: Any = {**task, **parts}
    changed["task"] = _id(changed)
    return json.dumps(changed)


@pytest.mark.parametrize("word", [*VOCABULARY.classes.values(), *VOCABULARY.operations.values()])
def test_every_word_of_the_vocabulary_is_there(word: Word) -> None:
    value = word.resolve()
    if word.fields is not None:
        assert list(inspect.signature(value).parameters)[: len(word.fields)] == list(word.fields)


def test_a_task_names_nothing_outside_the_vocabulary(tmp_path: Path) -> None:
    with ckptool.open(TRAINING) as checkpoint:
        (task,) = cut(checkpoint, tmp_path / ".out.ckptool-part", 1 << 30)
    (tmp_path / ".out.ckptool-part").write_bytes(bytes(TRAINING.stat().st_size))
    for piece in (
        {"function": "os.system"},
        {"Computed": [3, {"function": "os:system"}, ["touch pwned"]]},
        {"eval": ["1"]},
        {"input": 7},
        {"Span": [1, 2]},
        {"bytes": "%"},
        {"Span": [{"input": 0}, 0, 3], "bytes": ""},
    ):
        writes = [{"output": 0, "at": 0, "pieces": [piece], "checks": []}]
        with pytest.raises(CkptoolError):
            tasks.carry_out_line(hostile(task, writes=writes))
    with pytest.raises(MalformedError, match="its id does not match its content"):
        tasks.carry_out_line(json.dumps({**task, "bytes": 1}))
    with pytest.raises(MalformedError):
        tasks.carry_out_line("{}")


def test_a_task_writes_to_staged_files_alone(tmp_path: Path) -> None:
    with ckptool.open(TRAINING) as checkpoint:
        (task,) = cut(checkpoint, tmp_path / ".out.ckptool-part", 1 << 30)
    size = TRAINING.stat().st_size
    (tmp_path / "notes").write_bytes(bytes(size))
    with pytest.raises(OutputError, match="not the staged output"):
        tasks.carry_out_line(hostile(task, outputs=[{"path": str(tmp_path / "notes"), "size": size}]))
    with pytest.raises(OutputError, match="not there"):
        tasks.carry_out_line(json.dumps(task))
    (tmp_path / ".out.ckptool-part").write_bytes(b"short")
    with pytest.raises(OutputError, match="planned"):
        tasks.carry_out_line(json.dumps(task))
    (tmp_path / ".out.ckptool-part").unlink()
    (tmp_path / ".out.ckptool-part").symlink_to(tmp_path / "notes")
    with pytest.raises(OutputError):
        tasks.carry_out_line(json.dumps(task))
    assert (tmp_path / "notes").read_bytes() == bytes(size)


def test_a_stream_is_not_planned(tmp_path: Path) -> None:
    from ckptool.files.sources import Span, open_source

    source = open_source(TRAINING)
    source.name = "-"
    cutter = Cutter([StagedFile(str(tmp_path / "out"), Plan((Span(source, 0, 9),)))], VOCABULARY)
    with pytest.raises(RefusedError, match="stream"):
        list(cutter)


def test_a_member_of_an_archive_is_planned_as_the_bytes_of_its_file(tmp_path: Path) -> None:
    shutil.make_archive(str(tmp_path / "a"), "zip", FIXTURES, "ddp4_training.pth")
    shutil.make_archive(str(tmp_path / "b"), "gztar", FIXTURES, "ddp4_training.pth")
    for archive in ("a.zip", "b.tar.gz"):
        with ckptool.open(f"{tmp_path / archive}!ddp4_training.pth") as checkpoint:
            edited = ckptool.strip_module(checkpoint)
            write_output(WriteRequest(edited, f"{tmp_path / archive}.pth"), tasks=Tasks(900, in_disorder([])))
    with ckptool.open(TRAINING) as checkpoint:
        ckptool.save(ckptool.strip_module(checkpoint), tmp_path / "whole.pth")
    for archive in ("a.zip", "b.tar.gz"):
        assert content(tmp_path / (archive + ".pth")) == content(tmp_path / "whole.pth")


@pytest.mark.parametrize("folder", [".d.ckptool-part/..", "d.ckptool-part", ".d.ckptool-part/e"])
def test_a_folder_that_is_called_like_a_staged_one_opens_no_other(folder: str, tmp_path: Path) -> None:
    with ckptool.open(TRAINING) as checkpoint:
        (task,) = cut(checkpoint, tmp_path / ".out.ckptool-part", 1 << 30)
    size = TRAINING.stat().st_size
    for name in (".d.ckptool-part/e", "d.ckptool-part"):
        (tmp_path / name).mkdir(parents=True)
    victim = tmp_path / folder / "notes"
    victim.write_bytes(bytes(size))
    with pytest.raises(OutputError, match="not the staged output"):
        tasks.carry_out_line(hostile(task, outputs=[{"path": f"{tmp_path}/{folder}/notes", "size": size}]))
    assert victim.read_bytes() == bytes(size)


def test_a_task_of_wrong_types_is_refused(tmp_path: Path) -> None:
    with ckptool.open(TRAINING) as checkpoint:
        (task,) = cut(checkpoint, tmp_path / ".out.ckptool-part", 1 << 30)
    (tmp_path / ".out.ckptool-part").write_bytes(bytes(TRAINING.stat().st_size))
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    changed: list[dict[str, Any]] = [
        {name: value} for name in ("bytes", "outputs", "inputs", "writes", "deferred") for value in (None, "x", [1], {})
    ]
    pieces = (3, "x", {"dtype": "float32"}, {"Span": [{"input": 0}, 0, -5]}, {"Span": [{"input": 0}, 0, "x"]}, deep)
    changed += [{"writes": [{"output": 0, "at": 0, "pieces": [piece], "checks": []}]} for piece in pieces]
    changed.append({"outputs": [{**task["outputs"][0], "size": 10**30}]})
    for output, at in ((0, TRAINING.stat().st_size), (0, -1), (1, 0), (-1, 0)):
        changed.append({"writes": [{"output": output, "at": at, "pieces": [{"bytes": "AAAA"}], "checks": []}]})
    for parts in changed:
        with pytest.raises(CkptoolError):
            tasks.carry_out_line(hostile(task, **parts))
    assert (tmp_path / ".out.ckptool-part").read_bytes() == bytes(TRAINING.stat().st_size)
