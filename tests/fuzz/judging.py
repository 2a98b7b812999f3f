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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import ckptool

from .asking import Bad, Entry, Said, TooLong, ask, bounded, guarded, listed, saved
from .cases import KINDS, Case, Files, put
from .editing import edited
from .finds import EDIT, LOADS, OTHER, RUNS, VALID_FAILS, Find, Verdict
from .ggufs import judged_gguf
from .ranks import judged_ranks
from .reading import comparable, content, difference, error_text, load, undefined
from .sandbox import contained
from .texts import dangerous

#: What torch may use: it is not what is judged.
_SECONDS, _MEMORY = 20, 4 << 30


class Input(NamedTuple):
    """An input in a folder, what ckptool says of it, and what judges need besides.

    ``tell`` is told before each step what comes next; ``edits`` are tried.
    """

    path: str
    folder: str
    said: Said
    chance: random.Random
    tell: Callable[[str], None]
    edits: int

    @property
    def valid(self) -> bool:
        return self.said.valid

    def out(self, suffix: str) -> str:
        return os.path.join(self.folder, f"out{suffix}")


def judged(case: Case, files: Files, folder: str, tell: Callable[[str], None], edits: int = 2) -> Verdict:
    """The verdict about an input that is put into a folder."""
    chance = random.Random(str(case))
    path = _placed(case, files, folder)
    tell("ckptool")
    try:
        said = ask(path)
        tell(f"reader valid={said.valid} loads={said.loads}")
        if case.kind == "ranks":
            return judged_ranks(case.base, path, folder, said)
        return _JUDGES[case.kind](Input(path, folder, said, chance, tell, edits))
    except Bad as bad:
        return Verdict(finds=(bad.find,))


def _placed(case: Case, files: Files, folder: str) -> str:
    """The path of the input, in an empty folder."""
    place = Path(folder)
    for old in place.iterdir():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    path = place / (f"case{KINDS[case.kind].suffix}" if "" in files else "case")
    put(path, files)
    return str(path)


# -- files that torch.load reads -----------------------------------------------------------------------------


def _torch(found: Input) -> Verdict:
    finds: list[Find] = []
    words: list[str] = []
    path, said = found.path, found.said
    loaded, refusal = _tried(lambda: load(path))
    if said.valid and said.loads and refusal:
        finds.append(Find(VALID_FAILS, "valid, weights_only takes it", refusal))
    if said.loads is False and not refusal and said.valid:
        finds.append(Find(LOADS, _why_not(said), "torch.load(weights_only=True) takes it"))
    if said.valid and not refusal and found.chance.random() < 0.3 and _is_zip(path):
        finds += _mapped(path, loaded)
    if said.valid and (refusal or found.chance.random() < 0.05):
        found.tell("sandbox valid=True")
        finds += _unsafe(path, found.folder, words)
    found.tell(f"values valid={said.valid}")
    entries = listed(path, said, finds)
    if entries is not None:
        if not refusal and (said.valid or not _ambiguous(said)):
            told = difference(loaded, entries)
            if told and not undefined(path, loaded):
                finds.append(Find(OTHER, _valid(said), told))
        found.tell(f"edits valid={said.valid}")
        finds += edited(path, found.folder, loaded, refusal, said.valid, found.chance, found.edits)
    words.append("loaded by torch" if not refusal else "refused by torch")
    return Verdict(said.valid, entries is not None, tuple(words), tuple(finds))


def _valid(said: Said) -> str:
    return "valid" if said.valid else "not valid"


def _ambiguous(said: Said) -> bool:
    """Whether the verdict says that the file is not one thing: then nothing needs to agree."""
    return any(told.startswith(("structure", "geometry", "complete", "sizes", "pickles")) for told in said.failed)


def _why_not(said: Said) -> str:
    return next((check["message"] for check in said.report["checks"] if check["name"] == "weights-only"), "")


def _is_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _tried(read: Callable[[], Any], seconds: float = _SECONDS) -> tuple[Any, str]:
    """What a reader gives, or why it does not."""
    try:
        with bounded(seconds, _MEMORY):
            return read(), ""
    except TooLong:
        return None, f"took more than {seconds:g} s"
    except Exception as error:
        # Readers refuse with any class there is.
        return None, error_text(error)


def _mapped(path: str, loaded: Any) -> list[Find]:
    from torture.compare import same

    mapped, refusal = _tried(lambda: load(path, mmap=True))
    if refusal:
        return [Find(VALID_FAILS, "valid, weights_only takes it", f"with mmap=True: {refusal}")]
    if not comparable(loaded) or same(loaded, mapped) or undefined(path, loaded):
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


