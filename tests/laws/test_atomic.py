"""Law 4, atomic: after anything that can happen the output holds its old bytes or the complete new ones, the input is
untouched, and at most one temporary file, recognisable by its name, is left over."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import FIXTURES, ROOT

import ckptool
from ckptool.base.errors import ChangedError, OutputError, RefusedError
from ckptool.cli.main import run
from ckptool.files import sources, threads
from ckptool.files.sources import FileSource
from ckptool.files.write import copying

SUFFIX = ".ckptool-tmp"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


class State(NamedTuple):
    """What must not change about a file."""

    data: bytes
    mtime: int
    mode: int
    inode: int


def state(path: Path) -> State:
    status = path.stat()
    return State(path.read_bytes(), status.st_mtime_ns, stat.S_IMODE(status.st_mode), status.st_ino)


def strip_to(
    source: Path, out: str | Path, *, force: bool = False, progress: Callable[[int], object] | None = None
) -> ckptool.Saved:
    """The edit under test: it rewrites the pickle and carries all storages over. ``progress`` gets the bytes so far."""

    def on_progress(done: int, total: int) -> None:
        if done and progress is not None:
            progress(done)

    with ckptool.open(source) as checkpoint:
        return ckptool.save(ckptool.strip_module(checkpoint), out, force=force, on_progress=on_progress)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def temporaries(folder: Path) -> list[str]:
    return [name for name in names_in(folder) if name.endswith(SUFFIX)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of the right output."""
    out = tmp_path_factory.mktemp("expected") / "out.pth"
    strip_to(FIXTURES / "gan.pth", out)
    return out.read_bytes()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A copy of a fixture in a folder of its own. Whatever a test does, it comes out as it was, with no litter."""
    path = tmp_path / "in.pth"
    shutil.copyfile(FIXTURES / "gan.pth", path)
    path.chmod(0o644)
    before = state(path)
    yield path
    assert state(path) == before
    assert temporaries(tmp_path) == []


@pytest.fixture
def moving(tmp_path: Path) -> Path:
    """Like ``source``, for the tests that change the input themselves."""
    return Path(shutil.copyfile(FIXTURES / "gan.pth", tmp_path / "in.pth"))


@pytest.fixture
def unprivileged(tmp_path: Path) -> Iterator[None]:
    """Make this process, if it is root, somebody else, who owns the folder of the test."""
    if os.geteuid() != 0:
        yield
        return
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.parents}
    closed = {path: mode for path, mode in modes.items() if ~mode & 0o011}
    for path, mode in closed.items():
        path.chmod(mode | 0o011)  # the group stays that of root
    os.chown(tmp_path, 65534, 65534)
    os.seteuid(65534)
    yield
    os.seteuid(0)
    for path, mode in closed.items():
        path.chmod(mode)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy in many steps, as with a large file."""
    monkeypatch.setattr(copying, "_COPY_SIZE", 512)
    monkeypatch.setattr(copying, "READ_SIZE", 512)
    monkeypatch.setattr(threads, "READ_SIZE", 512)
    monkeypatch.setattr(copying, "_SMALL", 0)


@pytest.fixture
def without_kernel_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range")


# -- what is there already ------------------------------------------------------------------------------


def test_an_existing_output_is_refused_and_stays(source: Path, out: Path) -> None:
    out.write_bytes(b"precious")
    before = state(out)
    with pytest.raises(RefusedError, match="exists") as caught:
        strip_to(source, out)
    assert caught.value.exit_code == 4
    assert "force=True" in caught.value.next
    assert state(out) == before


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_force_replaces_and_keeps_the_mode_of_what_it_replaces(
    mode: int, source: Path, out: Path, expected: bytes
) -> None:
    out.write_bytes(b"old")
    out.chmod(mode)
    before = state(out)
    assert strip_to(source, out, force=True)[:2] == (str(out), len(expected))
    after = state(out)
    assert (after.data, after.mode) == (expected, mode)
    # A new file took the name: whoever has the old one open still reads the old bytes.
    assert after.inode != before.inode


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o444])
def test_a_new_output_takes_the_mode_of_the_input_whatever_the_umask(
    mode: int, umask: int, moving: Path, out: Path, expected: bytes
) -> None:
    moving.chmod(mode)
    old = os.umask(umask)
    try:
        strip_to(moving, out)
    finally:
        os.umask(old)
    assert (state(out).mode, state(out).data) == (mode, expected)
    assert state(moving).mode == mode


