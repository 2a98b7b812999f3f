"""One input in front of ckptool and of the real readers: where do they disagree?"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptool

from .asking import Bad, Said, ask, guarded, tensors_of
from .cases import Case, Files
from .editing import edited
from .finds import EDIT, LOADS, OTHER, RUNS, VALID_FAILS, Find, Verdict
from .limits import TooLong, bounded
from .ranks import judged_ranks
from .reading import comparable, difference, error_text, load, undefined
from .sandbox import contained
from .texts import dangerous

__all__ = ["judged", "prepared"]

#: What torch may use: it is not what is judged.
_SECONDS, _MEMORY = 20, 4 << 30


def judged(case: Case, files: Files, folder: str, tell: Callable[[str], None], edits: int = 2) -> Verdict:
    """The verdict about an input that is put into a folder. ``tell`` is told before each step what comes next."""
    chance = random.Random(str(case))
    path = _placed(case, files, folder)
    tell("ckptool")
    try:
        said = ask(path)
        tell(f"reader valid={said.valid} loads={said.loads}")
        if case.kind == "ranks":
            return judged_ranks(case.base, path, folder, said)
        return _JUDGES[case.kind](path, folder, said, chance, tell, edits)
    except Bad as bad:
        return Verdict(finds=(bad.find,))


def _placed(case: Case, files: Files, folder: str) -> str:
    """The path of the input, in an empty folder."""
    place = Path(folder)
    for old in place.iterdir():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    if "" in files:
        path = place / f"case{_SUFFIX[case.kind]}"
        path.write_bytes(files[""])
        return str(path)
    path = place / "case"
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return str(path)


# -- files that torch.load reads -----------------------------------------------------------------------------


def _torch(
    path: str, folder: str, said: Said, chance: random.Random, tell: Callable[[str], None], edits: int
) -> Verdict:
    finds: list[Find] = []
    words: list[str] = []
    loaded, refusal = _tried(lambda: load(path))
    if said.valid and said.loads and refusal:
        finds.append(Find(VALID_FAILS, "valid, weights_only takes it", refusal))
    if said.loads is False and not refusal and said.valid:
        finds.append(Find(LOADS, _why_not(said), "torch.load(weights_only=True) takes it"))
    if said.valid and not refusal and chance.random() < 0.3 and _is_zip(path):
        finds += _mapped(path, loaded)
    if said.valid and (refusal or chance.random() < 0.05):
        tell("sandbox valid=True")
        finds += _unsafe(path, folder, words)
    tell(f"values valid={said.valid}")
    opened = False
    ambiguous = not said.valid
    try:
        with guarded("get"), ckptool.open(path) as checkpoint:
            opened = True
            entries = tensors_of(checkpoint)
            ambiguous = ambiguous and _ambiguous(said)
    except ckptool.CkptoolError:
        entries = []
        if said.valid:
            finds.append(Find(OTHER, "valid, and cannot be opened", ""))
    if opened and not refusal and not ambiguous:
        told = difference(loaded, entries)
        if told and not undefined(path, loaded):
            finds.append(Find(OTHER, "valid" if said.valid else "not valid", told))
    if opened:
        tell(f"edits valid={said.valid}")
        finds += edited(path, folder, loaded, refusal, said.valid, chance, edits)
    words.append("loaded by torch" if not refusal else "refused by torch")
    return Verdict(said.valid, opened, tuple(words), tuple(finds))


def _ambiguous(said: Said) -> bool:
    """Whether the verdict says that the file is not one thing: then nothing needs to agree."""
    return any(told.startswith(("structure", "geometry", "complete", "sizes", "pickles")) for told in said.failed)


def _why_not(said: Said) -> str:
    return next((check["message"] for check in said.report["checks"] if check["name"] == "weights-only"), "")


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _tried(read: Callable[[], Any]) -> tuple[Any, str]:
    """What a reader gives, or why it does not."""
    try:
        with bounded(_SECONDS, _MEMORY):
            return read(), ""
    except TooLong:
        return None, f"took more than {_SECONDS} s"
    except Exception as error:
        # Readers refuse with any class there is.
        return None, error_text(error)


def _mapped(path: str, loaded: Any) -> list[Find]:
    from torture.compare import same

    mapped, refusal = _tried(lambda: load(path, mmap=True))
    if refusal:
        return [Find(VALID_FAILS, "valid, weights_only takes it", f"with mmap=True: {refusal}")]
    if not comparable(loaded):
        return []
    if same(loaded, mapped) or undefined(path, loaded):
        return []
    return [Find(OTHER, "valid", "with mmap=True torch reads something else")]


def _unsafe(path: str, folder: str, words: list[str]) -> list[Find]:
    """What torch.load(weights_only=False) does with a file that is called valid."""

    def read() -> str:
        load(path, weights_only=False)
        return ""

    answer = contained(read, folder)
    if answer.ran:
        return [Find(RUNS, "valid", f"torch.load(weights_only=False) runs {answer.ran}")]
    if answer.died:
        words.append(f"unsafe load {answer.died}")
    words.append("loaded without weights_only" if not answer.error else "not loaded without weights_only")
    return []


# -- the tar of old torch: only weights_only=False reads it ------------------------------------------------------


def _tar(path: str, folder: str, said: Said, chance: random.Random, tell: Callable[[str], None], edits: int) -> Verdict:
    finds: list[Find] = []
    words: list[str] = []
    entries = []
    opened = False
    ambiguous = not said.valid and _ambiguous(said)
    try:
        with guarded("get"), ckptool.open(path) as checkpoint:
            opened = True
            entries = tensors_of(checkpoint)
    except ckptool.CkptoolError:
        if said.valid:
            finds.append(Find(OTHER, "valid, and cannot be opened", ""))
    if not (opened or said.valid):
        return Verdict(False, False, ("not opened",))
    tell(f"sandbox valid={said.valid}")

    def read() -> str:
        loaded = load(path, weights_only=False)
        return difference(loaded, entries) if opened else ""

    answer = contained(read, folder)
    if answer.ran:
        if said.valid:
            finds.append(Find(RUNS, "valid", f"torch.load(weights_only=False) runs {answer.ran}"))
        words.append("stopped before it ran")
    elif answer.error or answer.died:
        if said.valid and not _is_said(said, answer.error):
            finds.append(Find(VALID_FAILS, "valid", answer.error or answer.died))
        words.append("refused by torch")
    else:
        words.append("loaded by torch")
        if answer.value and not ambiguous and not _is_said(said, ""):
            finds.append(Find(OTHER, "valid" if said.valid else "not valid", answer.value))
    if opened:
        tell(f"edits valid={said.valid}")
        finds += _tar_edits(path, folder, bool(answer.error or answer.died), entries, chance)
    return Verdict(said.valid, opened, tuple(words), tuple(finds))


def _is_said(said: Said, error: str) -> bool:
    """Whether a load without weights_only fails for what validate names, with no promise about it: globals that are not
    on torch's list, which are looked up and called (no weights_only load comes as far), and texts of Python 2."""
    named = any(check["name"] == "globals" and check["status"] != "pass" for check in said.report["checks"])
    return named or (error.startswith("UnicodeDecodeError") and "UnicodeDecodeError" in _why_not(said))