def _tar(found: Input) -> Verdict:
    finds: list[Find] = []
    said = found.said
    entries = listed(found.path, said, finds)
    if entries is None and not said.valid:
        return Verdict(False, False, ("not opened",))
    found.tell(f"sandbox valid={said.valid}")

    def read() -> str:
        loaded = load(found.path, weights_only=False)
        return difference(loaded, entries) if entries is not None else ""

    answer = contained(read, found.folder)
    if answer.ran:
        word = "stopped before it ran"
        if said.valid:
            finds.append(Find(RUNS, "valid", f"torch.load(weights_only=False) runs {answer.ran}"))
    elif answer.error or answer.died:
        word = "refused by torch"
        if said.valid and not _is_said(said, answer.error):
            finds.append(Find(VALID_FAILS, "valid", answer.error or answer.died))
    else:
        word = "loaded by torch"
        if answer.value and (said.valid or not _ambiguous(said)) and not _is_said(said, ""):
            finds.append(Find(OTHER, _valid(said), answer.value))
    if entries is not None:
        found.tell(f"edits valid={said.valid}")
        finds += _tar_edits(found, bool(answer.error or answer.died), entries)
    return Verdict(said.valid, entries is not None, (word,), tuple(finds))


def _is_said(said: Said, error: str) -> bool:
    """Whether a load without weights_only fails for what validate names, with no promise about it: globals that are not
    on torch's list, which are looked up and called (no weights_only load comes as far), and texts of Python 2."""
    named = any(check["name"] == "globals" and check["status"] != "pass" for check in said.report["checks"])
    return named or (error.startswith("UnicodeDecodeError") and "UnicodeDecodeError" in _why_not(said))


def _tar_edits(found: Input, refused: bool, entries: list[Entry]) -> list[Find]:
    """Converted to what torch reads today: the same tensors."""
    command = found.chance.choice(("sanitize", "convert"))
    make = ckptool.sanitize if command == "sanitize" else _to_torch
    if not saved(command, found.path, found.out(".pth"), make):
        return []
    after, refusal = _tried(lambda: load(found.out(".pth")))
    if refusal:
        told = "" if refused or command == "convert" else f"the output does not load: {refusal}"
    else:
        told = difference(after, [entry._replace(storage="") for entry in entries], names=False)
        told = told if told.startswith("values") else ""
    return [Find(EDIT, f"{command} ends with 0", told)] if told else []


def _to_torch(checkpoint: ckptool.Checkpoint) -> ckptool.Checkpoint:
    return ckptool.convert(checkpoint, "torch")


# -- safetensors --------------------------------------------------------------------------------------------------


def _safetensors(found: Input) -> Verdict:
    from safetensors.torch import load_file

    finds: list[Find] = []
    said = found.said
    loaded, refusal = _tried(lambda: load_file(found.path))
    if said.valid and refusal:
        finds.append(Find(VALID_FAILS, "valid", refusal))
    if not said.valid and not refusal:
        finds.append(Find(LOADS, _why_not(said) or "; ".join(said.failed)[:200], "safetensors takes it"))
    entries = listed(found.path, said, finds)
    if entries is not None:
        told = "" if refusal else _by_name(loaded, entries)
        if told:
            finds.append(Find(OTHER, _valid(said), told))
        found.tell(f"edits valid={said.valid}")
        finds += _converted(found, loaded, refusal)
    word = "loaded by safetensors" if not refusal else "refused by safetensors"
    return Verdict(said.valid, entries is not None, (word,), tuple(finds))


def _by_name(loaded: dict[str, Any], entries: list[Entry]) -> str:
    """A flat mapping: names, and everything about each tensor but its place."""
    if len(entries) >= 64:
        return ""
    names = {(entry.steps or (entry.path,))[-1]: entry for entry in entries}
    if set(names) != set(loaded):
        return "other names"
    flat = [entry._replace(steps=(name,), offset=0, storage="") for name, entry in names.items()]
    return difference(loaded, flat)


#: Edits of safetensors: into itself, with another prefix, and as a file of torch.
_WAYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "save": (".safetensors", lambda c: c),
    "strip-module": (".safetensors", lambda c: ckptool.strip_module(c)),
    "convert torch": (".pth", _to_torch),
    "repack": (".safetensors", lambda c: ckptool.repack(c)),
    "rename": (".safetensors", lambda c: ckptool.rename(c, glob=("*", "fuzz.*"))),
}


def _converted(found: Input, loaded: Any, refusal: str) -> list[Find]:
    from safetensors.torch import load_file

    finds = []
    for name in found.chance.sample(list(_WAYS), min(found.edits, len(_WAYS))):
        suffix, make = _WAYS[name]
        out = found.out(suffix)
        if not saved(name, found.path, out, make):
            continue
        read = load_file if suffix == ".safetensors" else load
        after, refused = _tried(lambda read=read, out=out: read(out))  # type: ignore[misc]
        cut = {"strip-module": "module.", "rename": "fuzz."}.get(name, "")
        told = _unlike(loaded, refusal, after, refused, cut)
        if told:
            finds.append(Find(EDIT, f"{name} ends with 0", told))
    return finds


