"""Every command that reads prints the same for an address as for the same file or folder on a disk."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Said, program, say
from conftest import CHECKPOINTS, FIXTURES, WHOLE, sample
from quantized_layouts import write
from remote.server import KEY, MIB, SECRET, Server

from ckptool.base.text import human_bytes
from ckptool.cli import terminal
from ckptool.formats import folder_format

pytest.importorskip("obstore")

#: Every file, and every folder that is one checkpoint, with its format. By default, the parts of such folders are left
#: out.
FOLDERS = {
    Path(root).relative_to(FIXTURES).as_posix(): found.name
    for root, _, _ in sorted(os.walk(FIXTURES))
    if (found := folder_format(root)) is not None
}
FILES = [path.relative_to(FIXTURES).as_posix() for path in FIXTURES.rglob("*") if path.is_file()]
PARTS = {name for name in FILES if any(name.startswith(f"{folder}/") for folder in FOLDERS)}
WALKED = sorted({*FILES, *FOLDERS} - (set() if WHOLE else PARTS))
#: The commands, and what follows the path.
CALLS = [
    *(["keys"], ["inspect"], ["validate"], ["hash"], ["scan"], ["lock"]),
    *(["diff", str(FIXTURES / "bare.pth")], ["match", str(FIXTURES / "bare.pth")]),
]
#: Files of the formats with many fixtures. By default two or three files or folders of a format share the commands, but
#: ``validate``, which reads the most, is for all of them.
MANY = sorted({item.path.name for item in CHECKPOINTS} | {name for name in FILES if name.endswith(".safetensors")})


def calls_of(name: str) -> list[list[str]]:
    alike = [other for other in FOLDERS if FOLDERS[other] == FOLDERS.get(name)] or MANY
    if WHOLE or name not in alike or len(alike) < 3:
        return CALLS
    shared = sample([call for call in CALLS if call != ["validate"]], 3 if name in FOLDERS else 2, alike.index(name))
    return [["validate"], *shared]


WALKS = [(name, calls_of(name)) for name in WALKED]


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with Server() as server:
        for path in FIXTURES.rglob("*"):
            if path.is_file() and path.stat().st_size < 4 * MIB:
                server.put("bucket", str(path.relative_to(FIXTURES)).replace(os.sep, "/"), path.read_bytes())
        yield server


#: Advice for local files, and the one for remote files.
ADVICE = [
    ("write or download it again", "upload it again"),
    ("download it again, logged in or from the link of the raw file", "upload the file itself"),
    ("git lfs pull fetches it", "upload the file itself"),
    ("look into it, then download the checkpoint itself", "name the checkpoint itself"),
    ("copy or download it again, whole", "get a whole copy of the file"),
    ("download it again, or save", "get a whole copy of the file, or save"),
    ("unpack it with unzstd, then name what it holds", "download it, then unpack it"),
    ("In Python:", "In Python, with the file downloaded:"),
]


def plain(said: Said, folder: str = "") -> tuple[int, str, str]:
    """What a command said, without the address of the folder that is the working folder, and without its layout."""
    place, texts = f"s3://bucket/{folder}".rstrip("/"), []
    for text in (said.out, said.err):
        text = re.sub(r"; about [\d,]+ requests?.*$", "", text, flags=re.MULTILINE)  # what a dry run would move
        text = _without(text.replace("s3%3A", "s3:"), place, folder)
        text = _without(_squeezed(text), _squeezed(place), folder)  # also where a line ended in an address
        for local, remote in ADVICE:
            text = re.sub(_squeezed(local), _squeezed(remote), text)
        texts.append(text)
    return said.code, *texts  # type: ignore[return-value]


def _without(text: str, place: str, folder: str) -> str:
    text = text.replace(f"{place}/", "").replace(place, ".")
    return text.replace(os.path.dirname(place), "..") if folder else text


def _squeezed(text: str) -> str:
    return re.sub(r"[\s;─-]+", "", text)


@pytest.mark.sampled(every=20)
@pytest.mark.parametrize(("name", "calls"), WALKS, ids=WALKED)
def test_every_fixture(name: str, calls: list[list[str]], server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the file, suggested names of outputs are the same, too."""
    folder, file = os.path.split(name)
    monkeypatch.chdir(FIXTURES / folder)
    for command, *rest in calls:
        remote = say(command, f"s3://bucket/{name}", *rest, "-v")  # else the length of names decides what is printed
        assert plain(remote, folder) == plain(say(command, file, *rest, "-v"), folder), command


