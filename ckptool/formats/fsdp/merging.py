"""Merge the files of a set of ranks into one object: join split tensors, compare everything else."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Final

from ...base.dtypes import BY_NAME, Dtype
from ...base.errors import MalformedError
from ...base.findings import UNJOINED, Finding
from ...base.lazy import regex
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.paths import joined, spell_key
from ...checkpoint.sharding import Mesh, Sharding, ShardPart, sharding
from ...checkpoint.tensors import Tensor, view_id
from ...pickles.nodes import Ref
from ..joined import Digests, RankFile, RankFiles, every_value, grafted_key, rows
from ..pieces import RANK_VALUES, STATISTICS, Chunk, CopyPair, Rows, box_text, chunks_of, is_own, misfit

#: Finding code: each rank has a different tensor, and the files do not say where it belongs.
RANK_PARTS: Final = "rank-parts"
#: The name that FSDP1 gives to a flat vector of parameters (torch/distributed/fsdp/_flat_param.py, ``FLAT_PARAM``).
FLAT_PARAM: Final = "_flat_param"
#: Counters that are equal in all files of one save.
_STEPS: Final = regex(
    r"(?:\A|[a-z]+_)?(?:steps?|step_count|epochs?|iterations?|iter|num_updates)\Z|\A_step_count\Z", re.I
)
_SHOWN_STEPS: Final = ("global_step", "step", "iteration", "epoch", "last_epoch")
_SEPARATORS: Final = regex(r"[.\[\]\"]+")
_FLOATING: Final = frozenset(name for name, dtype in BY_NAME.items() if dtype.floating)
#: Explains why tensors on disjoint ranks may have the same name.
_TWO_MESHES: Final = "they are spread over different ranks, as two stages of a pipeline that count their own layers"
#: Flaw: a part comes from another save. Reported once per file, not per tensor.
_OTHER_SAVE: Final = "other-save"


class _Spread:
    def __init__(self, how: Sharding, dtype: Dtype, shape: tuple[int, ...], first: str) -> None:
        self.how, self.dtype, self.shape, self.first = how, dtype, shape, first
        #: What all parts have in common.
        self.identity = how.kind, dtype.name, shape, how.placements, how.mesh.shape, how.mesh.names
        self.chunks: list[Chunk] = []
        #: The file of each chunk.
        self.files: list[str] = []
        #: An identifier of each part's view; tied tensors have equal lists.
        self.views: list[Hashable] = []
        #: The parts by their ranges in the whole tensor, with the mesh of each. Later parts at the same ranges are
        #: copies.
        self.parts: dict[Hashable, tuple[Rows, Mesh]] = {}
        self.flaw = ""


#: The end of a flaw for which no file is to blame: torch loads the tensors.
_OF_CLASS: Final = ", and ckptool does not join"


class Merge:
    """A set of rank files, read one after the other, and the object that they form together. ``label`` is the path of
    that object in the whole checkpoint, "" for the root."""

    def __init__(self, container: RankFiles, label: str) -> None:
        self._container = container
        self.note, self.note_lost = container.note, container.note_lost
        self.label = label
        self.meshes: dict[Mesh, None] = {}
        self.kinds: dict[str, None] = {}
        #: File names by the rank that wrote them.
        self.ranks: dict[int, list[str]] = {}
        #: Files without a split tensor, by the number in their name.
        self.without: dict[int, str] = {}
        #: The missing ranks of the set, and the number of ranks that saved it. ``odd``: some files are unusable.
        self.absent: list[int] = []
        self.world, self.odd = 0, False
        self.problems: list[Finding] = []
        self.parts = 0
        self.flat = False
        #: The ranks recorded in the tensors.
        self.named_ranks: set[int] = set()
        #: The first mesh whose ranks do not ascend along a sharded dimension, and its file.
        self.unordered: tuple[Mesh, str] | None = None
        self._base: RankFile | None = None
        #: For each path, the file where it was found first, and the value there.
        self._places: dict[str, tuple[RankFile, Ref]] = {}
        self._parents: dict[str, str] = {}
        self._additions: dict[str, list[tuple[RankFile, Ref, Ref]]] = defaultdict(list)
        self._spread: dict[str, _Spread] = {}
        #: One-dimensional plain tensors that FSDP1 may have cut, by path and rank; ``_cut`` has the paths known to be
        #: cut.
        self._pieces: dict[str, dict[int, Rows]] = {}
        self._cut: set[str] = set()
        #: Ordinary tensors; the elements are None if they cannot be located.
        self._plain: dict[str, tuple[Tensor, Rows | None]] = {}
        self._leaves: dict[str, Hashable] = {}
        self._unequal: dict[str, list[str]] = defaultdict(list)
        self._uncompared: dict[str, None] = {}
        #: Messages by file, for files that another number of ranks saved.
        self._other_saves: dict[str, str] = {}

    # -- reading

    def add(self, file: RankFile, number: int) -> None:
        """Add a rank file. ``number`` is the rank by its file name, used where its tensors do not record a rank."""
        self._base = self._base or file
        reader, values = file.reader, list(every_value(file.reader))
        found = ((value.path, sharding(reader, value.ref, value.tensor)) for value in values if value.tensor)
        spread = {path: how for path, how in found if how is not None}
        rank = next((how.rank for how in spread.values() if how.rank >= 0), -1)
        self.named_ranks |= {rank} if rank >= 0 else set()
        rank = number if rank < 0 else rank
        if not spread:
            self.without[number] = file.name
        self.ranks.setdefault(rank, []).append(file.name)
        refs = [part.ref for path, how in spread.items() if FLAT_PARAM in path for part in how.parts]
        self.flat = self.flat or bool(refs)
        #: The storages of FSDP1's flat parameter vectors.
        flat = {tensor.storage for ref in refs if (tensor := file.reader.tensor(ref))}
        digests = Digests(file.reader)
        for value in values:
            if value.path not in self._places:
                self._places[value.path] = file, value.ref
                self._parents[value.path] = value.parent
                # What the first file lacks is added to its parent mapping.
                if file is not self._base and self._places.get(value.parent, (file, -1))[0] is not file:
                    if value.key >= 0:
                        self._additions[value.parent].append((file, value.key, value.ref))
                    else:
                        self._unequal[value.path].append(file.name)
            if value.path in spread and value.tensor is not None:
                self._add_spread(file, value.path, value.tensor, spread[value.path])
            elif value.tensor is not None:
                plain = self._add_plain(file, value.path, value.ref, value.tensor)
                if plain is not None and len(value.tensor.shape) == 1:
                    if flat and (value.tensor.storage in flat or not value.tensor.numel):
                        self._cut.add(value.path)
                    if value.path in self._cut or self._is_state(value.path):
                        self._pieces.setdefault(value.path, {})[rank] = plain
            elif not value.inside:
                digest = digests.digest(value.ref)
                if digest is not None and self._leaves.setdefault(value.path, digest) != digest:
                    self._unequal[value.path].append(file.name)

    def _add_spread(self, file: RankFile, path: str, tensor: Tensor, how: Sharding) -> None:
        dtype = BY_NAME.get(tensor.dtype)
        if dtype is None or dtype.packed > 1:
            raise MalformedError(f"a {how.kind} has the dtype {tensor.dtype}", where=file.name)
        own = _Spread(how, dtype, tensor.shape, file.name)
        known = self._spread.setdefault(path, own)
        if 0 < how.mesh.ranks != known.how.mesh.ranks > 0:
            ranks = pluralize(how.mesh.ranks, "rank")
            self._other_saves[file.name] = f"{file.name} is of {ranks}, {known.first} of {known.how.mesh.ranks:,}"
            known.flaw = _OTHER_SAVE
            return
        self.meshes[how.mesh._replace(device=how.mesh.device.partition(":")[0])] = None
        self.kinds[how.kind] = None
        if self.unordered is None and not how.mesh.is_ascending(how.placements):
            self.unordered = how.mesh, file.name
        if path in self._plain or own.identity != known.identity:
            known.flaw = known.flaw or f"it is another tensor in {file.name} than in {known.first}"
            return
        if any(words.startswith("Partial") for words in how.placements):
            known.flaw = f"it is a term of a sum over the ranks: {', '.join(how.placements)}"
            return
        for part in how.parts:
            self.parts += 1
            flaw = self._add_part(file, path, known, part, how.mesh)
            known.flaw = known.flaw or flaw

    def _add_part(self, file: RankFile, path: str, known: _Spread, part: ShardPart, mesh: Mesh) -> str:
        """Add a part of a tensor; return a message if it does not fit, or ""."""
        local = file.reader.tensor(part.ref)
        assert local is not None
        if part.ranges is None:
            return f"{file.name} does not say which of its elements it has"
        if any(end > size for ranges, size in zip(part.ranges, known.shape) for _, end in ranges):
            return f"the part in {file.name} lies outside of it"
        if local.kind == "wrapper":
            return f"its parts are tensors of {local.cls}, which torch loads{_OF_CLASS}"
        try:
            place = rows(file, part.ref)
            chunks = chunks_of(place, part.ranges, f"{file.name}: {path}")
        except MalformedError as error:
            self.note_lost(f"{file.name}: {quoted(path)}: {error.what}", file.name)
            return ""
        known.views.append((file.name, view_id(local), part.ranges))
        if chunks:
            first, own = known.parts.setdefault(part.ranges, (place, mesh))
            if first is not place:
                apart = bool(own.members and mesh.members) and {*own.members}.isdisjoint(mesh.members)
                why = _TWO_MESHES if apart else ""
                pair = CopyPair(self._name(path), first, place, apart and mesh.is_of_stage, why)
                self._container.copies.add(pair)
                return ""
        known.chunks += chunks
        known.files += [file.name] * len(chunks)
        return ""

    def _add_plain(self, file: RankFile, path: str, ref: Ref, tensor: Tensor) -> Rows | None:
        """Compare a tensor with that in earlier files; return its elements, or None if they are not located."""
        place: Rows | None = None
        if tensor.kind == "dense":
            with suppress(MalformedError):
                place = rows(file, ref)
        if path not in self._plain:
            self._plain[path] = tensor, place
            if path in self._spread:
                self._spread[path].flaw = f"it is not spread in {file.name}, and in {self._spread[path].first} it is"
            return place
        first, known = self._plain[path]
        if (first.dtype, first.shape, first.kind) != (tensor.dtype, tensor.shape, tensor.kind):
            self._unequal[path].append(file.name)
        elif place is None or known is None:
            self._uncompared[path] = None
        else:
            pair = CopyPair(self._name(path), known, place)
            same = self._container.copies.compare(pair)
            if same is None:
                self._uncompared[path] = None
                self._container.copies.open.append(pair)
                self._container.storage_of[pair.path] = grafted_key(known.file, first.storage)
            elif not same:
                self._unequal[path].append(file.name)
        return place

    # -- results

    @property
    def parameters(self) -> set[int]:
        """The numbers of elements of the split tensors."""
        return {prod(known.shape) for known in self._spread.values()}

    @property
    def step(self) -> tuple[str, int] | None:
        """The files' name for the training step and its number; None if they do not record it."""
        for wanted in _SHOWN_STEPS:
            for path, digest in self._leaves.items():
                if _last(path) == wanted and type(digest) is tuple and digest[0] == "int":
                    return wanted.lstrip("_").replace("_", " "), int(digest[1])
        return None

    @property
    def is_optimizer(self) -> bool:
        """Whether the files hold the state of an optimizer, in torch's form."""
        return {"state", "param_groups"} <= self._places.keys()

    @property
    def is_sure(self) -> bool:
        """Whether the files read so far have the same names, and hold only located parts and equal values. Then a
        missing file can only have held further parts."""
        return bool(self._spread) and not (self._additions or self._pieces or self._cut or self._unequal)

    def build(self, in_order: bool, parameters: Collection[int]) -> Ref:
        """Add the object to the container; return its reference there. ``in_order`` says that all ranks of a
        one-dimensional mesh are present: cut vectors are then joined in rank order. ``parameters`` are the numbers of
        elements of the split tensors in all sets of files."""
        base = self._base
        assert base is not None
        self._find_cut(parameters)
        self._note_unequal(in_order)
        made: dict[Hashable, tuple[Ref, str]] = {}
        storage_of = self._container.storage_of
        flaws: dict[str, list[str]] = {}
        odd: dict[str, list[str]] = {}
        for path, known in self._spread.items():
            whole = self._is_whole(path, known, flaws, odd)
            view = (known.dtype, known.shape, tuple(known.views)) if whole and known.views else path
            if view not in made:
                made[view] = self._add(path, known.dtype, known.shape, known.chunks, whole), self._name(path)
            ref, first = made[view]
            storage_of[self._name(path)] = storage_of[first]
            self._put(path, ref)
        for path in sorted(self._cut):
            self._put(path, self._add_vector(path, in_order, parameters))
        self._note_faults(flaws, odd)
        root = self._container.graft(base, base.graph.root)
        for parent, added in self._additions.items():
            owner, ref = self._places[parent]
            pairs = [self._container.graft(file, part) for file, *entry in added for part in entry]
            self._container.extend(self._container.graft(owner, ref), pairs)
        return root

    def _add(self, path: str, dtype: Dtype, shape: tuple[int, ...], chunks: Sequence[Chunk], whole: bool = True) -> Ref:
        return self._container.add_tensor(self._name(path), dtype, shape, (lambda: chunks) if whole else None)

    def _put(self, path: str, ref: Ref) -> None:
        file, place = self._places[path]
        self._container.put(file, place, ref)

    def _name(self, path: str) -> str:
        base = spell_key("", self.label) if self.label else ""
        return joined(base, path if not base or path[:1] == "[" else f".{path}") if path else base

    def _add_vector(self, path: str, whole: bool, parameters: Collection[int]) -> Ref:
        """Add a vector that FSDP1 cut over the ranks; the files do not record its original shape."""
        chunks, at, vector = [], 0, self._pieces[path]
        for _, piece in sorted(vector.items()):
            chunks.append(Chunk(((at,), piece.shape), piece.source, piece.begin))
            at += piece.shape[0]
        dtype, *others = dict.fromkeys(piece.dtype for piece in vector.values())
        sizes = (
            {rank: piece.shape for rank, piece in pieces.items()}
            for other, pieces in self._pieces.items()
            if other in self._cut and self._parents[other] == self._parents[path]
        )
        flaw = ""
        if others or (self._is_state(path) and next(sizes) != {rank: piece.shape for rank, piece in vector.items()}):
            flaw = "the ranks have different dtypes of it, or other numbers of elements than of the state beside it"
        elif len(vector) > 1 and path not in self._unequal and not self._is_constant(path):
            flaw = "the ranks have the same of it: one file is a copy of another"
        elif self._is_state(path) and len(vector) < len(self.ranks) and at not in parameters:
            absent = [name for rank, names in self.ranks.items() if rank not in vector for name in names]
            flaw = f"it is not in {join_limited(absent, most=2)}"
        if flaw:
            self.note_lost(f"{self._named(path)} cannot be joined: {flaw}")
        return self._add(path, dtype, (at,), chunks, whole and not flaw)

    def _is_state(self, path: str) -> bool:
        return _last(self._parents.get(self._parents[path], "")) == "state"

    def _is_whole(self, path: str, known: _Spread, flaws: dict[str, list[str]], odd: dict[str, list[str]]) -> bool:
        """Return whether the parts of a tensor cover it exactly; otherwise add why not."""
        if 0 in known.shape:
            return True
        if known.flaw:
            if known.flaw != _OTHER_SAVE:
                flaws.setdefault(known.flaw, []).append(self._name(path))
            return False
        fault = misfit(known.shape, [chunk.box for chunk in known.chunks])
        if fault and fault.boxes:
            files = [name for chunk, name in zip(known.chunks, known.files) if chunk.box in fault.boxes]
            what = f"{' and '.join(map(box_text, fault.boxes))}, {join_limited(files, most=2)}"
            odd.setdefault("chunk-overlap", []).append(f"{self._named(path)}: {what}")
        elif fault:
            odd.setdefault("chunk-hole", []).append(f"{self._named(path)} lacks {box_text(fault.place)}")
        return not fault

    def _note_faults(self, flaws: Mapping[str, list[str]], odd: Mapping[str, list[str]]) -> None:
        for name, what in self._other_saves.items():
            self.note_lost(f"{what}: they are not of one save", name)
        storage_of = self._container.storage_of
        for flaw, names in flaws.items():
            what = f"{join_limited([quoted(name) for name in names], most=3)} cannot be joined: {flaw}"
            level = "warning" if flaw.endswith(_OF_CLASS) else "error"
            self.note(UNJOINED, level, what, storages={storage_of[name] for name in names})
        for code, how in (("chunk-hole", "are in none of the files"), ("chunk-overlap", "overlap")):
            if code in odd:
                tensors = pluralize(len(odd[code]), "tensor")
                self.note(code, "error", f"parts of {tensors} {how}: {join_limited(odd[code], most=1)}")

    def _named(self, path: str) -> str:
        return quoted(self._name(path))

    def _find_cut(self, parameters: Collection[int]) -> None:
        """Find the optimizer vectors that FSDP1 has cut: those of parameters that differ between ranks, and all of them
        if other sets split the parameters and this one has neither split tensors (FSDP2) nor matrices (full states)."""
        states = {path for path in self._pieces if self._is_state(path) and self._is_floating(path)}
        own = {self._parents[path] for path in self._pieces if path in self._unequal and self._is_floating(path)}
        matrices = any(len(tensor.shape) > 1 for tensor, _ in self._plain.values())
        if parameters and not self._spread and not matrices:
            own |= {self._parents[path] for path in states}
        elif own:
            own |= {self._parents[path] for path in states if self._is_constant(path)}
        self._cut |= {path for path in self._pieces if self._parents[path] in own}

    def _is_floating(self, path: str) -> bool:
        return self._plain[path][0].dtype in _FLOATING

    def _is_constant(self, path: str) -> bool:
        rows = None if path in self._unequal else self._plain[path][1]
        return rows is not None and prod(rows.shape) > 1 and rows.is_one_value()

    def _note_unequal(self, in_order: bool) -> None:
        base, own, parts = self._base.name if self._base else "", list[str](), list[str]()
        for path, files in self._unequal.items():
            tensor, place = self._plain.get(path, (None, None))
            if _STEPS.match(_last(path)):
                first, where = self._places[path][0].name, join_limited(files, most=2)
                what = f"{self._named(path)} is another in {where} than in {first}: they are not of one step"
                self.note_lost(what, files[0])
            elif tensor is None or is_own(path, tensor.dtype, tensor.shape) or _last(path) in STATISTICS:
                own.append(path)
            elif path not in self._cut or not in_order:
                parts.append(path)
                if place is not None:  # it gets no bytes
                    self._put(path, self._add(path, place.dtype, tensor.shape, (), whole=False))
        if parts:
            names = join_limited([self._named(path) for path in parts], most=3)
            why = "each rank has a different tensor, and the files do not say how they fit together"
            self.note(RANK_PARTS, "warning", f"{names} cannot be joined: {why}")
        if self._cut and in_order:
            vectors = join_limited(sorted(map(self._name, self._cut)), len(self._cut), most=2)
            self.note("flat-vectors", "note", f"without shapes, cut by FSDP1, joined as vectors: {vectors}")
        self._container.note_own(map(self._named, own), base)
        if self._uncompared:
            names = join_limited([self._named(path) for path in self._uncompared], most=3)
            what = f"only validate compares what all ranks have of {names}; that of {base} is taken"
            self.note(RANK_VALUES, "note", what)


def _last(path: str) -> str:
    return _SEPARATORS.split(path.rstrip('"]'))[-1]
