"""Outputs written by many processes: planned as tasks in a file, carried out anywhere, committed as a whole.

A task file has a line for each output (where it is staged), a line for each task, and a last line. Its journal, beside
it, has a line for each finished task. Committing plans again, and requires exactly the tasks in the file. So the
inputs, the command and the version are the planned ones, and the output is read back as always.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing, contextmanager, suppress
from functools import partial
from typing import Any, Final, cast

from .base.errors import ChangedError, MalformedError, RefusedError, UnreadableError, refuse_remote
from .base.records import NamedTuple, TypedDict
from .base.steps import NextStep, Setting, advice, as_step, command
from .base.text import pluralize
from .edits.vocabulary import VOCABULARY
from .files.codec import InputFile, has_shape, open_input
from .files.sources import FilePath, FolderPlan
from .files.tasks import TASK_SIZE, Cutter, DoneJson, TaskJson, close_inputs, decoded
from .files.write.journal import Journal, LineFile, entries
from .files.write.output import StagedFile, remove_temporary
from .files.write.tasks import carry_out, is_staged, stage, staged_name
from .formats.opening import CheckpointOrPath, as_checkpoint, path_text
from .saving import OnProgress, Saved, Tasks, WriteRequest, prepared, write_output

SCHEMA: Final = "ckptool.tasks/1"
#: How every task file begins, whatever its version.
_HEAD: Final = '{"schema":"ckptool.tasks/'
#: The schema of the lines in a journal of tasks.
DONE: Final = "ckptool.done/1"
#: The suffix of a journal, after the name of its task file.
JOURNAL: Final = ".journal"
#: Maximum number of tasks submitted to an executor before their results are needed; this bounds memory.
_AHEAD: Final = 256


class StagedJson(TypedDict):
    """Where an output will be staged. This line is written before staging, so that leftovers of a killed plan are
    known.
    """

    staged: str


class OutputJson(TypedDict):
    """A planned output: its path as given, where it is ``staged``, the inode of the staged file, its size in bytes."""

    output: str
    staged: str
    inode: int
    bytes: int


class SheetJson(TypedDict):
    """The first line of a task file: the planned ``command``, its folder, and the version of ckptool."""

    schema: str
    ckptool: str
    command: list[str]
    folder: str
    task_size: int


class EndJson(TypedDict):
    """The last line of a task file: the number of tasks, and the ``bytes`` of all outputs."""

    tasks: int
    bytes: int


class DoneLine(DoneJson):
    """A journal line: a finished task and its results.

    ``checksums`` are (number, offset, bytes, CRC-32), ``deferred`` (number, offset, bytes, value).
    """

    schema: str


class PlacingJson(TypedDict):
    """The journal line before an output is put in place: where it is ``staged``."""

    schema: str
    placing: str


class CommittedJson(TypedDict):
    """The last line of a journal: all staged outputs are in place."""

    schema: str
    committed: list[str]


# -- in one process, on any executor


def plan(
    checkpoint: CheckpointOrPath, path: FilePath, *, force: bool = False, follow_links: bool = False
) -> WriteRequest:
    """Return a plan for ``run``: the output of ``save`` with these arguments.

    If the output exists, raise as ``save`` does.

    >>> plan = ckptool.plan(ckptool.strip_module("training.pth"), "planned.pth")
    >>> ckptool.run(plan).path
    'planned.pth'
    """
    output = WriteRequest(as_checkpoint(checkpoint), path_text(path), force, follow_links)
    prepared(output)
    return output


def run(
    plan: WriteRequest,
    executor: Executor | None = None,
    *,
    task_size: int = TASK_SIZE,
    on_progress: OnProgress | None = None,
) -> Saved:
    """Write a planned output: ``executor`` carries out its tasks of about ``task_size`` bytes, on any machine.

    The machines must see the inputs and the output's folder under the same paths, and have the same ckptool. The output
    equals that of ``save`` byte for byte, and appears as a whole or not at all. Without an executor, ``save`` writes
    it. Raise the errors of ``save``, and any error of a task.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(2) as executor:
    ...     saved = ckptool.run(ckptool.plan("training.pth", "carried.pth"), executor)
    >>> saved.size
    26105
    """
    if executor is None:
        return write_output(plan, on_progress=on_progress)
    tasks = Tasks(task_size, partial(on_executor, executor=executor))
    return write_output(plan, tasks=tasks, on_progress=on_progress)


def on_executor(tasks: Iterable[TaskJson], executor: Executor) -> Generator[DoneJson, None, None]:
    """Yield the results of tasks as they finish. After an error no more tasks are started, and the error is raised."""
    rest = iter(tasks)
    waiting: set[Future[DoneJson]] = set()
    try:
        while True:
            while len(waiting) < _AHEAD and (task := next(rest, None)) is not None:
                waiting.add(executor.submit(carry_out_line, json.dumps(task)))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        for future in waiting:
            future.cancel()
        # Running tasks still write to the staged file, which may be removed after this.
        wait(waiting)


def carry_out_line(line: str) -> DoneJson:
    """Carry out a task, given as a line of JSON, in this process; return its results."""
    task = decoded(cast(TaskJson, json.loads(line)), VOCABULARY)
    try:
        return carry_out(task)
    finally:
        close_inputs(task.inputs)


# -- a file of tasks


class Planned(NamedTuple):
    """A finished task file: its path, the number of tasks, and the bytes of the outputs."""

    path: str
    tasks: int
    bytes: int


class SheetWriter:
    """Plans outputs into a new task file. After an error, ``discard`` removes it and the staged outputs."""

    def __init__(self, path: str, command: Sequence[str], version: str, task_size: int = TASK_SIZE) -> None:
        _remove_committed(path)
        try:
            self._file = LineFile(path)
        except FileExistsError:
            if not _is_of_tasks(path):
                what = "it exists and is not a file of tasks"
                raise RefusedError(
                    what, path=path, next=advice("name a new file for ", Setting("tasks", None))
                ) from None
            what = "there are tasks in it that are not committed"
            raise RefusedError(what, path=path, next=_abort(path)) from None
        self.path = path
        self._size = task_size
        self._staged: list[str] = []
        self._tasks = self._bytes = 0
        sheet: SheetJson = {
            "schema": SCHEMA,
            "ckptool": version,
            "command": list(command),
            "folder": os.getcwd(),
            "task_size": task_size,
        }
        try:
            self._file.add(sheet, now=True)
        except BaseException:
            self.discard()
            raise

    def save(self, output: WriteRequest, on_progress: OnProgress | None = None) -> Saved:
        """Plan an output instead of writing it; raise the errors of ``write_output``, except for a lack of space."""
        ready = prepared(output)
        path = ready.path
        if os.path.realpath(path) in (os.path.realpath(self.path), os.path.realpath(self.path) + JOURNAL):
            raise RefusedError("the tasks would be in the place of the output", path=path, next="rename one of them")
        staged = staged_name(path)
        self._staged.append(staged)
        self._file.add(StagedJson(staged=staged), now=True)
        stage(ready.plan, path, staged, ready.checkpoint.sources, force=output.force)
        row: OutputJson = {
            "output": path,
            "staged": staged,
            "inode": os.stat(staged).st_ino,
            "bytes": ready.plan.size,
        }
        self._file.add(row)
        if isinstance(ready.plan, FolderPlan):
            files = [StagedFile(os.path.join(staged, name), file) for name, file in ready.plan.files]
        else:
            files = [StagedFile(staged, ready.plan)]
        done = 0
        for task in Cutter(files, VOCABULARY, self._size):
            self._file.add(task)
            self._tasks += 1
            done += task["bytes"]
            if on_progress is not None:
                on_progress(done, ready.plan.size)
        self._bytes += ready.plan.size
        return Saved(path, ready.plan.size, ready.exact, ready.plan, shortage=ready.shortage, planned=True)

    def close(self) -> Planned:
        """Write the last line, and close the file."""
        end: EndJson = {"tasks": self._tasks, "bytes": self._bytes}
        self._file.add(end)
        self._file.close()
        return Planned(self.path, self._tasks, self._bytes)

    def discard(self) -> None:
        """Remove the file and the staged outputs."""
        for staged in self._staged:
            remove_temporary(staged)
        remove_temporary(self.path)


class TaskFile(NamedTuple):
    """A complete task file: its first line, its outputs, and the number of tasks.

    ``path`` is as given by the user; ``file`` leads there from any folder.
    """

    path: str
    file: str
    head: SheetJson
    outputs: tuple[OutputJson, ...]
    tasks: int
    bytes: int


def read_sheet(path: str, version: str) -> TaskFile:
    """Read a task file that this version of ckptool planned.

    Raise UnreadableError if it cannot be read, MalformedError if it is not a task file, incomplete, or of another
    version.
    """
    lines = _lines(path)
    head = next(lines, {})
    if head.get("schema") != SCHEMA:
        what = "it is not a file of tasks" if "schema" not in head else f"its schema is {head['schema']!r}"
        raise MalformedError(what, path=path, next=f"make one: {command('plan', tasks='FILE').line} COMMAND ...")
    if head.get("ckptool") != version:
        what = f"it was planned by ckptool {head.get('ckptool')}, and this is {version}"
        raise MalformedError(what, path=path, next="plan again, or use that version")
    if not has_shape(head, SheetJson) or not head["command"] or "\0" in head["folder"]:
        raise _damaged(path)
    outputs: list[OutputJson] = []
    last: dict[str, Any] = {}
    for last in lines:
        if "output" in last:
            if not has_shape(last, OutputJson) or not is_staged(last["staged"]):
                raise _damaged(path)
            outputs.append(cast(OutputJson, last))
    if not has_shape(last, EndJson):
        what = "it ends too early: planning it was interrupted"
        raise MalformedError(what, path=path, next=_again(path))
    return TaskFile(path, os.path.realpath(path), cast(SheetJson, head), tuple(outputs), last["tasks"], last["bytes"])


def _damaged(path: str) -> MalformedError:
    return MalformedError("a line of it was changed", path=path, next="plan again, into another file")


def tasks_of(sheet: TaskFile, share: tuple[int, int] = (1, 1)) -> Iterator[TaskJson]:
    """Yield the tasks in a task file, or the share ``i`` of ``n`` (from 1)."""
    number = -1
    for line in _lines(sheet.file):
        if "task" in line:
            if not has_shape(line, TaskJson):
                raise _damaged(sheet.path)
            number += 1
            if number % share[1] == share[0] - 1:
                yield cast(TaskJson, line)


def done_in(sheet: TaskFile) -> dict[str, DoneJson]:
    """Return the results of the finished tasks, by task id."""
    done = (cast(DoneJson, line) for line in _journal(sheet.file) if has_shape(line, DoneJson))
    return {line["task"]: line for line in done if all(len(row) == 4 for row in line["checksums"] + line["deferred"])}


def _is_of_tasks(path: str) -> bool:
    """Return whether a file is a task file of any version, or a leftover from an interrupted ``plan``.

    Raise UnreadableError if it cannot be read.
    """
    refuse_remote(path)
    head = _HEAD.encode("ascii")
    try:
        if not os.path.isfile(path) and os.path.exists(path):
            return False
        with open(path, "rb") as file:
            return head.startswith(file.read(len(head)))
    except OSError as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise UnreadableError(what, path=path) from error


def _journal(path: str) -> Iterator[dict[str, Any]]:
    return _lines(path + JOURNAL) if os.path.exists(path + JOURNAL) else iter(())


def _lines(path: str) -> Iterator[dict[str, Any]]:
    return (entry.value for entry in entries(path) if entry.value is not None)


class Ran(NamedTuple):
    """The result of ``run_tasks``: the number of tasks in the share, those carried out now, and those
    finished earlier.
    """

    tasks: int
    now: int
    before: int
    bytes: int


def run_tasks(
    sheet: TaskFile,
    share: tuple[int, int] = (1, 1),
    executor: Executor | None = None,
    on_done: Callable[[int], None] | None = None,
) -> Ran:
    """Carry out the tasks that are not finished; each goes into the journal once its bytes are on the disk.

    ``on_done`` is called with the bytes of each task. Raise the error of a task; tasks finished before it stay in the
    journal.
    """
    before = done_in(sheet)
    counts = [0, 0, 0]

    def left() -> Iterator[TaskJson]:
        for task in tasks_of(sheet, share):
            counts[0] += 1
            if task["task"] not in before:
                yield task
            elif on_done is not None:
                on_done(task["bytes"])

    here = (carry_out_line(json.dumps(task)) for task in left())
    with closing(Journal(sheet.file + JOURNAL, DONE)) as journal, _planned_before(sheet.path):
        for done in here if executor is None else on_executor(left(), executor):
            line: DoneLine = {"schema": DONE, **done}  # "schema" is the first key in every line of a journal
            journal.add(line, sync=True)
            counts[1] += 1
            counts[2] += done["bytes"]
            if on_done is not None:
                on_done(done["bytes"])
    return Ran(counts[0], counts[1], counts[0] - counts[1], counts[2])


class Committer:
    """Puts the outputs of a task file in place, each as a whole, once all their tasks are finished."""

    def __init__(self, sheet: TaskFile) -> None:
        self._sheet = sheet
        self._done = done_in(sheet)
        self._placing = {line["placing"] for line in _journal(sheet.file) if isinstance(line.get("placing"), str)}
        self._left = list(sheet.outputs)
        with _planned_before(sheet.path):
            self._check_staged()
            self._check_inputs()
        missing = sum(task["task"] not in self._done for task in tasks_of(sheet))
        if missing:
            what = f"{pluralize(missing, 'task')} of {sheet.tasks:,} not done yet"
            raise RefusedError(what, path=sheet.path, next=command("run", sheet.path))

    def _check_staged(self) -> None:
        """Raise RefusedError if a staged output is gone, ChangedError if it is not the planned one."""
        for output in self._sheet.outputs:
            if self._placed(output):
                continue
            if not os.path.exists(output["staged"]):
                what = "its staged output is not there any more: it was committed and moved, or aborted"
                raise RefusedError(what, path=output["output"], next=_again(self._sheet.path))
            status = os.stat(output["staged"])
            changed = stat.S_ISREG(status.st_mode) and status.st_size != output["bytes"]
            if changed or status.st_ino != output["inode"]:
                what = "its staged output is not the one that was planned: it was replaced, or cut"
                raise ChangedError(what, path=output["output"], next="plan again")

    def _check_inputs(self) -> None:
        """Raise ChangedError if an input is not the file used for planning."""
        seen: dict[str, InputFile] = {}
        for task in tasks_of(self._sheet):
            seen.update((file["uri"], file) for file in task["inputs"])
        for file in seen.values():
            open_input(file).close()

    def save(self, output: WriteRequest, on_progress: OnProgress | None = None) -> Saved:
        """Put an output in place; raise the errors of ``write_output``."""
        if not self._left or self._left[0]["output"] != output.path:
            what = "the command has other outputs than were planned"
            raise ChangedError(what, path=output.path, next=_again(self._sheet.path))
        row = self._left.pop(0)
        placed = self._placed(row)
        if placed:
            ready = prepared(output, dry_run=True)
            return Saved(placed, ready.plan.size, ready.exact, ready.plan)
        if not output.force and os.path.lexists(output.path):
            what = "it exists now, and did not when it was planned"
            raise RefusedError(what, path=output.path, next="move it away, then commit again")
        tasks = Tasks(self._sheet.head["task_size"], self._found_out)
        self._note({"schema": DONE, "placing": row["staged"]})
        with _planned_before(self._sheet.path):
            return write_output(output, on_progress=on_progress, tasks=tasks, staged=row["staged"])

    def _found_out(self, tasks: Iterable[TaskJson]) -> Generator[DoneJson, None, None]:
        for task in tasks:
            done = self._done.get(task["task"])
            if done is None or [row[:3] for row in done["deferred"]] != task["deferred"]:
                what = "planned again, the tasks are others: the command is not repeatable, or a file changed"
                raise ChangedError(what, path=self._sheet.path, next="plan again")
            yield done

    def close(self) -> None:
        """Record that all outputs are in place."""
        self._note({"schema": DONE, "committed": [output["staged"] for output in self._sheet.outputs]})

    def _placed(self, output: OutputJson) -> str:
        """Return the path of an output that a killed commit had already put in place, or ""."""
        return _placed(output, self._sheet.head["folder"]) if output["staged"] in self._placing else ""

    def _note(self, line: PlacingJson | CommittedJson) -> None:
        with closing(Journal(self._sheet.file + JOURNAL, DONE)) as journal:
            journal.add(line, sync=True)


def _placed(output: OutputJson, folder: str) -> str:
    """Return the path of an output that is already in place, or ""; remove what a killed commit left.

    ``folder`` is the one in which it was planned.
    """
    folder, name = os.path.split(os.path.realpath(os.path.join(folder, output["output"])))
    with suppress(OSError):
        names = [name] if "{hash8}" not in name else os.listdir(folder)
        for one in names:
            target = os.path.join(folder, one)
            if target != output["staged"] and _is_inode(target, output["inode"], folder):
                remove_temporary(output["staged"])
                return os.path.join(os.path.dirname(output["output"]), one)
    return ""


def _is_inode(path: str, inode: int, folder: str) -> bool:
    """Return whether a path exists, with this inode on the file system of its folder."""
    if not os.path.exists(path):
        return False
    status = os.stat(path)
    return status.st_ino == inode and status.st_dev == os.stat(folder).st_dev


def abort(path: str) -> int:
    """Remove a task file, its journal, and the staged outputs; return how many outputs were removed.

    Raise MalformedError, and remove nothing, if it is not a task file; an incompletely planned one is accepted.
    """
    if not _is_of_tasks(path):
        raise MalformedError("it is not a file of tasks", path=path)
    staged = [line["staged"] for line in _lines(path) if "staged" in line and "output" not in line]
    other = next((one for one in staged if not (isinstance(one, str) and is_staged(one))), None)
    if other is not None:
        raise MalformedError(f"it names what is not a staged output: {other}", path=path)
    removed = 0
    for one in staged:
        removed += os.path.lexists(one)
        left = remove_temporary(one)
        if left:
            raise UnreadableError("it cannot be removed", path=left)
    for name in (os.path.realpath(path) + JOURNAL, os.path.realpath(path), path):
        remove_temporary(name)
    return removed


def is_committed(sheet: TaskFile) -> bool:
    """Return whether all outputs were put in place earlier."""
    return _were_committed(sheet.file, sheet.outputs)


def _were_committed(path: str, outputs: Iterable[OutputJson]) -> bool:
    # The journal may belong to earlier tasks under this name.
    staged = [output["staged"] for output in outputs]
    return any(line.get("committed") == staged for line in _journal(path))


def _remove_committed(path: str) -> None:
    """Remove a task file whose outputs are all in place, so that its name can be reused."""
    if not os.path.exists(path + JOURNAL) or not os.path.exists(path) or not _is_of_tasks(path):
        return
    if _were_committed(path, (cast(OutputJson, line) for line in _lines(path) if "output" in line)):
        remove_temporary(path + JOURNAL)
        remove_temporary(path)


def _abort(path: str) -> NextStep:
    return command("commit", path, abort=True)


def _again(path: str) -> NextStep:
    """Return the next step if the tasks are no longer usable."""
    return "abort before you plan again: " + _abort(path)


@contextmanager
def _planned_before(path: str) -> Iterator[None]:
    """Add a next step to the error if a file changed after planning."""
    try:
        yield
    except ChangedError as error:
        error.step = as_step(_again(path))
        raise
