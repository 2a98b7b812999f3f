"""The policy for a release, from options or a policy file, and the checks of a checkpoint's metadata against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..base.dtypes import BY_NAME, dtype_named
from ..base.errors import TargetError
from ..base.findings import Finding
from ..base.globs import MATCH_ALL, Globs
from ..base.map_location import restorable
from ..base.prefixes import wrapper_prefix
from ..base.records import NamedTuple
from ..base.steps import AnyStep
from ..base.text import human_bytes, join_limited, parse_bytes, pluralize, quoted
from ..checkpoint.checkpoint import Checkpoint, layout_of
from ..checkpoint.selection import ChosenKeys, dotted
from ..checkpoint.survey import TensorEntry
from ..safety.weights_only import LoadPrediction
from .checks import FAIL, PASS, Check
from .edit_steps import cast_step, edit_step, pickled_suffix


class Policy(NamedTuple):
    """The expectations of a checkpoint; an empty field expects nothing.

    ``layout`` is "bare" or "wrapped". ``prefix`` is "none" or a prefix that every key must have. ``device`` lists the
    devices allowed for storages (``cuda:*`` is any cuda device), ``dtype`` the dtypes allowed for floating-point
    tensors in state dicts. ``require`` and ``forbid`` are globs for keys or paths. ``max_bytes`` limits the file size.
    ``lock`` is the path of a lock file (``ckptool lock``) that the checkpoint must match. ``include`` and ``exclude``
    are globs that limit ``prefix``, ``dtype``, ``require``, ``forbid``, ``finite`` and ``lock`` to certain keys and
    entries, with all their content. ``safe`` expects the ``scan`` verdict weights-only. ``finite`` and ``load`` need
    torch; ``map_location`` applies to ``load``. ``strict`` turns warnings into failures.

    >>> policy = ckptool.Policy(device=("cpu",), weights_only=True)
    >>> ckptool.validate("training.pth", policy)["valid"]
    False
    """

    layout: str = ""
    prefix: str = ""
    device: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    max_bytes: int = 0
    weights_only: bool = False
    safe: bool = False
    finite: bool = False
    load: bool = False
    map_location: str = ""
    torch: str = ""
    lock: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strict: bool = False
    #: ``also`` lists further policies to meet. ``source`` is the policy file that was found without being named.
    #: ``roots`` are the folders to which the names in a folder's lock are relative.
    also: tuple[Policy, ...] = ()
    source: str = ""
    roots: tuple[str, ...] = ()

    @property
    def only(self) -> Globs:
        """The choice of keys."""
        return Globs(self.include, self.exclude)

    @property
    def each(self) -> tuple[Policy, ...]:
        """This policy and the further policies to meet."""
        return (self, *self.also)


#: The advice for a format of blocks, which has neither entries around the weights nor devices.
_FLAT: Final = "no edit gives that to this format: expect it of the file that ckptool convert makes"
_KEYS: Final = tuple(name for name in Policy._fields if name not in ("also", "source", "roots"))


def policy_of(values: Mapping[str, Any], path: str = "") -> Policy:
    """Return the policy with these values, named with dashes or underscores; raise TargetError for an invalid one."""
    fields: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in _KEYS:
            from ..base.nearest import nearest

            keys = [field.replace("_", "-") for field in _KEYS]
            near = nearest(name.replace("_", "-"), [*keys, *(["files"] if path else [])], 1)
            step = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(keys)}"
            raise TargetError(f"unknown policy key {key!r}", path=path, next=step)
        fields[name] = _value(name, key, value, path)
    policy = Policy(**fields)
    # Accept torch.__version__ too, such as 2.13.0+cpu.
    policy = policy._replace(torch=".".join(policy.torch.partition("+")[0].split(".")[:2]))
    if policy.layout not in ("", "bare", "wrapped"):
        raise TargetError(f"the layout {policy.layout!r} is neither 'bare' nor 'wrapped'", path=path)
    dtypes = {name: dtype_named(name) for name in policy.dtype}
    for name, dtype in dtypes.items():
        if dtype is None:
            step = "write float32, bfloat16, float8_e4m3fn ..."
            raise TargetError(f"{name!r} is not a dtype", path=path, next=step)
    policy = policy._replace(dtype=tuple(dtype.name for dtype in dtypes.values() if dtype is not None))
    return policy._replace(device=tuple(part.strip() for text in policy.device for part in text.split(",")))


def all_of(policy: Policy, *others: Policy) -> Policy:
    """Return a policy that expects everything that each of them expects: further policies only add requirements."""
    whole = (policy, *others)
    return policy._replace(
        also=(*policy.also, *others),
        load=any(item.load for item in whole),
        map_location=next((item.map_location for item in whole if item.map_location), ""),
        strict=any(item.strict for item in whole),
        source=next((item.source for item in whole if item.source), ""),
    )


def _value(name: str, key: str, value: Any, path: str) -> Any:
    default = Policy._field_defaults[name]
    if name == "max_bytes":
        if isinstance(value, int | str) and not isinstance(value, bool):
            return parse_bytes(str(value))
    elif isinstance(default, tuple):
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
        if texts and all(isinstance(text, str) for text in texts):
            return texts
    elif type(value) is type(default):
        return value
    expected = {bool: "true or false", str: "a string", int: "a size"}.get(type(default), "a list of strings")
    raise TargetError(f"{key} = {value!r} is not {expected}", path=path)


def expectations(checkpoint: Checkpoint, policy: Policy, verdict: LoadPrediction) -> Iterator[Check]:
    """Yield one check for each expectation about the metadata; equal checks only once."""
    known: set[tuple[str, str]] = set()
    for item in policy.each:
        for check in _expectations(checkpoint, item, verdict):
            if (check.name, check.message) not in known:
                known.add((check.name, check.message))
                yield check


def _expectations(checkpoint: Checkpoint, policy: Policy, verdict: LoadPrediction) -> Iterator[Check]:
    keys = ChosenKeys(dotted(policy.only, checkpoint))
    of = f", of {policy.only.words}" if policy.only else ""
    if policy.include:
        yield _included(checkpoint, policy)
    if policy.layout:
        yield _layout(checkpoint, policy.layout)
    if policy.prefix:
        yield _prefix(checkpoint, policy.prefix, keys, of)
    if policy.device:
        yield _devices(checkpoint, policy.device)
    if policy.dtype:
        yield _dtypes(checkpoint, policy.dtype, keys, of)
    if policy.require:
        notes = _unmatched("require", checkpoint, policy.require, keys)
        good = f"keys that match {join_limited([repr(glob) for glob in policy.require])}{of}"
        yield _check("require", good, "; ".join(note.message for note in notes[:5]), notes)
    if policy.forbid:
        yield _forbidden(checkpoint, policy.forbid, keys, of)
    if policy.max_bytes:
        size = checkpoint.source.size
        bad = f"the file has {human_bytes(size)} ({size:,} bytes)" if size > policy.max_bytes else ""
        yield _check("max-bytes", f"at most {human_bytes(policy.max_bytes)}", bad)
    if policy.weights_only:
        reasons = [blocker.name or blocker.rule for blocker in verdict.blockers]
        as_file = "as one file: " if checkpoint.traits.loads == "converted" else ""
        good = f"{as_file}torch.load(weights_only=True) of torch {verdict.torch} takes it"
        yield _check("expect-weights-only", good, "" if verdict.loads else f"it is refused: {join_limited(reasons)}")


def _check(name: str, good: str, bad: str, notes: Sequence[Finding] = (), step: AnyStep = "") -> Check:
    """Return a check that fails if ``bad`` is not ""; ``step`` is the edit after which it passes, or advice."""
    if not bad:
        return Check(name, "expectations", PASS, good)
    message = f"expected: {good}; {bad}"
    first, *rest = notes or [Finding(name, "error", message)]
    return Check(name, "expectations", FAIL, message, (first._replace(next=step), *rest))


def _layout(checkpoint: Checkpoint, wanted: str) -> Check:
    layout, _ = layout_of(checkpoint)
    keys = [item for item in checkpoint.state_dicts if item.confidence == "high"]
    step: AnyStep = ""
    if checkpoint.container.in_blocks:
        step = _FLAT
    elif (layout, wanted) == ("bare", "wrapped"):
        step = edit_step(
            "edit", checkpoint.path, word="nested", extension=pickled_suffix(checkpoint), wrap="state_dict"
        )
    elif (layout, wanted) == ("wrapped", "bare") and keys:
        several = "each state dict makes a file of its own: extract them"
        step = several if len(keys) > 1 else edit_step("extract", checkpoint.path, keys[0].path, word="weights")
    return _check("layout", f"the layout is {wanted}", f"it is {layout}" if layout != wanted else "", step=step)


def _included(checkpoint: Checkpoint, policy: Policy) -> Check:
    notes = _unmatched("include", checkpoint, policy.include, ChosenKeys(MATCH_ALL))
    if not notes and not any(_names(checkpoint, ChosenKeys(dotted(policy.only, checkpoint)))):
        notes = [Finding("include", "error", "every key is excluded")]
    return _check("include", f"there are {policy.only.words}", "; ".join(note.message for note in notes[:5]), notes)


def _prefix(checkpoint: Checkpoint, wanted: str, chosen: ChosenKeys, of: str) -> Check:
    state_dicts = [item for item in checkpoint.state_dicts if item.confidence == "high"]
    if not state_dicts:
        return _check("prefix", f"prefix {wanted!r} on every key{of}", "there is no state dict in it")
    nodes = checkpoint.graph.nodes
    notes = []
    for item in state_dicts:
        names = [str(nodes[key]) for key, _ in item.items if chosen.key(item.path, str(nodes[key]))]
        where = f" in {item.path!r}" if item.path else ""
        if wanted == "none":
            prefix = wrapper_prefix(names)
            wrong = prefix.keys
            message = f"prefix {prefix.name!r} on {prefix.keys:,} of {prefix.total:,} keys{where}"
        else:
            head = wanted.rstrip(".") + "."
            wrong = sum(not name.startswith(head) for name in names)
            message = f"{wrong:,} of {len(names):,} keys{where} do not have the prefix {head!r}"
        if wrong:
            notes.append(Finding("prefix", "error", message, item.path))
    good = ("no prefix on any key" if wanted == "none" else f"prefix {wanted!r} on every key") + of
    step = _prefix_step(checkpoint, wanted, [{str(nodes[key]) for key, _ in item.items} for item in state_dicts])
    return _check("prefix", good, "; ".join(note.message for note in notes[:3]), notes, step)


def _prefix_step(checkpoint: Checkpoint, wanted: str, names: Sequence[set[str]]) -> AnyStep:
    if wanted == "none":
        prefix = wrapper_prefix([name for own in names for name in own]).name
        pairs = any(name.startswith(prefix) and name[len(prefix) :] in own for own in names for name in own if prefix)
        edit = edit_step("strip-module", checkpoint.path, word="plain", wrappers=prefix != "module.")
        return "remove one key of each pair with drop" if pairs else edit
    if any(name.startswith(wanted.rstrip(".") + ".") for own in names for name in own):
        return "some keys have the prefix already: take it off them first, with strip-module"
    return edit_step("add-module", checkpoint.path, word="prefixed", add_prefix=wanted)


def _devices(checkpoint: Checkpoint, wanted: Sequence[str]) -> Check:
    storages = checkpoint.survey.reader.storages.values()
    tags = Counter(storage.location for storage in storages)
    # "cuda" means any cuda device, because tags in files always have a number.
    accepted = Globs([*wanted, *(f"{name}:*" for name in wanted if name.isalpha())])
    counts = {tag: count for tag, count in tags.items() if not accepted.match(tag)}
    notes = [
        Finding("device", "error", f"{pluralize(count, 'storage')} tagged {quoted(tag)}")
        for tag, count in counts.items()
    ]
    bad = join_limited([note.message for note in notes])
    names = (tag.replace("*", "0") if tag.endswith(":*") else "cuda:0" if tag == "cuda" else tag for tag in wanted)
    device = next(names, "")
    step: AnyStep = _FLAT if checkpoint.container.in_blocks else ""
    if not step and restorable(device):
        also, extension = "cpu" in counts, pickled_suffix(checkpoint)
        word = device.replace(":", "")
        step = edit_step("remap", checkpoint.path, word=word, extension=extension, to=device, include_cpu=also)
    return _check("device", f"every storage on {' or '.join(wanted)}", bad, notes, step)


def _dtypes(checkpoint: Checkpoint, wanted: Sequence[str], chosen: ChosenKeys, of: str) -> Check:
    names = set(wanted)
    # Every model has integer counters and indices, so they are checked only if the policy lists an integer dtype too.
    only_floating = all(BY_NAME[name].floating for name in names)

    def unmet(edited: Checkpoint) -> list[TensorEntry]:
        tensors = chosen.tensors(edited.survey)
        entries = [entry for entry in tensors if entry.state_dict >= 0] or tensors
        checked = [entry for entry in entries if not only_floating or _is_floating(entry)]
        return [entry for entry in checked if entry.tensor.dtype not in names]

    wrong = unmet(checkpoint)
    notes = [Finding("dtype", "error", f"{_label(e)} is {e.tensor.dtype}", e.path) for e in wrong]
    bad = join_limited([note.message for note in notes])
    which = "floating-point tensors" if only_floating else "tensors"
    step: AnyStep = ""
    if wrong and BY_NAME[wanted[0]].floating and all(map(_is_floating, wrong)):
        step = cast_step(checkpoint, wanted[0], lambda edited: not unmet(edited))
    return _check("dtype", f"{which} are {' or '.join(wanted)}{of}", bad, notes, step)


def _is_floating(entry: TensorEntry) -> bool:
    dtype = BY_NAME.get(entry.tensor.dtype)
    return dtype is not None and dtype.floating


def _unmatched(code: str, checkpoint: Checkpoint, globs: Sequence[str], chosen: ChosenKeys) -> list[Finding]:
    keys = list(_names(checkpoint, chosen))
    patterns = [(glob, dotted(Globs([glob]), checkpoint)) for glob in globs]
    missing = [glob for glob, pattern in patterns if not any(pattern.match(*names[-2:]) for names in keys)]
    if not missing:
        return []
    from ..base.nearest import did_you_mean

    near = {glob: did_you_mean(glob, [names[1] for names in keys], [names[2] for names in keys]) for glob in missing}
    return [Finding(code, "error", f"no key matches {glob!r}{meant}") for glob, meant in near.items()]


def _forbidden(checkpoint: Checkpoint, globs: Sequence[str], chosen: ChosenKeys, of: str) -> Check:
    pattern = dotted(Globs(globs), checkpoint)
    paths = list(dict.fromkeys(names[0] for names in _names(checkpoint, chosen) if pattern.match(*names[-2:])))
    notes = [Finding("forbid", "error", f"{path} is there", path) for path in paths]
    good = f"no key that matches {join_limited([repr(glob) for glob in globs])}{of}"
    return _check("forbid", good, f"there are {join_limited(paths)}" if paths else "", notes)


def _names(checkpoint: Checkpoint, chosen: ChosenKeys) -> Iterator[tuple[str, str, str]]:
    """Yield (name for messages, key, path) for what globs are tried on: chosen tensors and top-level entries."""
    for entry in chosen.tensors(checkpoint.survey):
        yield _label(entry), entry.key, entry.path
    for top in checkpoint.survey.entries:
        if top.path in chosen:
            yield top.key, top.key, top.path


def _label(entry: TensorEntry) -> str:
    return entry.key if entry.path.startswith('["') and entry.state_dict >= 0 else entry.path
