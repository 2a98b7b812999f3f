"""Put every promise of ckptool to the test that something goes wrong, and print the table of docs/reliability.md.

`python tests/torture/run.py` takes about two hours; `--only kill --only cuts` runs some rows, and `--quick` a little of
each, to see that the script works. The exit code is 1 if a promise was broken; each broken promise is printed with
what is needed to see it again.
"""

from __future__ import annotations

import argparse
import compileall
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

# Run as a script: the package is the folder above, and ckptool is the one of this working tree, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torture import calls, damage, in_place
from torture.rows import ROOT, Broken, Options, Row, Skipped, Tally

_WHOLE = "output old or complete, input untouched"
_EITHER = "torch reads the former version or the new one; no former byte changes, but in holes that `--reclaim` makes"
_FORMER = "the file has its former bytes; path and reason are named"
_WHOLE_OR_DONE = f"{_WHOLE}; exit 128+N, or all is done"
_OUTPUTS, _IN_PLACE = calls.outputs, in_place.edits
ROWS = (
    Row("kill", "killed at every system call", f"{_WHOLE}; the next run cleans up", partial(calls.kill, _OUTPUTS)),
    Row(
        "errors",
        "ENOSPC and EIO at every system call",
        f"{_WHOLE}, nothing left; path and reason named",
        partial(calls.errors, _OUTPUTS),
    ),
    Row("ended", "SIGINT, SIGTERM, SIGHUP at every system call", _WHOLE_OR_DONE, partial(calls.ended, _OUTPUTS)),
    Row(
        "in-place-kill",
        "edits in place, killed at every system call",
        f"{_EITHER}; `undo` gives it back",
        partial(calls.kill, _IN_PLACE),
    ),
    Row(
        "in-place-errors",
        "edits in place, ENOSPC, EDQUOT and EIO at every system call",
        _FORMER,
        partial(calls.errors, _IN_PLACE),
    ),
    Row(
        "in-place-ended",
        "edits in place, SIGINT, SIGTERM, SIGHUP at every system call",
        _EITHER,
        partial(calls.ended, _IN_PLACE),
    ),
    Row("cuts", "files cut at every offset, or at random", "every command says so; no edit writes", damage.cuts),
    Row("flips", "one bit flipped", "no tensor differs from what torch reads; checksums catch it", damage.flips),
)
_SHOWN = 40  # kinds of broken promises of one row that are printed
_ANY = re.compile(r"0x[0-9a-f]+|[0-9a-f]{12}|\d[\d,.]*")


class Result(NamedTuple):
    """A row that was run. ``skipped`` says why it was not, "" if it was."""

    row: Row
    tally: Tally
    seconds: float
    skipped: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="a little of each row: does the script work?")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another one gives other random cases")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the scratch files go (needs 15 GB)")
    given = parser.parse_args(arguments)
    # A run in the background is born ignoring these, and would hand that down to the runs under test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # The runs under test write no bytecode, so that all of them make the same calls; with it they start faster.
    compileall.compile_dir(ROOT / "ckptool", quiet=2)
    results = []
    for row in ROWS:
        if given.only and row.name not in given.only:
            continue
        scratch = Path(tempfile.mkdtemp(prefix="torture-", dir=given.work))
        try:
            result = _result(row, Options(scratch, given.quick, given.seed))
        finally:
            shutil.rmtree(scratch)
        results.append(result)
        _show(result)
    print("\n" + _table(results))
    return int(any(result.tally.broken for result in results))


def _result(row: Row, options: Options) -> Result:
    """Run a row. One that fails by itself is a broken promise, too: nothing is known about the rest of it."""
    tally, begun, skipped = Tally(), time.monotonic(), ""
    try:
        row.run(tally, options)
    except Skipped as reason:
        skipped = f"not run: {reason}"
    except Exception as error:
        traceback.print_exc()
        tally.check(False, f"the test itself failed: {type(error).__name__}: {error}")
    tally.notes += [f"{number:,} {words}" for words, number in tally.counts.most_common()]
    return Result(row, tally, time.monotonic() - begun, skipped)


def _show(result: Result) -> None:
    """A row as soon as it is done, and what was broken in it."""
    row, tally, seconds, skipped = result
    print(
        f"{row.name}: {skipped or f'{tally.amount:,} cases, {len(tally.broken):,} broken'}, {seconds:.0f} s", flush=True
    )
    for text in tally.notes:
        print(f"  {text}")
    alike: dict[str, list[Broken]] = {}
    for broken in tally.broken:
        # What differs in numbers and random names only is one bug, not hundreds.
        alike.setdefault(_ANY.sub("#", broken.words), []).append(broken)
    for group in list(alike.values())[:_SHOWN]:
        more = f" (and {len(group) - 1:,} more like it)" if len(group) > 1 else ""
        print(f"  BROKEN {group[0].case}\n    {group[0].words[:1000]}{more}")
    if len(alike) > _SHOWN:
        print(f"  ... and {len(alike) - _SHOWN:,} other kinds")


def _table(results: Sequence[Result]) -> str:
    """Return the table of docs/reliability.md, and below it what the rows note."""
    lines = ["| what happens | how often | what must hold | broken | seconds |", "|---|---:|---|---:|---:|"]
    for row, tally, seconds, skipped in results:
        amount = "not run" if skipped else f"{tally.amount:,}"
        what, passes = row.what.replace("|", "\\|"), row.passes.replace("|", "\\|")
        lines.append(f"| {what} | {amount} | {passes} | {len(tally.broken)} | {seconds:.0f} |")
    notes = [(row.what, [*tally.notes, *filter(None, [skipped])]) for row, tally, _, skipped in results]
    lines += ["", *(f"- **{what}** \u2014 {'; '.join(texts)}." for what, texts in notes if texts)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