def _unlike(before: Any, refusal: str, after: Any, refused: str, cut: str = "") -> str:
    """What an output holds otherwise than its input; ``cut`` is a prefix that names may have."""
    from torture.compare import same

    if bool(refused) != bool(refusal):
        how = "loads, the output does not" if refused else "does not load, the output does"
        return f"the input {how}: {refused or refusal}"
    if refused:
        return ""
    old = {key.removeprefix(cut): value for key, value in before.items()}
    new = {key.removeprefix(cut): value for key, value in after.items()}
    alike = set(old) == set(new) and all(same(old[key].contiguous(), new[key].contiguous()) for key in old)
    return "" if alike else "the output holds something else"


# -- folders of Hugging Face -----------------------------------------------------------------------------------------


def _hf(found: Input) -> Verdict:
    finds: list[Find] = []
    said = found.said
    # transformers maps the files: of deflated records, which are said to be invalid, it reads something else.
    deflated = any(note["code"] == "deflated" for check in said.report["checks"] for note in check["notes"])
    loaded, refusal = _tried(lambda: _by_transformers(found.path, mapped=not deflated))
    # transformers loads .bin with weights_only: what that refuses, validate has said.
    promised = said.valid and said.loads is not False
    if promised and refusal:
        finds.append(Find(VALID_FAILS, "valid, weights_only takes it", refusal))
    entries = listed(found.path, said, finds)
    if entries is not None:
        told = "" if refusal or not said.valid else _by_name(loaded, entries)
        if told:
            finds.append(Find(OTHER, "valid", told))
        found.tell(f"edits valid={said.valid}")
        if saved("convert torch", found.path, found.out(".pth"), _to_torch):
            after, refused = _tried(lambda: load(found.out(".pth")))
            told = "" if refusal and not promised else _unlike(loaded, refusal, after, refused)
            finds += [Find(EDIT, "convert torch ends with 0", told)] if told else []
    word = "loaded by transformers" if not refusal else "refused by transformers"
    return Verdict(said.valid, entries is not None, (word,), tuple(finds))


def _by_transformers(path: str, *, mapped: bool = True) -> dict[str, Any]:
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


# -- folders of torch.distributed.checkpoint ---------------------------------------------------------------------------


def _dcp(found: Input) -> Verdict:
    finds: list[Find] = []
    words: list[str] = []
    said = found.said
    entries = listed(found.path, said, finds)
    if entries is None and not said.valid:
        return Verdict(False, False, ("not opened",))
    converted = entries is not None and saved("convert torch", found.path, found.out(".pth"), _to_torch)
    found.tell(f"sandbox valid={said.valid}")

    def read() -> tuple[str, str]:
        try:
            loaded = _by_dcp(found.path)
        except BaseException as error:
            # CheckpointException is no Exception. The cause is in the last line of a traceback in its text.
            lines = str(error).strip().splitlines()
            causes = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception"))]
            raise RuntimeError((causes or lines or [type(error).__name__])[-1][:300]) from None
        told = difference(loaded, [entry._replace(storage="") for entry in entries or ()]) if said.valid else ""
        return told, _unlike_dcp(loaded, found.out(".pth")) if converted else ""

    answer = contained(read, found.folder)
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
        words += ["loaded by DCP"] if said.valid else ["loaded by DCP", "loaded by DCP, not valid"]
        told, wrong = answer.value
        finds += [Find(OTHER, "valid", told)] if told else []
        finds += [Find(EDIT, "convert torch ends with 0", wrong)] if wrong else []
    return Verdict(said.valid, entries is not None, tuple(words), tuple(finds))


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


def _text(found: Input) -> Verdict:
    """Where json or PyYAML reads a key or a tag that makes a loader run code, scan must not pass the text over."""
    from ckptool.reports.scan import scan_file

    told, _ = _tried(lambda: dangerous(Path(found.path).read_bytes()))
    with guarded("scan"):
        verdict = scan_file(found.path)["verdict"]
    missed = bool(told) and verdict in (None, "weights-only")
    finds = (Find(RUNS, f"scan: {verdict}", f"a parser reads {told}"),) if missed else ()
    return Verdict(found.valid, False, ("runs code" if told else "plain",), finds)


def _gguf(found: Input) -> Verdict:
    return judged_gguf(found.path, found.out(".safetensors"), found.said, lambda read: _tried(read, 1))


_JUDGES: dict[str, Callable[[Input], Verdict]] = {
    **dict.fromkeys(("zip", "pickle", "legacy"), _torch),
    "tar": _tar,
    "safetensors": _safetensors,
    "gguf": _gguf,
    "hf": _hf,
    "dcp": _dcp,
    "text": _text,
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
    if kind == "gguf" and find_spec("gguf"):
        import gguf  # noqa: F401
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
    "gguf": (),
    "text": (),
}
