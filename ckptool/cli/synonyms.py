"""Words of other tools for the commands, options and values of ckptool."""

from __future__ import annotations

from typing import Final

#: Names that other tools give these commands.
COMMANDS: Final = {
    "inspect": "show info describe summary print open view head file stat tree load",
    "keys": "ls list dir names params shapes",
    "get": "cat read value entry dump",
    "validate": "check verify test lint audit safe",
    "diff": "compare cmp difference",
    "hash": "checksum digest fingerprint sha256 md5",
    "strip-module": "strip unprefix strip-prefix remove-prefix remove-module",
    "add-module": "add prefix add-prefix",
    "rename": "mv ren map-keys",
    "remap": "map device devices to move cpu map-location",
    "extract": "unwrap pick",
    "wrap": "nest",
    "drop": "rm remove delete del exclude prune",
    "keep": "select filter include only",
    "set": "update put",
    "slim": "shrink trim compact",
    "cast": "dtype half quantize bf16 fp16",
    "merge": "join combine concat graft",
    "average": "mean avg soup swa",
    "convert": "export save save-as copy cp reshard shard",
    "sanitize": "fix clean harden",
    "redact": "anonymize anonymise scrub publish",
    "salvage": "repair recover rescue",
    "repack": "rewrite align zip",
    "undo": "revert rollback restore",
    "history": "log versions edits",
}
#: Names that other tools give the removal of one part, and the entries that may hold it.
PARTS: Final = {
    "strip-optimizer": "optimizer optimizer_states optimizer_state_dict optimizer_state optim optim_state_dict opt",
    "strip-scheduler": "scheduler lr_schedulers lr_scheduler scheduler_state_dict sched",
}
#: Names that other tools and other ckptool commands give an option, and the options it may mean: the first that the
#: command has is chosen.
OPTIONS: Final = (
    ("--to --target --to-type -t", ("--to-format", "--to", "--to-dtype")),
    ("--device --map-location --location -d", ("--to", "--map-location", "--device")),
    ("--remap --move", ("--to", "--map")),
    ("--nan --nans --inf --no-nan --check-nan --check-finite --isfinite", ("--finite",)),
    ("--grep --search --find --contains", ("--include",)),
    ("--dtype --cast --to-type --precision", ("--to-dtype", "--dtype")),
    ("-o --output --out --out-file --outfile --output-file --dest --save", ("--output",)),
    ("--output-dir --outdir --output-folder", ("--out-dir",)),
    ("-f -y --yes --overwrite --replace", ("--force",)),
    ("-n --dry --preview", ("--dry-run",)),
    ("-i --inplace", ("--in-place",)),
    ("-k --state-dict --statedict", ("--key",)),
    ("--pattern --filter --only --match", ("--include", "--rename")),
    ("--skip --except --without --omit", ("--exclude",)),
    ("--top --largest --biggest --limit --head --order --order-by", ("--sort",)),
    ("-j --workers --num-workers --threads --processes", ("--jobs",)),
    ("-s --silent", ("--quiet",)),
    ("--help-all --usage", ("--help",)),
    ("--shard-size --shards", ("--max-shard-size",)),
)
#: Options that other tools give a part of a name, which here is a pattern.
PARTIAL: Final = ("--grep", "--search", "--find", "--contains")
#: Options that other tools give the keys, which here are arguments.
KEYS: Final = ("--key", "--keys", "--entry", "--entries", "--name", "--names", "--params")
#: Other words for values, and the values they may mean: the first that the option takes is chosen.
VALUES: Final = (
    ("size sizes memory mem largest", ("bytes",)),
    ("params parameters elements count numbers", ("numel", "bytes")),
)
#: Options without a value that name a device by another word.
DEVICES: Final = {"cuda": "cuda:0", "gpu": "cuda:0", "no-cuda": "cpu", "no-gpu": "cpu"}
