"""Law 8, proven: what was staged is read back, and an output that is not as the edit promised is never committed."""

from __future__ import annotations

import errno
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from conftest import FIXTURES, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptool
from ckptool import saving
from ckptool.base.errors import OutputError, ReadBackError
from ckptool.checkpoint.checkpoint import Checkpoint
from ckptool.cli.main import run
from ckptool.files import sources
from ckptool.files.sources import BytesSource, Plan
from ckptool.files.write import in_place, output
from ckptool.files.zips.writer import RecordContent
from ckptool.formats import repickled
from ckptool.formats.dcp import writer as dcp_writer
from ckptool.formats.hf import writer as hf_writer
from ckptool.formats.losses import Promise
from ckptool.formats.planning import promise_of
from ckptool.formats.programs import writer as program_outputs
from ckptool.formats.readback import check_file
from ckptool.formats.safetensors import writer as safetensors_writer
from ckptool.formats.torch import legacy_writer, zip_writer
from ckptool.pickles.encode import encode
from ckptool.pickles.nodes import Dict, Graph


class Job(NamedTuple):
    """An edit and its output; ``make`` is given the opened input and, for two of them, itself again."""

    name: str
    make: Callable[[Checkpoint], Checkpoint]
    output: str = "out.pth"
    source: str = "in.pth"
    folder: bool = False


def _converted(target: str, **how: Any) -> Callable[[Checkpoint], Checkpoint]:
    return lambda checkpoint: ckptool.convert(checkpoint, target, key="model", allow_loss=["all"], **how)


def _to_dcp(checkpoint: Checkpoint) -> Checkpoint:
    return ckptool.convert(checkpoint, "dcp", allow_loss=["all"])


JOBS = (
    Job("zip", ckptool.strip_module),
    Job("fresh", ckptool.repack),
    Job("legacy-edit", ckptool.strip_module, source="in.legacy.pth"),
    Job("legacy", lambda c: ckptool.convert(c, "legacy")),
    Job("safetensors", _converted("safetensors"), "out.safetensors"),
    Job("safetensors-edit", lambda c: ckptool.drop(c, ["module.a"]), "out.safetensors", "in.safetensors"),
    Job("to-torch", lambda c: ckptool.convert(c, "torch"), source="in.safetensors"),
    Job("shards", _converted("safetensors", max_shard_size=64), "out", folder=True),
    Job("torch-shards", _converted("torch", max_shard_size=64), "out", folder=True),
    Job("dcp", _to_dcp, "out.dcp", folder=True),
    Job("cast", lambda c: ckptool.cast(c, "float16")),
    Job("merge", lambda c: ckptool.merge(c, c, key="model", other_key="model")),
    Job("average", lambda c: ckptool.average([c, c])),
    Job("slim", ckptool.slim, source="part.pth"),
    Job("sanitize", ckptool.sanitize, source="objects.pth"),
    Job("salvage", lambda c: ckptool.salvage(c.path).checkpoint, source="damaged.pth"),
    Job("redact", lambda c: ckptool.redact(c, "paths")),
    Job("tar", lambda c: ckptool.wrap(c, "inner"), source="tarred.tar"),
    Job("program", lambda c: ckptool.remap(c, {"cpu": "cuda:3"}), source="script.pt", output="out.pt"),
)
FROM_FIXTURES = {
    "tarred.tar": "torch01.tar",
    "script.pt": "torchscript.pt",
    "objects.pth": "numpy_objects.pth",
    "damaged.pth": "zip_wrong_crc.pth",
}
PICKLED = [job for job in JOBS if not job.name.startswith(("safetensors", "shards"))]
each = pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    shared = torch.arange(24.0)
    state = OrderedDict(
        (f"module.{name}", value)
        for name, value in (
            *(("a", shared[:12].reshape(3, 4)), ("b", shared[12:])),
            *(("c", torch.arange(7)), ("d", torch.ones(2, 5, dtype=torch.float16)), ("e", torch.zeros(()))),
        )
    )
    value = {"model": state, "epoch": 3, "home": "/home/somebody/run/model.pth"}
    torch.save(value, folder / "in.pth")
    torch.save(value, folder / "in.legacy.pth", _use_new_zipfile_serialization=False)
    torch.save({"model": {"a": torch.arange(999.0)[:10]}, "more": {"n": 1}}, folder / "part.pth")
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "in.safetensors")
    for name, fixture in FROM_FIXTURES.items():
        shutil.copyfile(FIXTURES / fixture, folder / name)
    return folder