def _tar_edits(path: str, folder: str, refused: bool, entries: list[Any], chance: random.Random) -> list[Find]:
    """Converted to what torch reads today: the same tensors."""
    out = os.path.join(folder, "out.pth")
    command = chance.choice(("sanitize", "convert"))
    try:
        with guarded(command), ckptool.open(path) as checkpoint:
            changed = ckptool.sanitize(checkpoint) if command == "sanitize" else ckptool.convert(checkpoint, "torch")
            ckptool.save(changed, out, force=True)
    except ckptool.CkptoolError:
        return []
    after, refusal = _tried(lambda: load(out))
    if refusal:
        return (
            []
            if refused or command == "convert"
            else [Find(EDIT, f"{command} ends with 0", f"the output does not load: {refusal}")]
        )
    told = difference(after, [entry._replace(storage="") for entry in entries], names=False)
    return [Find(EDIT, f"{command} ends with 0", told)] if told.startswith("values") else []


# -- safetensors --------------------------------------------------------------------------------------------------


def _safetensors(
    path: str, folder: str, said: Said, chance: random.Random, tell: Callable[[str], None], edits: int
) -> Verdict:
    from safetensors.torch import load_file

    finds: list[Find] = []
    loaded, refusal = _tried(lambda: load_file(path))
    if said.valid and refusal:
        finds.append(Find(VALID_FAILS, "valid", refusal))
    if not said.valid and not refusal:
        finds.append(Find(LOADS, _why_not(said) or "; ".join(said.failed)[:200], "safetensors takes it"))
    opened = False
    entries = []
    try:
        with guarded("get"), ckptool.open(path) as checkpoint:
            opened = True
            entries = tensors_of(checkpoint)
    except ckptool.CkptoolError:
        if said.valid:
            finds.append(Find(OTHER, "valid, and cannot be opened", ""))
    if opened and not refusal:
        told = _by_name(loaded, entries)
        if told:
            finds.append(Find(OTHER, "valid" if said.valid else "not valid", told))
    if opened:
        tell(f"edits valid={said.valid}")
        finds += _converted(path, folder, loaded, refusal, chance, edits)
    return Verdict(
        said.valid, opened, ("loaded by safetensors" if not refusal else "refused by safetensors",), tuple(finds)
    )