#: What else reads; {} is the path, and OUT an output.
MORE = [
    *("keys {} --all", "keys {} --names", "keys {} --format json", "inspect {} --format json"),
    *("validate {} --quick", "validate {} --load", "validate {} --format json"),
    *("inspect {} --load", "stats {} --format json"),
    *("scan {} --format json", "hash {} --each", "lock {} --content", "stats {}"),
    *("get {} epoch", "get {} state_dict", "explain {}", "explain \"KeyError: 'state_dict'\" {}", "redact {}"),
    *("validate {} --format github", "validate {} --format junit", "keys {} --format rows", "report {} -o OUT"),
    *("report {} " + str(FIXTURES / "bare.pth") + " -o OUT", "salvage {} --dry-run"),
    *("strip-module {} --dry-run", "add-module {} --dry-run", "convert {}", "convert {} --to-format torch --dry-run"),
    *("convert {} --to-format safetensors --dry-run", "convert {} --to-format hf --dry-run", "sanitize {} --dry-run"),
    *("slim {} --dry-run", "repack {} --dry-run", "cast {} --to bfloat16 --dry-run", "remap {} --to cpu --dry-run"),
    *("merge {} " + str(FIXTURES / "bare.pth") + " --dry-run", "extract {} state_dict --dry-run"),
]