def attempt(job: Job, inputs: Path, folder: Path) -> ReadBackError:
    """Save with a writer that is broken by now: there must be no output, and nothing else there."""
    source = inputs / job.source
    before = source.read_bytes()
    with ckptool.open(source) as checkpoint, pytest.raises(ReadBackError) as caught:
        ckptool.save(job.make(checkpoint), folder / job.output)
    assert os.listdir(folder) == [] and source.read_bytes() == before
    return caught.value


# -- a disk that fails: no bug, and no output ---------------------------------------------------------------------


def _fail(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    """While ``name`` is called no file can be read."""
    real = getattr(where, name)

    def refused(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing(*args: Any) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(sources, "_pread", refused)
            return real(*args)

    monkeypatch.setattr(where, name, failing)


@pytest.mark.sampled(every=3)
@each
def test_a_disk_that_fails_is_no_bug(job: Job, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail(monkeypatch, saving, "check_folder" if job.folder else "check_file")
    with ckptool.open(inputs / job.source) as checkpoint, pytest.raises(OutputError) as caught:
        ckptool.save(job.make(checkpoint), tmp_path / job.output)
    assert os.listdir(tmp_path) == [] and str(caught.value).endswith("Input/output error")


@pytest.mark.parametrize("job", [job for job in JOBS if job.folder], ids=lambda job: job.name)
def test_a_disk_that_fails_at_any_file_of_a_folder(
    job: Job, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file cannot be opened when the staged folder is read, it is the disk that is named."""
    real, check = os.open, saving.check_folder
    left = 0

    def opening(*args: Any, **options: Any) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **options)

    def checked(*args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", opening)
            check(*args)

    monkeypatch.setattr(saving, "check_folder", checked)
    for number in range(1, 100):
        left = number
        output = tmp_path / f"{number}{job.output}"
        with ckptool.open(inputs / job.source) as checkpoint:
            try:
                ckptool.save(job.make(checkpoint), output)
            except OutputError as error:
                assert str(error).endswith("Input/output error")
                assert not output.exists()
                continue
        assert left > 0 and number > 1  # it was not reached
        return
    pytest.fail("the read-back opens no end of files")


def test_a_disk_that_fails_in_an_edit_in_place(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.pth"
    shutil.copyfile(inputs / "in.pth", path)
    before = path.read_bytes()
    _fail(monkeypatch, saving, "check_file")
    with ckptool.open(path) as checkpoint, pytest.raises(OutputError, match="Input/output error"):
        ckptool.save_in_place(ckptool.strip_module(checkpoint))
    assert path.read_bytes() == before


# -- broken encoders: the pickle itself is another one -----------------------------------------------------------


def _worse(graph: Graph) -> Graph:
    """Another object: the last dict lacks its last entry, or the first text is another one."""
    dicts = [ref for ref in graph.reachable() if type(graph.nodes[ref]) is Dict and graph.nodes[ref].pairs]
    if dicts:
        node = graph.nodes[dicts[-1]]
        assert isinstance(node, Dict)
        return graph.edited({dicts[-1]: Dict(node.pairs[:-2])})
    numbers = [ref for ref in graph.reachable() if type(graph.nodes[ref]) is int]
    return graph.edited({numbers[-1]: 99})


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("job", PICKLED, ids=lambda job: job.name)
def test_an_encoder_that_loses_something(
    job: Job, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = encode
    with ckptool.open(inputs / job.source) as checkpoint:
        unedited = len(checkpoint.container.graph.nodes)
    monkeypatch.setattr(repickled, "respelled", lambda *_: None)
    monkeypatch.setattr(
        repickled, "encode", lambda graph: real(graph if len(graph.nodes) == unedited else _worse(graph))
    )
    for module in (zip_writer, legacy_writer, dcp_writer):
        monkeypatch.setattr(module, "encode", lambda graph: real(graph if len(graph.nodes) < 12 else _worse(graph)))
        if hasattr(module, "prove"):
            monkeypatch.setattr(module, "prove", lambda *_: None)
    turn = iter((False, True))  # the unedited pickle first
    monkeypatch.setattr(program_outputs, "encode", lambda graph: real(_worse(graph) if next(turn, True) else graph))
    attempt(job, inputs, tmp_path)


# -- broken plans and broken writing: bytes are others than they must be ------------------------------------------


def _after_writing(patch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]) -> None:
    real = output.write_pieces

    def broken(plan: Plan, fd: int, progress: Any = None) -> None:
        real(plan, fd, progress)
        size = os.fstat(fd).st_size
        data = change(os.pread(fd, size, 0))
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))

    patch.setattr(output, "write_pieces", broken)


BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "zeros at the front": lambda data: bytes(64) + data[64:],
}


@each
@pytest.mark.parametrize("name", BREAKS)
def test_a_writer_that_breaks_the_file(
    name: str, job: Job, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _after_writing(monkeypatch, BREAKS[name])
    attempt(job, inputs, tmp_path)


def _sizes_swapped(contents: Any) -> list[RecordContent]:
    found = list(contents)
    storages = [number for number, one in enumerate(found) if "/data/" in one.name]
    sizes = {number: found[number].size for number in storages}
    one = storages[0]
    two = next((number for number in storages if sizes[number] != sizes[one]), -1)
    if two >= 0:
        found[one], found[two] = found[two]._replace(name=found[one].name), found[one]._replace(name=found[two].name)
    return found


@pytest.mark.parametrize("what", ["swapped", "dropped", "doubled"])
@pytest.mark.parametrize("name", ["fresh", "to-torch", "cast", "merge", "average"])
def test_a_layout_with_the_wrong_records(
    name: str, what: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = zip_writer.plan_archive

    def broken(contents: Any) -> Plan:
        found = list(contents)
        last = next(one for one in reversed(found) if "/data/" in one.name)
        if what == "swapped":
            return real(_sizes_swapped(found))
        return real([*found, last] if what == "doubled" else [one for one in found if one is not last])

    monkeypatch.setattr(zip_writer, "plan_archive", broken)
    (job,) = (job for job in JOBS if job.name == name)
    error = attempt(job, inputs, tmp_path)
    assert error.exit_code == 70 and any("promised" in line for line in error.report)


#: Dtypes of the same width.
OTHERS = {"int64": "uint64", "float32": "int32", "float16": "bfloat16"}


@pytest.mark.parametrize("name", ["safetensors", "safetensors-edit", "shards"])
@pytest.mark.parametrize("what", ["shape", "dtype", "name"])
def test_a_header_that_says_otherwise(
    name: str, what: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = safetensors_writer._arranged

    def broken(*arguments: Any) -> Any:
        pairs = real(*arguments)
        named, piece = pairs[-1]
        other = {
            "shape": named._replace(tensor=named.tensor._replace(shape=(1, *named.tensor.shape))),
            "dtype": named._replace(tensor=named.tensor._replace(dtype=OTHERS[named.tensor.dtype])),
            "name": named._replace(name=named.name + "x"),
        }
        return [*pairs[:-1], (other[what], piece)]

    monkeypatch.setattr(safetensors_writer, "_arranged", broken)
    (job,) = (job for job in JOBS if job.name == name)
    attempt(job, inputs, tmp_path)


def test_an_index_that_names_another_shard(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = hf_writer.json.dumps

    def broken(value: Any, **how: Any) -> str:
        if "weight_map" in value:
            places = value["weight_map"]
            value = {**value, "weight_map": {**places, next(iter(places)): list(places.values())[-1]}}
        return real(value, **how)

    monkeypatch.setattr(hf_writer.json, "dumps", broken)
    attempt(next(job for job in JOBS if job.name == "shards"), inputs, tmp_path)


# -- in place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["pickle", "directory", "encoder", "respelled"])
def test_an_edit_in_place_that_reads_otherwise(
    where: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.pth"
    shutil.copyfile(inputs / "in.pth", path)
    before = path.read_bytes()
    real = in_place.write_at

    def broken(fd: int, at: int, data: bytes) -> None:
        mark = {"pickle": b"epoch", "directory": b"PK\x01\x02"}.get(where, b"\0none")
        found = data.find(mark)
        if found >= 0:
            data = data[:found] + bytes((data[found] ^ 1,)) + data[found + 1 :]
        real(fd, at, data)

    if where == "encoder":
        encode = repickled.encode
        monkeypatch.setattr(repickled, "respelled", lambda *_: None)
        with ckptool.open(path) as checkpoint:
            whole = encode(checkpoint.graph)
        monkeypatch.setattr(
            repickled, "encode", lambda graph: data if (data := encode(graph)) == whole else encode(_worse(graph))
        )
    if where == "respelled":
        respelled = repickled.respelled
        monkeypatch.setattr(
            repickled, "respelled", lambda *given: (respelled(*given) or b"").replace(b"epoch", b"epoxh", 1)
        )
    monkeypatch.setattr(in_place, "write_at", broken)
    with ckptool.open(path) as checkpoint, pytest.raises(ReadBackError) as caught:
        ckptool.save_in_place(ckptool.strip_module(checkpoint))
    assert path.read_bytes() == before and caught.value.exit_code == 70
    assert oracle.difference(oracle.load(path), oracle.load(inputs / "in.pth")) == ""


# -- what a user sees --------------------------------------------------------------------------------------------------


def test_the_report(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _after_writing(monkeypatch, lambda data: data.replace(b"epoch", b"epoxh"))
    code = run(["strip-module", str(inputs / "in.pth"), "-o", str(tmp_path / "out.pth"), "--format", "json"])
    out, err = capsys.readouterr()
    assert code == 70 and os.listdir(tmp_path) == []
    assert "nothing was changed" in err and "please report it" in err and "ckptool 0.1.0 strip-module" in err
    report = err[err.index("please report") :]
    assert str(tmp_path) not in report and str(inputs) not in report and "promised:" in report
    assert '"report"' in out


# -- whatever is changed in the metadata is seen ---------------------------------------------------------------------


class Good:
    """An output that is whole, with its promise and what torch loads of it; shown by its name when a test fails."""

    def __init__(self, name: str, path: Path, promise: Promise) -> None:
        self.name, self.path, self.promise = name, path, promise
        self.data, self.loaded = path.read_bytes(), _load(path)
        with ckptool.open(path) as written:
            spans = [record.span for record in written.container.records() if record.key]
        values = {at for span in spans for at in range(span.offset, span.offset + span.size)}
        self.places = [at for at in range(len(self.data)) if at not in values]

    def __repr__(self) -> str:
        return self.name


@pytest.fixture(scope="module")
def good(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Good]:
    folder = tmp_path_factory.mktemp("good")
    found = []
    for job in JOBS:
        if job.name not in ("zip", "fresh", "legacy", "safetensors"):
            continue
        out = folder / f"{job.name}-{job.output}"
        with ckptool.open(inputs / job.source) as checkpoint:
            edited = job.make(checkpoint)
            ckptool.save(edited, out)
            promise = promise_of(edited, str(out))
            assert promise is not None
            found.append(Good(job.name, out, promise))
    return found


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return oracle.load(path)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck), print_blob=False)
@given(choice=st.data())
def test_what_torch_would_see_is_seen(choice: Any, good: list[Good], tmp_path: Path) -> None:
    """A byte of the metadata is another one: it is seen, or nothing that torch loads is another one."""
    number = choice.draw(st.integers(0, len(good) - 1))
    whole = good[number]
    at = whole.places[choice.draw(st.integers(0, len(whole.places) - 1))]
    byte = choice.draw(st.integers(1, 255))
    data = whole.data[:at] + bytes((whole.data[at] ^ byte,)) + whole.data[at + 1 :]
    path = tmp_path / whole.path.name
    try:
        check_file(whole.promise, BytesSource(data, str(path)))
    except ReadBackError:
        return
    path.write_bytes(data)
    assert oracle.difference(_load(path), whole.loaded) == "", (whole.name, at, byte)