def _by_name(loaded: dict[str, Any], entries: list[Any]) -> str:
    """A flat mapping: names, and everything about each tensor but its place."""
    if len(entries) >= 64:
        return ""
    names = {(entry.steps or (entry.path,))[-1]: entry for entry in entries}
    if set(names) != set(loaded):
        return "other names"
    flat = [entry._replace(steps=(name,), offset=0, storage="") for name, entry in names.items()]
    return difference(loaded, flat)


def _converted(path: str, folder: str, loaded: Any, refusal: str, chance: random.Random, edits: int) -> list[Find]:
    """Edits of safetensors: into itself, with another prefix, and as a file of torch."""
    from safetensors.torch import load_file
    from torture.compare import same

    finds = []
    ways: list[tuple[str, str, Callable[[Any], Any]]] = [
        ("save", ".safetensors", lambda c: c),
        ("strip-module", ".safetensors", lambda c: ckptool.strip_module(c)),
        ("convert torch", ".pth", lambda c: ckptool.convert(c, "torch")),
        ("repack", ".safetensors", lambda c: ckptool.repack(c)),
        ("rename", ".safetensors", lambda c: ckptool.rename(c, glob=("*", "fuzz.*"))),
    ]
    for name, suffix, make in chance.sample(ways, min(edits, len(ways))):
        out = os.path.join(folder, f"out{suffix}")
        Path(out).unlink(missing_ok=True)
        try:
            with guarded(name), ckptool.open(path) as checkpoint:
                ckptool.save(make(checkpoint), out, force=True)
        except ckptool.CkptoolError:
            continue
        after, refused = _tried((lambda: load_file(out)) if suffix == ".safetensors" else (lambda: load(out)))  # noqa: B023
        told = ""
        if bool(refused) != bool(refusal):
            how = "loads, the output does not" if refused else "does not load, the output does"
            told = f"the input {how}: {refused or refusal}"
        elif not refused:
            cut = {"strip-module": "module.", "rename": "fuzz."}.get(name, "")
            old = {key.removeprefix(cut): value for key, value in loaded.items()}
            new = {key.removeprefix(cut): value for key, value in after.items()}
            if set(old) != set(new) or not all(same(old[key], new[key].contiguous()) for key in old):
                told = "the output holds something else"
        if told:
            finds.append(Find(EDIT, f"{name} ends with 0", told))
    return finds


# -- folders of Hugging Face -----------------------------------------------------------------------------------------