@pytest.mark.sampled(every=60)
@pytest.mark.parametrize("name", WALKED)
def test_every_other_command(name: str, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, file = os.path.split(name)
    monkeypatch.chdir(FIXTURES / folder)
    out = tmp_path / "report.html"
    for words in MORE:
        said = []
        for path in (file, f"s3://bucket/{name}"):
            out.unlink(missing_ok=True)
            line = (word.replace("{}", path).replace("OUT", str(out)) for word in shlex.split(words))
            said.append(plain(say(*line, "-v"), folder))
        assert said[0] == said[1], words
    for words in (["undo"], ["undo", "--list"]):
        assert say(*words, f"s3://bucket/{name}").code in (3, 4)


def test_an_edit_expands_a_pattern_of_inputs(server: Server, tmp_path: Path) -> None:
    """One file cannot be the output of several, and a pattern is no output: its name is taken as it is."""
    pattern = "s3://bucket/bare*.pth"
    said = say("strip-module", pattern, "--dry-run")
    assert said.code == 0, said.all
    assert "s3://bucket/bare.pth: " in said.out and "s3://bucket/bare_module.pth: " in said.out
    before = dict(server.buckets["bucket"])
    assert say("strip-module", pattern, "-o", tmp_path / "one.pth").code == 2
    assert say("strip-module", pattern, "-o", "s3://bucket/one.pth").code == 2
    assert server.buckets["bucket"] == before and not [*tmp_path.iterdir()]
    try:
        assert say("strip-module", "s3://bucket/bare_module.pth", "-o", pattern).code == 0
        after = dict(server.buckets["bucket"])
        assert after.pop("bare*.pth") and after == before
    finally:
        server.buckets["bucket"].pop("bare*.pth", None)


@pytest.mark.parametrize("name", ["bitsandbytes nf4, nested", "compressed-tensors int4", "FP8 with 30x30 block scales"])
def test_quantized_weights_are_turned_back(name: str, server: Server, tmp_path: Path) -> None:
    for path in write(tmp_path / "in", name, "folder").iterdir():
        server.put("quantized", f"{name[:3]}/{path.name}", path.read_bytes())
    for place, out in ((f"s3://quantized/{name[:3]}/", "remote"), (tmp_path / "in", "local")):
        said = say("dequantize", place, "-o", tmp_path / out)
        assert said.code == 0, said.all
    one, other = (sorted((tmp_path / out).iterdir()) for out in ("remote", "local"))
    assert [path.name for path in one] == [path.name for path in other]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_files_around_a_file_on_a_web_server(server: Server) -> None:
    """A web server lists no files, so those with known names are asked for one by one."""
    for name in ("lora/adapter_config.json", "lora/adapter_model.safetensors"):
        server.put("plain", name, (FIXTURES / "real" / name).read_bytes())
    server.put("plain", "shards/model-00001-of-00002.safetensors", (FIXTURES / "model.safetensors").read_bytes())
    folder, place = FIXTURES / "real" / "lora", f"{server.url}/plain/lora"
    remote, local = (say("inspect", f"{path}/adapter_model.safetensors") for path in (place, folder))
    assert remote.code == 0
    assert plain(Said(0, remote.out.replace(place, str(folder)), "")) == plain(local)
    assert say("inspect", f"{server.url}/plain/shards/model-00001-of-00002.safetensors").code == 0


@pytest.mark.parametrize("name", ["a*b.pth", "a[1].pth", "a!b.pth", "a?v=2.pth", "a b+%20.pth", "ä{x}.pth"])
def test_names_with_odd_characters(name: str, server: Server, tmp_path: Path) -> None:
    data = (FIXTURES / "hostile_system.pth").read_bytes()
    (tmp_path / name).write_bytes(data)
    bucket = f"odd{len(server.buckets)}"
    server.put(bucket, f"run/{name}", data)
    server.put(bucket, "run/ok.pth", (FIXTURES / "bare.pth").read_bytes())
    for call in (["keys"], ["scan"], ["hash"]):
        remote, local = say(*call, f"s3://{bucket}/run/{name}"), say(*call, tmp_path / name)
        assert remote.code == local.code, remote.all
        assert local.out.replace(str(tmp_path), f"s3://{bucket}/run") in remote.out
    for call in (["validate"], ["scan"]):
        said = say(*call, f"s3://{bucket}/run/")
        assert said.code == 1 and name in said.out, said.all


def test_a_name_that_looks_like_a_query_is_not_skipped(server: Server) -> None:
    server.put("looks", "ok.pth", (FIXTURES / "bare.pth").read_bytes())
    server.put("looks", "evil?token=2.pth", (FIXTURES / "hostile_system.pth").read_bytes())
    for call in (["validate"], ["scan"], ["inspect"]):
        said = say(*call, "s3://looks/")
        assert said.code == 3 and "looks like a query" in said.all


@pytest.fixture
def runs(server: Server, tmp_path: Path) -> Path:
    """A folder of checkpoints, on the disk and in the bucket."""
    folder = tmp_path / "runs"
    names = ("a.pth", "b.safetensors", "notes.txt", "sub/c.pth", "sub/deep/d.pth", ".hidden.pth", ".old/e.pth", "dcp/x")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = (FIXTURES / "bare.pth").read_bytes() if name.endswith(".pth") else b"text"
        if name.endswith(".safetensors"):
            data = next(FIXTURES.glob("*.safetensors")).read_bytes()
        (folder / name).write_bytes(data)
        server.put("bucket", f"runs/{name}", data)
    for path in (FIXTURES / "dcp4").iterdir():
        shutil.copy(path, folder / "dcp")
        server.put("bucket", f"runs/dcp/{path.name}", path.read_bytes())
    return folder


@pytest.mark.parametrize("call", [["keys"], ["inspect"], ["validate"], ["scan"], ["hash"]])
@pytest.mark.parametrize(
    "rest", ["/", "", "/*.pth", "/**/*.pth", "/**", "/sub/**", "/sub/*", "/[ab]*", "/sub/?.pth", "/dcp"]
)
def test_a_folder_of_checkpoints_and_globs(
    call: list[str], rest: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    remote, local = (say(*call, f"{place}runs{rest}", "-v") for place in ("s3://bucket/", ""))
    beside = local._replace(out=re.sub(r"-o runs/(\S+/)?", "-o ", local.out))  # the output of a remote file is here
    assert plain(remote) == plain(beside)


def test_worker_processes_read_remote_files(runs: Path) -> None:
    words = ["scan", "s3://bucket/runs/", "-v", "--format", "rows"]
    alone, together = (program(*words, *more) for more in ([], ["--jobs", "2"]))
    assert alone.code == together.code == 0, together.err
    assert sorted(alone.out.splitlines()) == sorted(together.out.splitlines())


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> list[bytes]:
    """Two files with the same names and shapes, and other values: 2.9 MB each, so commands need several requests."""
    torch = pytest.importorskip("torch")
    files = []
    for start in (0, 100):
        file = io.BytesIO()
        torch.save({"state_dict": {f"module.{at}": torch.full((60_000,), float(start + at)) for at in range(12)}}, file)
        files.append(file.getvalue())
    return files


# -- options ------------------------------------------------------------------------------------------------------


def test_the_options_of_remote_files(
    server: Server, large: list[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert say("keys", "s3://bucket/bare.pth", "--endpoint-url", server.url).code == 0
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / ".aws").mkdir()
    keys = f"[team]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / ".aws" / "credentials").write_text(keys, encoding="utf-8")
    said = say("keys", "s3://bucket/bare.pth", "--profile", "team")
    assert said.code == 0, said.err
    server.put("bucket", "large.bin", bytes(3 * MIB))
    assert "it would download" in say("scan", "s3://bucket/large.bin", "--max-download", "1MB").all
    server.put("bucket", "large.pth", large[0])
    said = say("inspect", "s3://bucket/large.pth", "--load", "--max-download", "1MB")
    assert said.code == 4 and "large.pth: it would download" in said.err
    assert say("keys", "s3://bucket/bare.pth", "--max-download", "much").code == 2
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    server.signed = False
    try:
        assert say("keys", "s3://bucket/bare.pth", "--anonymous").code == 0
        assert "authorization" not in server.seen[-1].headers
    finally:
        server.signed = True


@pytest.mark.parametrize(
    ("kind", "call", "requests", "round_trips"),
    [
        ("zip", ["keys"], 2, 1),
        ("zip", ["get"], 3, 2),
        ("zip", ["validate", "--quick"], 26, 3),
        ("zip", ["strip-module", "--dry-run"], 26, 2),
        ("legacy", ["keys"], 26, 2),
        ("names", ["keys"], 5, 3),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) if isinstance(value, list) else "",
)
def test_readers_ask_ahead(
    kind: str, call: list[str], requests: int, round_trips: int, server: Server, tmp_path: Path
) -> None:
    """24 tensors of 160 kB, or 20,000 of one element: what a reader needs comes in one batch, not one by one."""
    torch = pytest.importorskip("torch")
    count, size = (20_000, 1) if kind == "names" else (24, 40_000)
    state = {f"module.layers.{at}.weight": torch.zeros(size) for at in range(count)}
    torch.save(state, tmp_path / "model.pth", _use_new_zipfile_serialization=kind != "legacy")
    server.put("asked", "model.pth", (tmp_path / "model.pth").read_bytes())
    more = {"strip-module": ["-o", tmp_path / "out.pth"], "get": ["module.layers.12.weight"]}
    words = [*call, "s3://asked/model.pth", *more.get(call[0], ())]
    said = server.slowly(lambda: say(*words), round_trips)
    assert said.code == 0, said.err
    assert server.count() <= requests
    assert server.round_trips <= round_trips


# -- progress -----------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress bars are wanted, and appear at once."""
    monkeypatch.setattr("click._termui_impl.isatty", lambda _stream: True)
    monkeypatch.setattr(terminal, "watched", lambda: True)
    monkeypatch.setattr(terminal, "_PATIENCE", -1.0)
    monkeypatch.setattr(terminal, "_REDRAWN", 0.0)
    for command in ("validate", "locks", "stats"):
        monkeypatch.setattr(f"ckptool.cli.{command}.watched", lambda: True)


@pytest.mark.parametrize("words", [["validate"], ["lock", "--content"]], ids=" ".join)
def test_a_progress_bar_has_a_total(words: list[str], impatient: None, server: Server) -> None:
    data = (FIXTURES / "bare.pth").read_bytes()
    server.put("bars", "a.pth", data)
    said = say(*words, "s3://bars/a.pth")
    assert said.code == 0
    assert f" of {human_bytes(len(data))}" in said.err
