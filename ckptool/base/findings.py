"""Findings: facts that ckptool reports about a checkpoint, each with a code that programs can rely on.

``CODES`` is the table of all codes. Each row has the meaning, the effects, and the check of ``validate`` that lists the
finding. docs/codes.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Flag
from typing import Final

from .records import NamedTuple
from .steps import AnyStep, Setting


class Effect(Flag):
    """The consequences of a finding, independent of its level."""

    NONE = 0
    #: Values are missing or damaged.
    LOSES_VALUES = 1
    #: Every edit is refused: its output would pass the damage on as if it were sound.
    BLOCKS_EDITS = 2
    #: Two programs may read the file differently. Edits are refused.
    AMBIGUOUS = 4
    #: ``torch.load`` raises an error.
    REFUSED_BY_TORCH = 8


class Code(NamedTuple):
    """A row of ``CODES``: the meaning of a code, its effects, and the check of ``validate`` that lists the finding."""

    meaning: str
    effect: Effect = Effect.NONE
    check: str = "structure"


class Finding(NamedTuple):
    """One fact that a user should know about a checkpoint.

    ``level`` is "note", "warning" or "error". ``where`` is a record, file, path or key, or "". ``offset`` is in bytes
    from the start of the file, or -1. ``storages`` holds the keys of all storages that may be affected, or None if
    unknown; an output without these storages is intact. ``ref`` is the object in the pickle, or -1. ``next`` is the
    next step, or "".
    """

    code: str
    level: str
    message: str
    where: str = ""
    offset: int = -1
    effect: Effect = Effect.NONE
    storages: Collection[str] | None = None
    ref: int = -1
    next: AnyStep = ""

    @classmethod
    def of(
        cls,
        code: str,
        level: str,
        message: str,
        where: str = "",
        offset: int = -1,
        *,
        refused: bool = False,
        storages: Collection[str] | None = None,
        ref: int = -1,
        next: AnyStep = "",
    ) -> Finding:
        """Return a finding with the effects of its code. ``refused`` adds that ``torch.load`` raises an error."""
        effect = CODES[code].effect | (Effect.REFUSED_BY_TORCH if refused else Effect.NONE)
        return cls(code, level, message, where, offset, effect, storages, ref, next)

    @property
    def check(self) -> str:
        """The check of ``validate`` that lists this finding."""
        return CODES[self.code].check

    @property
    def loses_values(self) -> bool:
        """Whether values are missing or damaged."""
        return Effect.LOSES_VALUES in self.effect

    @property
    def blocks_edits(self) -> bool:
        """Whether edits are refused because their output would pass the damage on."""
        return Effect.BLOCKS_EDITS in self.effect

    @property
    def ambiguous(self) -> bool:
        """Whether two programs may read the file differently."""
        return Effect.AMBIGUOUS in self.effect

    @property
    def refused(self) -> bool:
        """Whether ``torch.load`` raises an error."""
        return Effect.REFUSED_BY_TORCH in self.effect


# -- codes that other modules ask for ------------------------------------------------------------------------------

DAMAGED: Final = "damaged"
CUT: Final = "cut"
DEFLATED: Final = "deflated"
EDITED: Final = "edited-in-place"
INCOMPLETE: Final = "incomplete"
MISPLACED: Final = "misplaced"
JOINED: Final = "joined"
UNJOINED: Final = "unjoined"
COPIES: Final = "unequal-copies"
FLAT_PARAMETERS: Final = "flat-parameters"
#: The message of that finding.
FLAT_MESSAGE: Final = (
    f"its parameters are flat vectors of FSDP1: convert {' '.join(Setting('unflatten', 'OTHER').words)} gives them"
    " names and shapes"
)
NO_INDEX: Final = "no-index"
STALE_INDEX: Final = "stale-index"
INNER: Final = "inner-weights"
RANK_SETS: Final = "rank-sets"
OTHER_FILES: Final = "other-files"
TRANSFORMED: Final = "transformed-item"
UNCHECKED: Final = "not-checked"
TWO_FORMATS: Final = "two-formats"
ODD_MEMBER: Final = "odd-member"
PROGRAM: Final = "program"
EMPTY_WEIGHTS: Final = "empty-weights"
CONFIGURATION: Final = "runs-code"
CARRIED: Final = "carried-pickle"
DANGEROUS_CALL: Final = "dangerous-call"
ADAPTER: Final = "adapter"

_LOST: Final = Effect.LOSES_VALUES | Effect.BLOCKS_EDITS
_BLOCKS: Final = Effect.BLOCKS_EDITS
_UNCLEAR: Final = Effect.AMBIGUOUS
_REFUSED: Final = Effect.REFUSED_BY_TORCH

CODES: Final[dict[str, Code]] = {
    # The file as a whole.
    CUT: Code("the file ends before its data does", _LOST, "checksums"),
    DAMAGED: Code("bytes differ from what was saved, or cannot be read", _LOST, "checksums"),
    EDITED: Code("the file was edited in place, and still holds what it was before"),
    "unreadable": Code("the file cannot be read"),
    "malformed": Code("the file contradicts its format"),
    TWO_FORMATS: Code("the file is valid in two formats", _UNCLEAR),
    "trailing-bytes": Code("bytes follow the end of the checkpoint"),
    "unlisted-bytes": Code("a file holds bytes that nothing lists"),
    "big-endian": Code("the numbers are stored big-endian"),
    "bare-pickle": Code("a pickle that torch.save did not write"),
    "torch-tar": Code("the tar format of torch 0.1, which torch.load still reads"),
    "unpacked": Code("the folder of an unpacked .pth file"),
    "low-confidence": Code("the kind of file was guessed"),
    "no-tensors": Code("there is no tensor in the file"),
    "in-archive": Code("the checkpoint is a member of an archive"),
    "meta": Code("tensors on the device meta have no values"),
    "inner-state-dict": Code("a state dict holds another state dict"),
    EMPTY_WEIGHTS: Code("the weights have no values: DeepSpeed ZeRO-3 saved them without gathering", check="complete"),
    # Records of a zip archive.
    "duplicate-record": Code("two records have one name", _UNCLEAR),
    "case-twin": Code("the names of two records differ only in case", _UNCLEAR),
    "second-archive": Code("several archives follow one another", _UNCLEAR),
    "encrypted": Code("a record is encrypted", _UNCLEAR | _REFUSED),
    "special-flags": Code("a record has flags that torch does not take", _UNCLEAR | _REFUSED),
    "folder-attribute": Code("a record is marked as a folder", _UNCLEAR),
    "directory-gap": Code("bytes lie between the directory and the end records", _UNCLEAR),
    "directory-rest": Code("bytes of the directory belong to no entry", _UNCLEAR),
    "directory-entry": Code("the archive has an entry for a folder"),
    "end-records": Code("the end records contradict each other", _UNCLEAR),
    "end-count": Code("the end record counts other entries than the directory has", _UNCLEAR),
    "zip64-twice": Code("an entry has its 64-bit sizes twice", _UNCLEAR),
    "entry-fields": Code("the extra fields of an entry do not parse", _UNCLEAR),
    "name-twice": Code("an entry has a second name", _UNCLEAR),
    "name-long": Code("a name is longer than some readers take", _UNCLEAR),
    "name-nul": Code("a name holds a NUL", _UNCLEAR),
    "name-encoding": Code("a name is not UTF-8"),
    "name-flag": Code("a name is not marked as UTF-8, and Python decodes it differently"),
    "name-backslash": Code("a name holds a backslash, which separates folders for some readers"),
    "name-absolute": Code("a name is an absolute path"),
    "name-parent": Code("a name leads out of its folder"),
    "name-empty": Code("a name has an empty part"),
    "stored-size": Code("an uncompressed record has two sizes", _UNCLEAR),
    "two-versions": Code("the archive has two records of its version", _UNCLEAR),
    "other-disk": Code("an entry is said to be on another disk", _UNCLEAR),
    "beyond-end": Code("a record reaches beyond the end of the file", _REFUSED),
    "second-root": Code("the records are in several folders", _REFUSED),
    "long-root": Code("the name of the folder is longer than torch takes", _REFUSED),
    "no-folder": Code("the records are in no folder"),
    "record-case": Code("a record is only found because torch ignores case"),
    "leading-bytes": Code("bytes precede the first record"),
    "unfinished-edit": Code("an edit in place was not finished; the checkpoint is the one before it"),
    "comment": Code("the archive has a comment"),
    "dead-bytes": Code("bytes belong to no record"),
    "overlap": Code("records overlap", _UNCLEAR),
    "padding": Code("a record has other padding than the other records"),
    "descriptor": Code("the descriptor after a record contradicts the directory"),
    "no-descriptor": Code("the descriptor after a record is missing"),
    "local-header": Code("the local header of a record contradicts the directory"),
    "local-name": Code("the local header of a record has another name", _UNCLEAR),
    "no-local-header": Code("a record is not where the directory says"),
    "version-needed": Code("a record asks for a version of zip that Python refuses"),
    "nested-archive": Code("a record is an archive itself"),
    "unlisted-record": Code("a record is not in the directory"),
    "bad-method": Code("a record is compressed in a way that torch does not read"),
    DEFLATED: Code("tensors are compressed: readers that map the file take the compressed bytes for values"),
    "checksum": Code("the bytes of a record do not match its recorded checksum", check="checksums"),
    "unreadable-record": Code("a record cannot be read", check="checksums"),
    # What torch expects in the archive.
    "no-version": Code("the record of the version is missing"),
    "bad-version": Code("the version is not one that torch takes"),
    "bad-byteorder": Code("the byte order is neither little nor big"),
    "bad-alignment": Code("the alignment is not one that torch takes"),
    "bad-id": Code("the id of the file is not text"),
    "layout-contract": Code("the records are not where torch computes them to be"),
    # A tar archive.
    ODD_MEMBER: Code("programs read a member of the tar archive differently", _UNCLEAR),
    "storage-view": Code("a storage is a part of another one, in the format of torch 0.1"),
    # Pickles.
    "after-stop": Code("bytes follow the end of a pickle", check="pickles"),
    "odd-pickle": Code("a pickle is written in a way that Python's pickle module never writes", check="pickles"),
    "broken-pickle": Code("a pickle cannot be decoded to its end", check="pickles"),
    "not-followed": Code("the pickle does something that ckptool cannot follow", check="pickles"),
    "not-looked-at": Code("a file beside the checkpoint was skipped", check="unread files"),
    UNCHECKED: Code("a check was skipped: it would take too long, or there is too much to look at", _UNCLEAR),
    "old-protocol": Code("the pickle has a protocol that torch.jit does not take"),
    "arguments": Code("torch fails at a call in the pickle", check="geometry"),
    # Files that stand for others.
    "empty": Code("a file is empty", check="beside"),
    "zeros": Code("a file holds zeros only", check="beside"),
    "git-lfs-pointer": Code("a file is the pointer of Git LFS to the real one", check="beside"),
    "html": Code("a file is a web page", check="beside"),
    "link-text": Code("a file is the text of a link", check="beside"),
    # Safety.
    DANGEROUS_CALL: Code("loading it without weights_only runs code", check="globals"),
    CONFIGURATION: Code("code, or configuration that makes a loader run code", check="pickles"),
    CARRIED: Code("text or bytes that a program other than torch.load may evaluate or unpickle", check="pickles"),
    "global": Code("a name that is not on torch's list of safe names", check="globals"),
    "global-name": Code("a name that is not valid in Python", check="globals"),
    "weights-only": Code("torch.load with weights_only=True refuses the file", check="weights-only"),
    "load": Code("the real torch.load was tried, and failed", check="load"),
    "verdict": Code("the verdict of scan is not the one that was asked for", check="verdict"),
    # Tensors and storages.
    "missing-storage": Code("the bytes of a storage are not in the file", check="complete"),
    "unreferenced-storage": Code("no tensor uses a storage", check="complete"),
    "unreferenced-record": Code("nothing refers to a record", check="complete"),
    "storage-size": Code("a storage has another size than the pickle says", check="sizes"),
    "storage-twice": Code("a storage is described in two ways", check="sizes"),
    "geometry": Code("a tensor does not fit into its storage", check="geometry"),
    "sparse-index": Code("the indices of a sparse tensor are out of its shape", check="indices"),
    "unknown-kind": Code("a library that ckptool does not know made a tensor; edits keep it"),
    "quantized": Code("a library quantized a tensor; edits keep it"),
    "nonfinite": Code("a tensor holds NaN or infinity", check="finite"),
    "shared": Code("several tensors use one storage"),
    "unused-bytes": Code("no tensor uses a part of the bytes"),
    "legacy-untyped": Code("torch refuses untyped storages in a legacy file"),
    # Names and devices.
    "prefix": Code("the keys have a prefix", check="prefix"),
    "prefix-collision": Code("keys would be equal without their prefix"),
    "wrappers": Code("the keys have the names of wrappers in them"),
    "module": Code("the file holds a whole module, which needs its code to load"),
    "device": Code("tensors were saved on a device", check="device"),
    "device-objects": Code("the file holds device objects"),
    "device-strings": Code("the file holds device names as text"),
    "map-location": Code("no storage has a device that map_location names"),
    "together": Code("one command makes all the edits"),
    "other-names": Code("the names are those of another library than transformers"),
    # Programs.
    PROGRAM: Code("the file is a program with weights, such as TorchScript", check="program"),
    "program-parts": Code("what the program has beside its weights", check="program"),
    "code-devices": Code("the code names devices", check="program"),
    "code-unread": Code("a file of code cannot be read", check="program"),
    "code-missing": Code("the code of a class is missing", check="program"),
    "hidden-state": Code("the program has state that no state dict has", check="program"),
    "untold-buffers": Code("it is unknown which tensors are buffers", check="program"),
    "attribute-devices": Code("objects of the program hold devices"),
    "broken-part": Code("a part of the program cannot be read"),
    # Several files.
    INCOMPLETE: Code("files or parts of the checkpoint are missing or cannot be read", _LOST, "complete"),
    MISPLACED: Code("a part has the name of another part", _LOST, "complete"),
    "missing-file": Code("a file that holds tensors is missing", _LOST, "complete"),
    "short-file": Code("a file ends before its tensors do", _LOST, "complete"),
    JOINED: Code("the files of several ranks are read as one checkpoint"),
    UNJOINED: Code("how the parts of a tensor fit together is unknown", _BLOCKS),
    COPIES: Code("copies of one tensor are not equal", _BLOCKS),
    FLAT_PARAMETERS: Code("the parameters of FSDP1 are flat vectors"),
    "flat-vectors": Code("the state of the optimizer belongs to flat vectors"),
    "shards": Code("a file holds one rank's part of larger tensors", check="shards"),
    "part": Code("a file is one part of a checkpoint by its name", check="part"),
    "rank-part": Code("a file holds what one rank saved", check="part"),
    "weights-elsewhere": Code("the weights are in other files of the folder", check="part"),
    "absent-copies": Code("files are missing that hold copies of tensors in the other files"),
    "rank-parts": Code("ranks have parts of values that are no tensors"),
    "rank-values": Code("ranks have values of their own; the values of the first rank are used"),
    RANK_SETS: Code("the folder holds several sets of rank files"),
    OTHER_FILES: Code("files of the folder belong to no set of rank files"),
    "other-steps": Code("the folder holds other checkpoints"),
    "other-step": Code("the optimizer was saved at another step than the model"),
    "other-weights": Code("the folder holds other weights, which were not read"),
    INNER: Code("a folder within the folder holds weights"),
    "process-group": Code("torch needs a process group to load the tensors"),
    "mesh-order": Code("the ranks of a mesh do not ascend, and torch joins them in two ways"),
    "part-of-mesh": Code("a mesh has more ranks than there are files"),
    "renamed": Code("a file has another name than it was saved under"),
    "odd-dtype": Code("a file holds tensors in another dtype than the other files"),
    "no-moments": Code("the state of the optimizer cannot be joined"),
    "optimizer": Code("the optimizer is not read"),
    "no-layer": Code("no file holds some of the layers"),
    "no-end": Code("it is unknown whether layers are missing at the end"),
    "no-rank": Code("ranks saved no file"),
    "no-piece": Code("a file is missing that may hold pieces of tensors", _BLOCKS, "complete"),
    "piece": Code("a file holds pieces of tensors"),
    "in-pieces": Code("the files hold pieces of tensors"),
    "id-parts": Code("the pickles of the files name different storages by one id"),
    # Folders of Hugging Face.
    NO_INDEX: Code("the shards are complete, but have no index"),
    STALE_INDEX: Code("the shards are complete, but the index does not name all of them"),
    "not-in-index": Code("the index does not list a tensor"),
    "stray-shard": Code("the index does not name a shard"),
    "wrong-shard": Code("a tensor is in another shard than the index says"),
    "tensor-twice": Code("a tensor is in two shards", _UNCLEAR),
    "total-size": Code("the index has another total size than the shards"),
    "variant": Code("the folder holds a variant of the weights"),
    ADAPTER: Code("the file is an adapter, which changes the weights of a base model"),
    "side-files": Code("what the folder holds beside the tensors"),
    "odd-header": Code("the header of a safetensors file is written in an unusual way"),
    # Folders of torch.distributed.checkpoint.
    "bad-item": Code("an item cannot be read", _LOST, "complete"),
    "missing-item": Code("an item is missing", _LOST, "complete"),
    "chunk-hole": Code("a tensor has elements that no piece holds", _LOST, "complete"),
    "item-overlap": Code("two items share bytes", _LOST),
    "odd-metadata": Code(".metadata is not as torch writes it", _LOST),
    TRANSFORMED: Code("bytes were compressed or encrypted by an extension", _BLOCKS),
    "chunk-overlap": Code("two pieces hold the same elements", _UNCLEAR),
    "item-twice": Code("an item is listed twice", _UNCLEAR),
    "chunk-bounds": Code("a piece reaches beyond its tensor"),
    "outside-path": Code("a file name leads out of the folder"),
    "foreign-class": Code("an item holds a class that is not torch's"),
    "stray-file": Code(".metadata names nothing in a file"),
    "unlisted-item": Code(".metadata does not list an item"),
    "unfinished-save": Code("the save was not finished"),
    # What a policy or a command line asks for.
    "layout": Code("the layout is not the expected one", check="layout"),
    "dtype": Code("a tensor has another dtype than expected", check="dtype"),
    "include": Code("no key is left to check", check="include"),
    "require": Code("a required key is missing", check="require"),
    "forbid": Code("a forbidden key is there", check="forbid"),
    "max-bytes": Code("the file is larger than expected", check="max-bytes"),
    "expect-weights-only": Code("torch.load with weights_only=True refuses the file", check="expect-weights-only"),
    # A lock.
    "lock-added": Code("a tensor is new", check="lock"),
    "lock-missing": Code("a tensor is missing", check="lock"),
    "lock-layout": Code("the layout is another one", check="lock"),
    "lock-container": Code("the root is another one", check="lock"),
    "lock-entry": Code("an entry is new, missing or another one", check="lock"),
    "lock-type": Code("a value is of another kind", check="lock"),
    "lock-kind": Code("a tensor is of another kind", check="lock"),
    "lock-dtype": Code("a tensor has another dtype", check="lock"),
    "lock-shape": Code("a tensor has another shape", check="lock"),
    "lock-device": Code("a tensor was saved on another device", check="lock"),
    "lock-content": Code("the content is another one", check="lock-content"),
    "lock-file-added": Code("the lock does not name the file", check="lock"),
    "lock-file-missing": Code("a file that the lock names is missing", check="lock"),
}