def _hf(path: str, folder: str, said: Said, chance: random.Random, tell: Callable[[str], None], edits: int) -> Verdict:
    finds: list[Find] = []
    # transformers maps the files: of deflated records, which are said to be invalid, it reads something else.
    deflated = any(note["code"] == "deflated" for check in said.report["checks"] for note in check["notes"])
    loaded, refusal = _tried(lambda: _by_transformers(path, mapped=not deflated))
    # transformers loads .bin with weights_only: what that refuses, validate has said.
    promised = said.valid and said.loads is not False
    if promised and refusal:
        finds.append(Find(VALID_FAILS, "valid, weights_only takes it", refusal))
    opened = False
    entries = []
    try:
        with guarded("get"), ckptool.open(path) as checkpoint:
            opened = True
            entries = tensors_of(checkpoint)
    except ckptool.CkptoolError:
        if said.valid:
            finds.append(Find(OTHER, "valid, and cannot be opened", ""))
    if opened and not refusal and said.valid:
        told = _by_name(loaded, entries)
        if told:
            finds.append(Find(OTHER, "valid", told))
    if opened:
        tell(f"edits valid={said.valid}")
        finds += _folder_edit(path, folder, loaded if not refusal else None, refusal, promised)
    return Verdict(
        said.valid, opened, ("loaded by transformers" if not refusal else "refused by transformers",), tuple(finds)
    )


def _by_transformers(path: str, *, mapped: bool) -> dict[str, Any]:
    """As from_pretrained finds and reads the files of a folder: the single file first, then the index."""
    from transformers.modeling_utils import load_state_dict
    from transformers.utils.hub import get_checkpoint_shard_files

    read = load_state_dict if mapped else load

    names = os.listdir(path)
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = f"{single}.index.json"
        if single in names:
            return dict(read(os.path.join(path, single)))
        if index in names:
            files, _ = get_checkpoint_shard_files(path, os.path.join(path, index), local_files_only=True)
            found: dict[str, Any] = {}
            for name in files:
                found |= read(name)
            return found
    raise FileNotFoundError("no weights that transformers knows")


def _folder_edit(path: str, folder: str, loaded: Any, refusal: str, promised: bool) -> list[Find]:
    """Converted to one file of torch: the same tensors."""
    from torture.compare import same

    out = os.path.join(folder, "out.pth")
    try:
        with guarded("convert torch"), ckptool.open(path) as checkpoint:
            ckptool.save(ckptool.convert(checkpoint, "torch"), out, force=True)
    except ckptool.CkptoolError:
        return []
    after, refused = _tried(lambda: load(out))
    if refused:
        told = "" if refusal else f"the input loads, the output does not: {refused}"
    elif refusal:
        told = "" if not promised else f"the input does not load, the output does: {refusal}"
    else:
        told = ""
        if set(loaded) != set(after) or not all(
            same(loaded[key].contiguous(), after[key].contiguous()) for key in loaded
        ):
            told = "the output holds something else"
    return [Find(EDIT, "convert torch ends with 0", told)] if told else []


# -- folders of torch.distributed.checkpoint ---------------------------------------------------------------------------


def _dcp(path: str, folder: str, said: Said, chance: random.Random, tell: Callable[[str], None], edits: int) -> Verdict:
    finds: list[Find] = []
    words: list[str] = []
    entries = []
    opened = False
    out = os.path.join(folder, "out.pth")
    converted = False
    try:
        with guarded("get"), ckptool.open(path) as checkpoint:
            opened = True
            entries = tensors_of(checkpoint)
        with guarded("convert torch"), ckptool.open(path) as checkpoint:
            ckptool.save(ckptool.convert(checkpoint, "torch"), out, force=True)
            converted = True
    except ckptool.CkptoolError:
        if said.valid and not opened:
            finds.append(Find(OTHER, "valid, and cannot be opened", ""))
    if not (opened or said.valid):
        return Verdict(False, False, ("not opened",))
    tell(f"sandbox valid={said.valid}")

    def read() -> tuple[str, str]:
        try:
            loaded = _by_dcp(path)
        except BaseException as error:
            # CheckpointException is no Exception. The cause is in the last line of a traceback in its text.
            lines = str(error).strip().splitlines()
            causes = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
            raise RuntimeError((causes or lines or [type(error).__name__])[-1][:300]) from None
        told = difference(loaded, [entry._replace(storage="") for entry in entries]) if said.valid else ""
        if not converted:
            return told, ""
        return told, _unlike_dcp(loaded, out)

    answer = contained(read, folder)
    if answer.ran:
        if said.valid:
            finds.append(Find(RUNS, "valid", f"DCP runs {answer.ran}"))
        words.append("stopped before it ran")
    elif "No module named" in answer.error:
        words.append("a class that is not here")  # it is read by its fields, as those of Megatron-core are
    elif answer.error or answer.died:
        promised = said.valid and not _is_said(said, answer.error)
        if promised:
            finds.append(Find(VALID_FAILS, "valid", answer.error or answer.died))
        words.append("refused by DCP")
        if converted and promised:
            finds.append(Find(EDIT, "convert torch ends with 0", f"DCP refuses the input: {answer.error}"))
    else:
        words.append("loaded by DCP")
        if not said.valid:
            words.append("loaded by DCP, not valid")
        told, wrong = answer.value
        if told:
            finds.append(Find(OTHER, "valid", told))
        if wrong:
            finds.append(Find(EDIT, "convert torch ends with 0", wrong))
    return Verdict(said.valid, opened, tuple(words), tuple(finds))


