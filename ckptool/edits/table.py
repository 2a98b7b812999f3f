"""The table of edits, from which come the commands that edit, the options of ``ckptool edit``, and their documentation.

Functions are named as ``module.function`` of this package and imported when an edit is applied, so that help and the
parsing of a command line import no edit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from ..base import lazy
from ..base.records import NamedTuple


class Parameter(NamedTuple):
    """A parameter of an edit: ``name`` is the keyword argument of its function.

    The command of the edit has it as an option ``--step``, or as ``--name`` with dashes for underscores; an
    ``argument`` stands without dashes. Without a ``metavar`` it is a flag. ``many`` values make a tuple. ``parse`` is
    the function that turns the text, or the tuple of texts, into the value; without a ``name`` it returns several
    arguments. ``kind`` says what a text names, ``choices`` all valid texts. The parameters in ``excludes`` cannot be
    given together with this one. ``rest`` marks the parameter for all inputs after the first. A ``bare`` value may
    also stand after the paths of its command.

    A step of ``edit`` is the same option: ``step`` applies the edit with this value, unless another edit has that name,
    and a parameter without a step modifies the steps of its edit. ``ckptool edit`` has the steps that ``cli/help.py``
    lists.
    """

    name: str
    help: str = ""
    metavar: str = ""
    step: str = ""
    default: str = ""
    argument: bool = False
    many: bool = False
    rest: bool = False
    bare: bool = False
    kind: Literal["", "file", "device", "keys", "other_key"] = ""
    choices: tuple[str, ...] = ()
    parse: str = ""
    excludes: tuple[str, ...] = ()

    @property
    def spelled(self) -> str:
        """The name of the option, without its dashes."""
        return self.step or self.name.replace("_", "-")

    def parsed(self, typed: Any) -> dict[str, Any]:
        """Return the arguments that the typed text, or the tuple of texts, stands for."""
        value = function(self.parse)(typed) if self.parse else typed
        return {self.name: value} if self.name else dict(value)


class Edit(NamedTuple):
    """An edit: its name, its ``function``, its ``title`` (one line of help) and its parameters.

    ``scope`` names the parameters of the function that choose a state dict and keys. ``flag`` is true if ``ckptool
    edit`` applies it by ``--name`` alone. ``summary`` and ``examples`` are the help of its own command; without them it
    has none. ``in_place`` is false for edits that compute or move bytes, ``of_keys`` true for edits that rename keys,
    ``frees`` for edits that leave unused bytes in a file edited in place. ``in_order``: each option of the command is
    applied by itself, one after the other.
    """

    name: str
    function: str
    title: str
    parameters: tuple[Parameter, ...] = ()
    scope: tuple[str, ...] = ("key", "include", "exclude")
    flag: bool = False
    in_place: bool = True
    of_keys: bool = False
    frees: bool = False
    in_order: bool = False
    summary: str = ""
    examples: str = ""


_GLOBS: Final = ("include", "exclude")
_PATTERNS: Final = Parameter("globs", metavar="GLOB...", argument=True, many=True, kind="keys")
_PREFIX: Final = Parameter("prefix", metavar="PREFIX", default="module.")
_PURPOSE: Final = Parameter(
    "purpose",
    "inference: drop what only training needs; lightning: add what its loader reads.",
    "WORD",
    step="for",
    choices=("inference", "lightning"),
)
CONFIG: Final = Parameter("config", "For --to-names: numbers of the model, as config.json.", "FILE", kind="file")
_WEIGHTS: Final = Parameter(
    "weights",
    "One weight per checkpoint, normalized to a sum of 1; for adapters, one factor each.",
    "W,W...",
    parse="average.parse_weights",
)
_DEDUPE: Final = "Merge storages with the same bytes into one: tied tensors."
_WEIGHT_NORM: Final = Parameter(
    "form",
    "Name weight norms in the new or old way of torch, or fold them.",
    "FORM",
    step="weight-norm",
    choices=("new", "old", "fold"),
)

_EDITS: Final = (
    Edit(
        "to-names",
        "recipes.named_as",
        "Names and layout of hf:llama, meta:llama3 ...",
        (Parameter("family", metavar="FAMILY", step="to-names"), CONFIG),
        scope=("key",),
        in_place=False,
    ),
    Edit(
        "recipe",
        "recipes.apply_recipe",
        "Rename, split and join tensors by a TOML file.",
        (Parameter("recipe", metavar="FILE", step="recipe", kind="file"), CONFIG),
        scope=("key",),
        in_place=False,
    ),
    Edit(
        "unflatten",
        "flat_params.unflatten_by",
        "Split flat parameters of FSDP1 as OTHER says.",
        (Parameter("other", metavar="OTHER", step="unflatten", kind="file"),),
        scope=(),
        in_place=False,
    ),
    Edit(
        "extract",
        "entries.extract",
        "Save one entry as a standalone checkpoint.",
        (Parameter("key", metavar="[KEY]", step="extract", argument=True, kind="keys"),),
        scope=("key",),
        summary="""Save one entry as a standalone checkpoint: a state dict without the training around it.

        KEY is its path as inspect prints it; without it, the only state dict is taken. Tensors that only other entries
        use are dropped.""",
        examples="""ckptool extract training.pth -o weights.pth
        ckptool extract training.pth state_dict -o weights.pth
        ckptool extract lightning.ckpt hyper_parameters -o hparams.pth""",
    ),
    Edit(
        "wrap",
        "purposes.wrap",
        "Nest the checkpoint under a key of a new dict.",
        (Parameter("key", metavar="NAME", step="wrap"),),
        scope=(),
    ),
    Edit(
        "drop",
        "entries.drop",
        "Remove entries or keys by pattern.",
        (_PATTERNS._replace(step="drop"),),
        frees=True,
        summary="""Remove entries or keys: the optimizer, the schedulers, a head.

        A pattern (*, ?, [45], [a-c], [!x], {a,b} or re:REGEX) matches top-level entries, and keys of state dicts by
        name or by full path; with --key, only keys of that state dict. Any other entry goes by its exact path. Bytes
        that nothing else uses are dropped. A pattern without a match is refused.

        With --in-place they stay in the file, for undo. --reclaim makes them holes, which take no space, and cannot be
        undone; it needs Linux and a filesystem that has holes.""",
        examples="""ckptool drop training.pth optimizer lr_schedulers -o small.pth
        ckptool drop model.pth 'head.*' -o backbone.pth
        ckptool drop training.pth optimizer 'fc.*' -o headless.pth""",
    ),
    Edit(
        "keep",
        "entries.keep",
        "Remove all other entries or keys; patterns are separated by commas.",
        (Parameter("globs", metavar="GLOB,...", step="keep", kind="keys", parse="entries.parse_globs"),),
    ),
    Edit(
        "set",
        "entries.set_entry",
        "Set or add a scalar: JSON, else a string.",
        (Parameter("", metavar="KEY=VALUE", step="set", kind="keys", parse="entries.parse_pair"),),
        scope=(),
    ),
    Edit(
        "strip-module",
        "keys.strip",
        "Remove the prefix 'module.' from keys.",
        (
            _PREFIX._replace(help="Remove this prefix, in whole segments.", step="strip-prefix"),
            Parameter(
                "wrappers",
                "Remove the names of all wrappers, such as _orig_mod.",
                step="wrappers",
                excludes=("prefix",),
            ),
        ),
        flag=True,
        of_keys=True,
        summary="""Remove the prefix 'module.' from the keys of every state dict in the file.

        Keys without it, and everything else in the file, stay as they are, byte for byte. With --wrappers the segments
        of wrappers are removed anywhere in the name, 'module.' only at the start or next to another wrapper.""",
        examples="""ckptool strip-module model.pth -o plain.pth
        ckptool strip-module model.pth -o plain.pth --wrappers
        ckptool strip-module model.pth -o plain.pth --strip-prefix model. --key state_dict
        ckptool strip-module *.pth --out-dir plain/ --dry-run""",
    ),
    Edit(
        "add-module",
        "keys.add_prefix",
        "Add the prefix 'module.' to keys.",
        (_PREFIX._replace(help="Add this prefix, in whole segments.", step="add-prefix"),),
        flag=True,
        of_keys=True,
        summary="""Add the prefix 'module.' to every key of every state dict in the file.

        A model wrapped in DataParallel or DistributedDataParallel can then load it.""",
        examples="""ckptool add-module model.pth -o parallel.pth
        ckptool add-module model.pth -o lightning.pth --add-prefix model. --key state_dict""",
    ),
    Edit(
        "rename",
        "pipeline.rename",
        "Rename keys by pattern, table, or another checkpoint.",
        (
            Parameter(
                "",
                "Rename keys by a pattern, as sed does (s/OLD/NEW/), or by the table in @FILE.",
                "OLD=NEW",
                step="rename",
                bare=True,
                parse="keys.parse_rename",
            ),
            Parameter(
                "like", "Rename keys by the names of another checkpoint.", "OTHER", step="rename-like", kind="file"
            ),
            Parameter("by_order", "With --rename-like: pair names by order and shape."),
            _WEIGHT_NORM,
        ),
        of_keys=True,
        in_order=True,
        summary="""Rename keys of state dicts. Renames apply one after the other, in the order given.

        Each wildcard of NEW (*, ?, [45], [a-c], [!x], {a,b}) takes what that of OLD matched. A regular expression has
        the flags g and i. A table is JSON, or has two columns. --weight-norm names weight norms as torch does now (new:
        parametrizations), as it did (old: weight_g, weight_v), or makes plain weights of them (fold).

        _metadata follows, and so do parameter names in optimizers. A rename that matches nothing is refused, and so are
        two keys that would become one.""",
        examples="""ckptool rename model.pth 'backbone.*=encoder.*' -o renamed.pth
        ckptool rename model.pth 's/^layers\\.(\\d+)/blocks.\\1/' -o renamed.pth
        ckptool rename model.pth @names.json -o renamed.pth
        ckptool rename model.pth --rename-like other.pth --by-order -o renamed.pth""",
    ),
    Edit(
        "remap",
        "devices.remap_by_options",
        "Retarget devices: GPU to CPU, cuda:1 to cuda:0.",
        (
            Parameter(
                "to",
                "Move tensors to this device, not those on cpu or meta.",
                "DEVICE",
                step="to",
                kind="device",
                parse="devices.parse_device",
            ),
            Parameter(
                "map",
                "Move one device to another: cuda:*=cpu; repeatable.",
                "FROM=TO",
                step="map",
                many=True,
                kind="device",
                parse="devices.device_pairs",
            ),
            Parameter(
                "visible",
                "Renumber physical GPUs, like CUDA_VISIBLE_DEVICES.",
                "N,N",
                step="visible",
                parse="devices.parse_visible",
            ),
            Parameter("include_cpu", "With --to: also move tensors on cpu or meta."),
            Parameter("strings", "Also change plain strings that name a device."),
        ),
        summary="""Retarget devices: location tags of storages, and torch.device objects. No GPU is needed.

        Tensors on cpu stay there unless --include-cpu or --map moves them: optimizer steps and random states belong
        there.""",
        examples="""ckptool remap model.pth --to cpu -o model.cpu.pth
        ckptool remap model.pth --map cuda:1=cuda:0 -o model.gpu0.pth
        ckptool remap model.pth --map 'cuda:*=cpu' -o model.cpu.pth
        CUDA_VISIBLE_DEVICES=1,3 saved with physical numbers:
        ckptool remap model.pth --visible 1,3 -o model.logical.pth""",
    ),
    Edit(
        "cast",
        "cast.cast",
        "Convert floating-point tensors to another dtype.",
        (
            Parameter(
                "to_dtype",
                "Convert floating-point tensors: float16, bf16, float32 ...",
                "DTYPE",
                step="to-dtype",
                bare=True,
            ),
            Parameter("no_overflow", "Refuse finite values that would become infinite."),
            Parameter("optimizer", "Also convert optimizer state."),
        ),
        in_place=False,
        summary="""Convert floating-point tensors to another dtype, exactly like torch's own .to(dtype).

        Optimizer state stays as it is: in a narrower dtype its small numbers would become 0. With --include, exactly
        the matching tensors are converted, whatever their dtype. Tensors that share a storage still share it. Values
        are computed with torch while the output is written: the file is never in memory. Finite values that become
        infinite are counted and reported. NaN stays NaN; its bits in bfloat16 differ between the CPUs that torch runs
        on: here they are 0xffff, as on x86.""",
        examples="""ckptool cast model.pth bf16 -o model.bf16.pth
        ckptool cast model.pth --to-dtype float16 --exclude '*norm*' --no-overflow -o model.fp16.pth
        ckptool cast model.pth --to-dtype float32 --include 'head.*' -o model.new.pth""",
    ),
    Edit(
        "resize",
        "resize.resize",
        "Give the token embedding and the head another number of rows.",
        (
            Parameter(
                "vocab", "The number of tokens; +N adds N.", "N", step="vocab", bare=True, parse="resize.parse_rows"
            ),
            Parameter("fill", "Values of new rows.", "WORD", default="mean", choices=("mean", "zero")),
        ),
        in_place=False,
        summary="""Give the token embedding, the head and its bias another number of rows, for N tokens.

        The first rows are kept, byte for byte. New rows are the mean of all old ones, or zeros. Tied tensors stay tied,
        and config.json of a folder gets the new vocab_size. Tensors are found by the names that libraries give them;
        with --include, exactly the matching ones are resized.""",
        examples="""ckptool resize llama/ 32064 -o llama-32064/
        ckptool resize model.pth 100 --fill zero -o model.100.pth
        ckptool resize model.pth --vocab 100 --include 'tokens.weight' -o model.100.pth""",
    ),
    Edit("for", "purposes.fit_for", _PURPOSE.help, (_PURPOSE,), scope=(), in_place=False),
    Edit(
        "slim",
        "slim.slim",
        "Drop bytes that no tensor uses.",
        (
            _PURPOSE,
            Parameter(
                "tie",
                "Make NAME another name of OTHER, if both hold the same bytes or NAME is missing; repeatable.",
                "NAME=OTHER",
                step="tie",
                many=True,
                kind="keys",
                parse="ties.parse_names",
            ),
            Parameter(
                "untie",
                "Give a tied tensor a copy of its own; repeatable.",
                "NAME",
                step="untie",
                many=True,
                kind="keys",
            ),
            Parameter("dedupe", _DEDUPE, step="dedupe"),
        ),
        flag=True,
        in_place=False,
        summary="""Drop bytes that no tensor uses: a slice of a large storage gets a storage of its own size.

        Tensors that overlap still share a storage. No value changes.""",
        examples="""ckptool slim training.pth --for inference -o model.pth
        ckptool slim model.pth --dedupe -o small.pth""",
    ),
    Edit(
        "use-ema",
        "averages.use_ema",
        "Take the averaged weights in place of the model's.",
        scope=("key",),
        flag=True,
        in_place=False,
    ),
    Edit(
        "weight-norm",
        "weight_norm.weight_norm",
        _WEIGHT_NORM.help,
        (_WEIGHT_NORM,),
        in_place=False,
    ),
    Edit("dedupe", "slim.merged_doubles", _DEDUPE, scope=_GLOBS, flag=True, in_place=False),
    Edit(
        "merge",
        "merge.merge_file",
        "Copy tensors or entries from other checkpoints.",
        (
            Parameter("other", metavar="OTHER", argument=True, kind="file"),
            Parameter("other_key", "The state dict of the second file, by its path there.", "KEY", kind="other_key"),
        ),
        in_place=False,
        summary="""Copy the tensors of another checkpoint into this one: existing keys are replaced, others added.

        --include and --exclude select keys of OTHER. A key whose shape differs is refused. Whole entries, tensors or
        not, are copied by the option --merge-entry of edit.""",
        examples="""ckptool merge new_head.pth backbone.pth --exclude 'fc.*' -o model.pth
        ckptool edit training.pth --merge-entry ema.pth:ema_state_dict=state_dict -o model.pth""",
    ),
    Edit(
        "merge-entry",
        "merge.merge_file",
        "Copy an entry of another checkpoint.",
        (Parameter("", metavar="OTHER:KEY[=KEY]", step="merge-entry", kind="file", parse="merge.parse_source"),),
        scope=(),
        in_place=False,
    ),
    Edit(
        "average",
        "average.average_with",
        "Average the weights of several checkpoints.",
        (
            Parameter("others", metavar="OTHER", many=True, rest=True, kind="file"),
            _WEIGHTS,
            Parameter(
                "base",
                "Add to the first checkpoint the differences of the others from this one, each times its weight.",
                "FILE",
                kind="file",
            ),
        ),
        in_place=False,
        summary="""Average the weights of several checkpoints of one model.

        The output is the latest checkpoint (with the highest epoch or step; without any, the first) with the mean of
        all in place of its floating-point tensors. The mean is computed piece by piece while writing.

        With --base the output is the first checkpoint plus weighted differences (task arithmetic): A + w (B - BASE).
        Weights of either sign stand for the checkpoints after the first; without any, each weight is 1.""",
        examples="""ckptool average epoch_1.pth epoch_2.pth epoch_3.pth -o average.pth
        ckptool average a.pth b.pth --weights 0.7,0.3 -o mixed.pth
        ckptool average model.pth tuned.pth --base model.pth --weights 0.5 -o halfway.pth""",
    ),
    Edit(
        "merge-lora",
        "lora.merge_lora_files",
        "Merge LoRA and other PEFT adapters into a base model.",
        (
            Parameter("adapters", metavar="ADAPTER", many=True, rest=True, kind="file"),
            _WEIGHTS,
            Parameter("alpha", "The lora_alpha of adapters that record none.", "NUMBER", parse="lora.parse_alpha"),
        ),
        scope=("key",),
        in_place=False,
        summary="""Merge PEFT adapters into a base model, one after the other.

        The first input is the base, a file or a folder; the others are adapters: folders with adapter_config.json and
        adapter_model.safetensors or .bin, or LoRAs of kohya and diffusers. LoRA (also rsLoRA, DoRA, patterns,
        embeddings, convolutions, experts, modules_to_save, trained tokens), AdaLoRA, VeRA, IA3, LoHa, LoKr, OFT and
        BOFT are merged, with the values of PEFT's merge_and_unload(). Only changed weights are computed; everything
        else is copied.""",
        examples="""ckptool merge-lora base/ adapter/ -o merged/
        ckptool merge-lora base.safetensors adapter/ -o merged.safetensors
        ckptool merge-lora pipeline/unet/ lora.safetensors -o unet/
        ckptool merge-lora base/ style/ task/ --weights 1,0.5 -o merged/""",
    ),
    Edit(
        "redact",
        "redact.redact",
        "Remove what is private: all, paths, users, sources, args.",
        (Parameter("kinds", metavar="WORDS", step="redact", parse="redact.parse_kinds"),),
        scope=_GLOBS,
        in_place=False,
    ),
    Edit(
        "sanitize",
        "sanitize.sanitizer.sanitize",
        "Make plain torch.load take a checkpoint, without running it.",
        (
            Parameter("as_state_dict", "Replace a pickled module by its state dict."),
            Parameter("drop_unknown", "Drop what has no plain form and holds no tensors."),
        ),
        scope=(),
        flag=True,
        in_place=False,
        summary="""Make a checkpoint that plain torch.load(path) of torch 2.6 and later loads, without running it.

        Objects of other classes become dicts of their attributes; numpy scalars become numbers, numpy arrays tensors,
        paths and dates strings, functions and classes their names, and pickle protocol 4 becomes 2. Tensors stay as
        they are. Each change is printed with its path. What has no plain form is refused. An object that holds values
        of tensors is never dropped.""",
        examples="""ckptool sanitize training.pth -o training.plain.pth
        ckptool sanitize training.pth --dry-run
        ckptool sanitize whole_model.pth --as-state-dict -o weights.pth
        ckptool sanitize strange.pth --drop-unknown -o plain.pth""",
    ),
    Edit(
        "repack",
        "slim.repack",
        "Rewrite the file in torch's own layout, nothing unused.",
        scope=(),
        flag=True,
        in_place=False,
    ),
)

#: The edits by their names, in the order in which ``ckptool edit --help`` lists them.
EDITS: Final[Mapping[str, Edit]] = {edit.name: edit for edit in _EDITS}


#: The options that apply an edit: the edit, and the parameter that takes the value, or None for a flag.
STEPS: Final[Mapping[str, tuple[Edit, Parameter | None]]] = {
    name: (edit, parameter)
    for edit in _EDITS
    for name, parameter in ((edit.name if edit.flag else "", None), *((each.step, each) for each in edit.parameters))
    if name == edit.name or (name and name not in EDITS)
}
#: The options that modify the steps of an edit, with their parameters.
MODIFIERS: Final[Mapping[str, Parameter]] = {
    each.spelled: each for edit in _EDITS for each in edit.parameters if not each.step
}


def function(name: str) -> Callable[..., Any]:
    """Import and return the function ``module.function`` of this package."""
    module, _, last = name.rpartition(".")
    found: Callable[..., Any] = getattr(lazy.module(f"edits.{module}"), last)
    return found