#: Other names of the input, from its own folder.
ALIASES = ["{}/in.pth", "{}/./in.pth", "{}/sub/../in.pth", "in.pth", "{}/symlink", "{}/hardlink", "{}/folder/in.pth"]
ALIASES += ["chain"]


@pytest.mark.parametrize("force", [False, True], ids=["plain", "force"])
@pytest.mark.parametrize("alias", ALIASES)
def test_the_output_is_never_the_input(
    alias: str, force: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "hardlink").hardlink_to(source)
    for link, target in (("symlink", source), ("folder", tmp_path), ("chain", "symlink")):
        (tmp_path / link).symlink_to(target)
    before = state(source)
    with pytest.raises(RefusedError, match="the output is the input") as caught:
        strip_to(source, alias.format(tmp_path), force=force)
    assert caught.value.exit_code == 4
    assert state(source) == before


# -- where nothing can be written -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing/out.pth", "folder"),
        ("in.pth/out.pth", "folder"),
        ("folder", "directory"),
        ("folder/", "directory"),
        ("pipe", "regular file"),
        ("/dev/null", "regular file"),
        ("dangling", "folder"),
        ("x" * 256, "name too long"),
    ],
)
@pytest.mark.parametrize("force", [False, True], ids=["plain", "force"])
def test_what_cannot_be_an_output_is_said_with_its_path(
    name: str, words: str, force: bool, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere/at/all.pth")
    os.mkfifo(tmp_path / "pipe")
    listing = names_in(tmp_path)
    path = name if name.startswith("/") else f"{tmp_path}/{name}"
    with pytest.raises(OutputError, match=f"(?i){words}") as caught:
        strip_to(source, path, force=force)
    assert caught.value.exit_code == 5
    assert caught.value.path == path
    assert names_in(tmp_path) == listing


@pytest.mark.parametrize("mode", [0o555, 0o000, 0o333], ids=oct)
def test_a_folder_takes_an_output_if_it_may_be_written_to(
    mode: int, moving: Path, unprivileged: None, tmp_path: Path, expected: bytes
) -> None:
    """It need not be listed. A leftover that already had its final mode is removed as well."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / f".out.pth.123{SUFFIX}").touch(0o444)
    folder.chmod(mode)
    try:
        if mode == 0o333:
            strip_to(moving, folder / "out.pth")
        else:
            with pytest.raises(OutputError, match=r"[Pp]ermission"):
                strip_to(moving, folder / "out.pth")
    finally:
        folder.chmod(0o755)
    assert [path.read_bytes() for path in folder.iterdir()] == [expected] * (mode == 0o333)
    strip_to(moving, tmp_path / "out.pth")
    assert temporaries(tmp_path) == []


NAMES = ["two\nlines.pth", "--force", " .pth", "\x1b[31m.pth", "\udcff.pth", "a" * 251 + ".pth", "\u6a21" * 80 + ".pth"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_that_the_file_system_takes(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    strip_to(source, name)
    assert (tmp_path / name).read_bytes() == expected
    strip_to(source, tmp_path / name, force=True)
    assert names_in(tmp_path) == sorted(["in.pth", name])
    with pytest.raises(ckptool.CkptoolError):
        strip_to(source, f"{tmp_path}/a\0{name}")


def test_an_output_by_a_symbolic_link_is_written_to_where_it_leads(
    source: Path, tmp_path: Path, expected: bytes
) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "target.pth", tmp_path / "link.pth"
    link.symlink_to("real/target.pth")
    strip_to(source, link)
    assert link.is_symlink() and link.readlink() == Path("real/target.pth")
    assert target.read_bytes() == expected
    target.write_bytes(b"old")
    with pytest.raises(RefusedError, match="exists"):
        strip_to(source, link)
    strip_to(source, link, force=True)
    assert link.is_symlink() and target.read_bytes() == expected
    assert names_in(tmp_path / "real") == ["target.pth"]


# -- how it is done -----------------------------------------------------------------------------------------


def test_the_file_is_on_the_disk_before_it_has_its_name_and_the_folder_after(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str, describe: Callable[..., str]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **how: Any) -> Any:
            calls.append(describe(*args))
            return real(*args, **how)

        monkeypatch.setattr(os, name, call)

    noted("fsync", lambda fd: "sync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "sync file")
    noted("link", lambda *_: "name")
    noted("replace", lambda *_: "name")
    noted("fchmod", lambda fd, mode: f"mode {mode:o}")
    strip_to(source, out)
    strip_to(source, out, force=True)
    assert calls == ["mode 644", "sync file", "name", "sync folder"] * 2


@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_at_every_step_the_output_holds_all_or_nothing(
    force: bool, source: Path, out: Path, expected: bytes, small_steps: None
) -> None:
    if force:
        out.write_bytes(b"old")
    before = state(out) if force else None
    steps: list[int] = []

    def progress(count: int) -> None:
        steps.append(count)
        assert (state(out) if out.exists() else None) == before
        temporary = next(path for path in out.parent.iterdir() if path.name.endswith(SUFFIX))
        assert temporary.name.startswith(".out.pth.")
        # Nobody else may read what will only later get its mode.
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600

    strip_to(source, out, force=force, progress=progress)
    assert len(steps) > 8 and steps[-1] == len(expected)
    assert out.read_bytes() == expected


def refusing(code: int, after: int) -> Callable[..., int]:
    """A kernel that cannot copy, from the first call on or later."""
    real, calls = os.copy_file_range, [0]

    def copy(*args: Any) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        return real(*args)

    return copy


def short(source_fd: int, fd: int, count: int, offset: int, at: int, real: Any = os.copy_file_range) -> int:
    """A kernel that copies less than asked."""
    return int(real(source_fd, fd, min(count, 1 + offset % 97), offset, at))


CODES = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)
#: Each with the number of calls that it must get.
KERNELS: dict[str, tuple[Callable[..., int], int]] = {
    **{f"{errno.errorcode[code]} at {at}": (refusing(code, at - 1), at) for code in CODES for at in (1, 3)},
    "less than asked": (short, 50),
    "zero before the end": (lambda *_: 0, 1),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_does_not_copy_all(
    name: str, source: Path, out: Path, expected: bytes, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel, least), calls = KERNELS[name], []
    monkeypatch.setattr(os, "copy_file_range", lambda *args: calls.append(args) or kernel(*args))
    strip_to(source, out)
    assert len(calls) >= least
    assert out.read_bytes() == expected


def test_writes_and_reads_that_are_short(
    source: Path, out: Path, expected: bytes, without_kernel_copy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read, calls = os.pwrite, os.pread, [0]

    def short_write(fd: int, data: memoryview, offset: int) -> int:
        calls[0] += 1
        return real_write(fd, data[: 1 + calls[0] % 61], offset)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr("ckptool.files.sources._pread", lambda fd, size, offset: real_read(fd, min(size, 101), offset))
    strip_to(source, out)
    assert calls[0] > 50
    assert out.read_bytes() == expected


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "buffer"])
def test_signals_that_interrupt_system_calls(
    kernel: bool, tmp_path: Path, out: Path, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINTR: a timer fires 2,000 times a second; Python's own retry must be all that is needed."""
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range")
    source, fired = FIXTURES / "align4096.pth", [0]
    with ckptool.open(source) as checkpoint:
        edited = ckptool.add_module(checkpoint)
        ckptool.save(edited, tmp_path / "calm.pth")
        old = signal.signal(signal.SIGALRM, lambda *_: fired.__setitem__(0, fired[0] + 1))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            rounds = 0
            while fired[0] < 20 and rounds < 500:
                ckptool.save(edited, out, force=True)
                rounds += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
    assert fired[0] >= 20
    assert out.read_bytes() == (tmp_path / "calm.pth").read_bytes()


def test_a_file_system_without_hard_links(
    source: Path, out: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", none)
    strip_to(source, out)
    assert out.read_bytes() == expected


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_an_output_that_appears_meanwhile_is_not_replaced(
    links: bool, source: Path, out: Path, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EPERM, "no links")))
    with pytest.raises(RefusedError, match="exists") as caught:
        strip_to(source, out, progress=lambda _: out.write_bytes(b"theirs") and None)
    assert caught.value.path
    assert out.read_bytes() == b"theirs"