def _by_dcp(path: str) -> dict[str, Any]:
    """As dcp_to_torch_save reads a folder."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def _unlike_dcp(loaded: Any, out: str) -> str:
    from torture.compare import tensors

    from .reading import content

    try:
        after = load(out, weights_only=False)  # in the sandbox, as the input
    except Exception as error:
        return f"the input loads, the output does not: {error_text(error)}"
    old, new = tensors(loaded), tensors(after)
    if set(old) != set(new):
        return "the output has other names"
    for name, tensor in old.items():
        if tensor.dtype != new[name].dtype or tensor.shape != new[name].shape or content(tensor) != content(new[name]):
            return "the output holds something else"
    return ""


# -- texts -----------------------------------------------------------------------------------------------------------


def _text(
    path: str, folder: str, said: Said, chance: random.Random, tell: Callable[[str], None], edits: int
) -> Verdict:
    """Where json or PyYAML reads a key or a tag that makes a loader run code, scan must not pass the text over."""
    from ckptool.reports.scan import scan_file

    told, _ = _tried(lambda: dangerous(Path(path).read_bytes()))
    with guarded("scan"):
        verdict = scan_file(path)["verdict"]
    missed = bool(told) and verdict in (None, "weights-only")
    finds = (Find(RUNS, f"scan: {verdict}", f"a parser reads {told}"),) if missed else ()
    return Verdict(said.valid, False, ("runs code" if told else "plain",), finds)


_JUDGES: dict[str, Callable[..., Verdict]] = {
    "zip": _torch,
    "pickle": _torch,
    "legacy": _torch,
    "tar": _tar,
    "safetensors": _safetensors,
    "hf": _hf,
    "dcp": _dcp,
    "text": _text,
}
_SUFFIX = {
    "text": ".json",
    "zip": ".pth",
    "pickle": ".pth",
    "legacy": ".pth",
    "tar": ".pth",
    "safetensors": ".safetensors",
}


#: What does something when it is imported, or is not there without a display.
_ACTIVE = {"antigravity", "this", "idlelib", "turtledemo", "turtle", "tkinter", "lib2to3", "ensurepip", "__main__"}


def prepared(kind: str, folder: str) -> None:
    """Import all that the readers import late: in the sandbox an import of anything new fails."""
    import warnings
    import webbrowser  # noqa: F401

    import torch._utils
    import torch.jit
    import torch.nested

    from .cases import bases, built

    warnings.simplefilter("ignore")
    if kind == "hf":
        import transformers.modeling_utils
        import transformers.utils.hub  # noqa: F401
    for name in sorted(sys.stdlib_module_names - _ACTIVE):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in ("encodings.idna", "numpy.core.multiarray", "numpy._core.multiarray"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Once for all workers: ckptool imports a format when a file may be one.
    for module in pkgutil.walk_packages(ckptool.__path__, "ckptool."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    torch.set_num_threads(1)
    for base in dict.fromkeys(bases(kind)):
        # Only what is clean: fixtures that would run something are not loaded here.
        if not base.startswith("made-") and kind != "tar":
            continue
        case = Case(kind, base, ())
        path = _placed(case, built(case), folder)
        for read in _READERS.get(kind, (lambda path: load(path), lambda path: load(path, weights_only=False))):
            _tried(lambda read=read, path=path: read(path))  # type: ignore[misc]


_READERS: dict[str, tuple[Callable[[str], Any], ...]] = {
    "hf": (_by_transformers,),
    "dcp": (_by_dcp,),
    "safetensors": (),
    "text": (),
}