def test_two_savers_of_one_process_do_not_break_each_other(
    source: Path, out: Path, expected: bytes, small_steps: None
) -> None:
    saved: list[object] = []

    def progress(_: int) -> None:
        if not saved:
            saved.append(None)
            saved[0] = strip_to(source, out)[:2]

    with pytest.raises(RefusedError, match="exists"):
        strip_to(source, out, progress=progress)
    assert saved == [(str(out), len(expected))]
    assert out.read_bytes() == expected


def test_a_folder_that_goes_away_meanwhile(source: Path, tmp_path: Path, small_steps: None) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OutputError, match="No such file"):
        strip_to(source, folder / "out.pth", progress=lambda _: shutil.rmtree(folder, ignore_errors=True))
    assert not folder.exists()


# -- what goes wrong in the middle ----------------------------------------------------------------------------

#: (function of os, after how many calls it fails)
FAILURES = [("open", 0), ("copy_file_range", 0), ("copy_file_range", 3), ("pwrite", 0), ("pwrite", 1)]
FAILURES += [("fchmod", 0), ("fsync", 0), ("replace", 0)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG], ids=errno.errorcode.get)
@pytest.mark.parametrize(("name", "after"), FAILURES, ids=lambda value: str(value))
def test_any_failing_step_leaves_the_old_output(
    name: str, after: int, code: int, source: Path, out: Path, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.write_bytes(b"old")
    before = state(out)
    real, calls = getattr(os, name), [0]

    def failing(*args: Any, **how: Any) -> Any:
        if name == "open" and not str(args[0]).endswith(SUFFIX):
            return real(*args, **how)
        calls[0] += 1
        if calls[0] > after:
            raise OSError(code, os.strerror(code))
        return real(*args, **how)

    with ckptool.open(source) as checkpoint:
        edited = ckptool.strip_module(checkpoint)
        monkeypatch.setattr(os, name, failing)
        with pytest.raises(OutputError) as caught:
            ckptool.save(edited, out, force=True)
    assert caught.value.exit_code == 5
    # The message names path and reason.
    assert str(out) in str(caught.value) and os.strerror(code) in str(caught.value)
    assert state(out) == before


def test_a_write_back_that_fails_while_more_is_written_is_not_lost(
    source: Path, out: Path, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports such a failure once, and to the thread that flushes; the later fsync may succeed."""
    out.write_bytes(b"old")
    before = state(out)
    failed, threads = threading.Event(), threading.enumerate()

    def failing(_: int) -> None:
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(copying, "_MIN_FLUSHED", 0)
    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(OutputError, match=os.strerror(errno.EIO)):
        strip_to(source, out, force=True, progress=lambda _: failed.wait(300) and None)
    assert state(out) == before
    assert threading.enumerate() == threads


@pytest.mark.parametrize("limit", [0, 1024, 6000])
def test_a_file_size_limit_is_a_full_disk(limit: int, source: Path, out: Path) -> None:
    """``ulimit -f`` for real: a write beyond it fails with EFBIG (Python ignores SIGXFSZ)."""
    out.write_bytes(b"old")
    before = state(out)
    script = f"""
        import resource, sys
        from ckptool.cli.main import main
        import ckptool.cli.edits
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
        main(["strip-module", {str(source)!r}, "-o", {str(out)!r}, "--force"])
    """
    done = _python(script)
    assert done.returncode == 5
    assert done.stdout == ""
    assert str(out) in done.stderr and os.strerror(errno.EFBIG) in done.stderr
    assert "Traceback" not in done.stderr
    assert state(out) == before


def test_a_small_tmpfs_is_a_full_disk(source: Path) -> None:
    """A full disk for real, in a mount namespace that ends with the command."""
    script = (
        'mount -t tmpfs -o size=8k,mode=0777 none "$1" && printf old > "$1/out.pth" || exit 99; '
        '"$2" -m ckptool strip-module "$3" -o "$1/out.pth" --force; echo "exit $?"; cat "$1/out.pth"; ls -A "$1"'
    )
    place = source.parent / "small"
    place.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    enter = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    command = [*enter, "sh", "-c", script, "sh", str(place), sys.executable, str(source)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode != 0 or "exit" not in done.stdout:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.stdout == "exit 5\noldout.pth\n"
    assert f"{place}/out.pth" in done.stderr and os.strerror(errno.ENOSPC) in done.stderr


# -- an input that does not keep still --------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "buffer"])
@pytest.mark.parametrize("change", ["shrinks", "empties", "grows", "is-touched", "is-rewritten"])
@pytest.mark.parametrize("when", [0, 4], ids=["at-the-first-byte", "in-the-middle"])
def test_an_input_that_changes_is_not_copied(
    change: str, when: int, kernel: bool, moving: Path, out: Path, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range")
    steps = [0]

    def disturb(_: int) -> None:
        steps[0] += 1
        if steps[0] != when + 1:
            return
        size = moving.stat().st_size
        if change in ("shrinks", "empties"):
            os.truncate(moving, size - 300 if change == "shrinks" else 0)
        elif change == "grows":
            with moving.open("ab") as file:
                file.write(b"more")
        elif change == "is-rewritten":
            moving.write_bytes(bytes(size))
            os.utime(moving, ns=(0, 0))
        else:
            os.utime(moving, ns=(0, 0))

    with pytest.raises(ChangedError) as caught:
        strip_to(moving, out, progress=disturb)
    assert caught.value.exit_code == 5
    assert caught.value.path in (str(moving), str(out))
    assert not out.exists() and temporaries(out.parent) == []


@pytest.mark.parametrize("whole, number", [(0, 2), (sources._WHOLE, 1)], ids=["in parts", "at once"])
def test_an_input_that_shrinks_while_its_metadata_is_read(
    whole: int, number: int, moving: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is read at once, any other in parts."""
    monkeypatch.setattr(sources, "_WHOLE", whole)
    real, reads = FileSource.read, [0]

    def shrinking(self: FileSource, offset: int, size: int) -> bytes:
        reads[0] += 1
        if reads[0] == number:
            os.truncate(moving, 10)
        return real(self, offset, size)

    monkeypatch.setattr(FileSource, "read", shrinking)
    with pytest.raises(ckptool.CkptoolError) as caught:
        ckptool.open(moving)
    assert caught.value.exit_code in (3, 5)


def test_an_input_that_is_replaced_by_another_file_is_copied_as_it_was_opened(
    moving: Path, out: Path, expected: bytes, small_steps: None
) -> None:
    """What other programs do that save whole or not at all: the open file is still the old one."""
    other = moving.with_name("other.pth")
    other.write_bytes(b"new")

    def replace(_: int) -> None:
        if other.exists():
            other.replace(moving)

    strip_to(moving, out, progress=replace)
    assert out.read_bytes() == expected
    assert moving.read_bytes() == b"new"


# -- killed -----------------------------------------------------------------------------------------------------

#: Runs the edit once for each point at which it can be killed: before and after each call of these. What is found
#: after each death is told as a line: the number of the call, its name, the exit status, and the state of the folder.
KILLER = """
    import os, signal, sys
    import ckptool
    from ckptool.files import threads, write
    import ckptool.files.write.copying

    source, out, force = sys.argv[1], sys.argv[2], sys.argv[3] == "force"
    write.copying._COPY_SIZE = write.copying.READ_SIZE = threads.READ_SIZE = 2048
    write.copying._SMALL = 0
    folder = os.path.dirname(out)
    points = ("open", "pwrite", "copy_file_range", "fchmod", "fsync", "link", "replace", "unlink", "close")

    def edit(deadline):
        count = [0]
        def armed(name):
            real = getattr(os, name)
            def call(*args, **how):
                for when in ("before", "after"):
                    count[0] += 1
                    if count[0] == deadline:
                        real_write(1, f"{name} {when}\\n".encode())
                        os.kill(os.getpid(), signal.SIGKILL)
                    if when == "before":
                        result = real(*args, **how)
                return result
            return call
        real_write = os.write
        with ckptool.open(source) as checkpoint:
            edited = ckptool.strip_module(checkpoint)
            for name in points:
                setattr(os, name, armed(name))
            ckptool.save(edited, out, force=force)
        os._exit(0)

    for deadline in range(1, 500):
        if force:
            with open(out, "wb") as file:
                file.write(b"old")
        elif os.path.exists(out):
            os.unlink(out)
        child = os.fork()
        if not child:
            edit(deadline)
        _, status = os.waitpid(child, 0)
        left = [name for name in os.listdir(folder) if name.endswith(".ckptool-tmp")]
        with open(source, "rb") as file:
            intact = file.read() == open(sys.argv[4], "rb").read()
        content = "none"
        if os.path.exists(out):
            data = open(out, "rb").read()
            content = "old" if data == b"old" else "new" if data == open(sys.argv[5], "rb").read() else "BROKEN"
        print("killed" if os.WIFSIGNALED(status) else "done", content, len(left), intact, flush=True)
        if not os.WIFSIGNALED(status):
            break
    print("end", len(os.listdir(folder)))
"""


@pytest.mark.parametrize("how", ["new", "force"])
def test_killed_at_any_point_the_output_is_old_or_new_and_the_next_run_cleans_up(
    how: str, tmp_path: Path, expected: bytes
) -> None:
    source, goal, folder = tmp_path / "in.pth", tmp_path / "goal.pth", tmp_path / "folder"
    shutil.copy(FIXTURES / "gan.pth", source)
    goal.write_bytes(expected)
    folder.mkdir()
    out = folder / "out.pth"
    done = _python(KILLER, str(source), str(out), how, str(FIXTURES / "gan.pth"), str(goal))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == "end 1"  # only the output: the last run removed what the killed ones had left
    points = [line for line in lines[:-1] if line.endswith(("before", "after"))]
    states = [line.split() for line in lines[:-1] if line not in points]
    assert {point.split()[0] for point in points} >= {"open", "pwrite", "copy_file_range", "fchmod", "fsync", "close"}
    assert len(points) == len(states) - 1 >= 20
    assert states[-1] == ["done", "new", "0", "True"]
    old = "old" if how == "force" else "none"
    contents = [content for _, content, _, _ in states]
    assert set(contents) == {old, "new"}
    assert contents == sorted(contents, key=[old, "new"].index)  # from some point on it is new
    assert all(killed == "killed" and int(left) <= 1 and intact == "True" for killed, _, left, intact in states[:-1])


def test_only_the_leftovers_of_dead_runs_for_the_same_output_are_removed(
    source: Path, out: Path, tmp_path: Path
) -> None:
    dead = tmp_path / f".out.pth.123{SUFFIX}"
    dead.write_bytes(b"half")
    kept = ["other.pth.123.ckptool-tmp.bak", ".other.pth.9.tmp", "out.pth.123", ".out.pth.swp"]
    for name in kept:
        (tmp_path / name).write_bytes(b"theirs")
    (tmp_path / "link-target").write_bytes(b"theirs")
    alive = tmp_path / f".out.pth.456{SUFFIX}"
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        strip_to(source, out)
        assert not dead.exists()
        assert alive.exists()
    assert all((tmp_path / name).read_bytes() == b"theirs" for name in kept)
    strip_to(source, out, force=True)
    assert not alive.exists()


def test_a_link_that_looks_like_a_leftover_is_not_followed(source: Path, out: Path, tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / f".out.pth.7{SUFFIX}"
    victim.write_bytes(b"theirs")
    link.symlink_to(victim)
    strip_to(source, out)
    assert victim.read_bytes() == b"theirs"
    link.unlink(missing_ok=True)


# -- signals ------------------------------------------------------------------------------------------------------

#: A command that gets a signal while it copies.
SIGNALLED = """
    import os, signal, sys
    number, before = int(sys.argv[1]), sys.argv[2]
    # What runs in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if before == "ignored":
        signal.signal(number, signal.SIG_IGN)
    import ckptool.files.write.copying
    from ckptool.files import write
    from ckptool.cli.main import main
    write.copying._COPY_SIZE, write.copying._SMALL = 512, 0
    real, calls = os.copy_file_range, [0]
    def copy(*args):
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), number)
        return real(*args)
    os.copy_file_range = copy
    main(sys.argv[3:])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("how", ["new", "force"])
def test_a_signal_ends_the_run_and_nothing_is_left(number: signal.Signals, how: str, source: Path, out: Path) -> None:
    if how == "force":
        out.write_bytes(b"old")
    before = state(out) if how == "force" else None
    done = _python(SIGNALLED, str(int(number)), "default", "strip-module", str(source), "-o", str(out), "--force")
    assert done.returncode == 128 + number
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert (state(out) if out.exists() else None) == before


def test_a_hangup_that_the_caller_ignores_stays_ignored(source: Path, out: Path, expected: bytes) -> None:
    done = _python(SIGNALLED, str(int(signal.SIGHUP)), "ignored", "strip-module", str(source), "-o", str(out))
    assert done.returncode == 0
    assert out.read_bytes() == expected


# -- the other end of the pipe --------------------------------------------------------------------------------------


def _read_one_line(*arguments: str) -> tuple[bytes, int, bytes]:
    """The first line that a command prints, and then how it ends when nobody reads on."""
    command = [sys.executable, "-m", "ckptool", *arguments]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        return line, process.wait(), said


@pytest.mark.parametrize("style", ["--names", "--format=json"])
def test_a_reader_that_goes_away_hears_nothing_more(style: str) -> None:
    line, _, said = _read_one_line("keys", *[str(FIXTURES / "ddp4_training.pth")] * 300, style)
    assert line.strip()
    assert said == b""


def test_a_closed_pipe_ends_as_the_signal_would() -> None:
    assert _read_one_line("keys", *[str(FIXTURES / "ddp4_training.pth")] * 300, "--names")[1] == 128 + signal.SIGPIPE


def test_output_that_cannot_be_written_is_exit_5() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ckptool", "keys", str(FIXTURES / "bare.pth")]
        done = subprocess.run(command, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 5
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


# -- the command line keeps the same promises --------------------------------------------------------------------------


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False)


# -- no input is an output -------------------------------------------------------------------------------------
# Not the second input either: that of --rename-like, of --map, or of match --apply.


@pytest.mark.parametrize("command", ["rename", "edit", "match"])
def test_a_second_input_is_not_replaced_by_the_output(command: str, tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    shutil.copy(FIXTURES / "bare.pth", other)
    before = other.read_bytes()
    own = {"rename": ["--rename-like", str(other), "--by-order"], "edit": ["--rename-like", str(other), "--by-order"]}
    arguments = own.get(command, [str(other), "--apply"])
    code = run([command, str(FIXTURES / "bare_module.pth"), *arguments, "-o", str(other), "--force"])
    assert code == 4
    assert other.read_bytes() == before
