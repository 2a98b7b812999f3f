"""How long the page of ckptool report takes in a browser to be usable, to search and to sort; and a plotly treemap.

`python -m bench.pages` makes the checkpoints of the benchmark and their pages. With plotly, installed in a separate
environment, it also makes a treemap of the same tensors. Each page is opened several times in a fresh Chromium. Times
depend on the machine, so each is also divided by the time of an integer loop that runs in the same page just after.
`--page` writes the table to docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from bench import files, peers
from bench.files import Spec, made

PAGE: Final = files.ROOT / "docs" / "performance.md"
_BEGIN, _END = "<!-- pages: made by bench/pages.py --page -->", "<!-- end of pages -->"
#: A hundred thousand tensors; the other checkpoint of the benchmark has twenty thousand.
HUNDRED: Final = Spec("100,000 tensors", 100_000, 1, 220)
QUICK: Final = (files.QUICK_MANY,)
_PLOTLY: Final = peers.Peer("plotly", ("plotly",), "python", False, "draws treemaps.")
_PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
#: The promised times in milliseconds.
_TARGETS: Final = {("open", files.MANY): 1500, ("open", HUNDRED): 4000, "search": 300, "sort": 300}

#: A page is usable in the first frame that contains the awaited element.
_WATCH = """(() => {
  const look = () => document.querySelector(%s) ? (window.usable = performance.now()) : requestAnimationFrame(look);
  requestAnimationFrame(look);
})()"""
_USABLE = """() => new Promise((done) => {
  const look = () => window.usable ? done(window.usable) : requestAnimationFrame(look);
  look();
})"""
#: Returns the milliseconds of a loop of integer arithmetic.
_CALIBRATION = """() => {
  const begin = performance.now();
  let sum = 0;
  for (let place = 0; place < 3e7; place++) sum = (Math.imul(sum, 31) + place) | 0;
  return sum === 0.5 ? 0 : performance.now() - begin;
}"""
_TIMED = "() => { const begin = performance.now(); %s; document.body.offsetHeight; return performance.now() - begin; }"
_SEARCH = (
    "const search = document.querySelector('input[type=search]'); search.value = '*.mlp.weight';"
    "search.dispatchEvent(new Event('input'))"
)
_SORT = "document.querySelector('#tensors th[data-by=max] button').click()"
_TREEMAP = """\
import sys
import plotly.graph_objects as go
names = open(sys.argv[1]).read().split()
nodes = {}
for name in names:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        nodes.setdefault(".".join(parts[:end]), (parts[end - 1], ".".join(parts[: end - 1]), end == len(parts)))
figure = go.Figure(go.Treemap(
    ids=list(nodes), labels=[node[0] for node in nodes.values()], parents=[node[1] for node in nodes.values()],
    values=[880 if node[2] else 0 for node in nodes.values()],
))
figure.write_html(sys.argv[2], include_plotlyjs=True)
"""


class Row(NamedTuple):
    """One figure: page, action, milliseconds of the action and of the integer loop, size of the page, target."""

    page: str
    what: str
    spent: float
    loop: float
    size: int
    target: int | None


def main(arguments: Sequence[str]) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.pages", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "scratch", help="folder for the files")
    parser.add_argument("--quick", action="store_true", help="a small page, once: does it work?")
    parser.add_argument("--repeat", type=int, default=5, help="how often each page is opened (default 5)")
    parser.add_argument("--page", action="store_true", help=f"write the table to {PAGE.name}")
    given = parser.parse_args(arguments)
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    try:
        playwright: Any = import_module("playwright.sync_api")
    except ImportError:
        playwright = None
    if program is None or playwright is None:
        print(f"left out: pages need Playwright and Chromium, and {'one' if program else 'neither'} is here")
        return
    given.work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for spec in QUICK if given.quick else (files.MANY, HUNDRED):
            page = _report(spec, given.work)
            timed = {"search": _TIMED % _SEARCH, "sort": _TIMED % _SORT}
            rows += _measured(browser, "ckptool report", spec, page, "html[data-ready]", timed, given)
            if spec is not HUNDRED:
                reason = peers.install(_PLOTLY, given.work / "peers")
                if reason:
                    print(f"left out: plotly: {reason}", file=sys.stderr)
                else:
                    rows += _measured(browser, "plotly treemap", spec, _plotly(spec, given.work), "g.slice", {}, given)
        browser.close()
    text = table(rows)
    print(text)
    if given.page:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def _report(spec: Spec, work: Path) -> Path:
    source = work / spec.name
    made(lambda unfinished: files.make(spec, unfinished), source)()
    page = source.with_suffix(".html")
    tool = [sys.executable, "-m", "ckptool", "report", str(source), "-o", str(page), "--force", "-q"]
    subprocess.run(tool, check=True, cwd=files.ROOT)
    return page


def _plotly(spec: Spec, work: Path) -> Path:
    names, page = work / "output.names", work / "output.plotly.html"
    names.write_text("\n".join(files.tensor_names(spec.tensors)), encoding="utf-8")
    python = str(work / "peers" / _PLOTLY.package / "bin" / "python")
    subprocess.run([python, "-c", _TREEMAP, str(names), str(page)], check=True)
    return page


def _measured(
    browser: Any, name: str, spec: Spec, page: Path, wanted: str, timed: dict[str, str], given: argparse.Namespace
) -> list[Row]:
    """Open a page several times, each time in a new browser context, and run the timed scripts in it."""
    spent: dict[str, list[float]] = {}
    loops: list[float] = []
    for _ in range(1 if given.quick else given.repeat):
        context = browser.new_context()
        opened = context.new_page()
        opened.set_default_timeout(300_000)
        opened.add_init_script(_WATCH % json.dumps(wanted))
        opened.goto(page.as_uri())
        spent.setdefault("open", []).append(opened.evaluate(_USABLE))
        loops.append(opened.evaluate(_CALIBRATION))
        for what, script in timed.items():
            spent.setdefault(what, []).append(opened.evaluate(script))
        context.close()
    return [
        Row(
            f"{name}, {spec.label}",
            what,
            median(times),
            median(loops),
            page.stat().st_size,
            (_TARGETS.get(what) or _TARGETS.get((what, spec))) if name.startswith("ckptool") else None,
        )
        for what, times in spent.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| page | MB | what | ms | in loops | target, ms |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.page} | {row.size / 1e6:.1f} | {row.what} | {row.spent:,.0f} | {row.spent / row.loop:.2g} "
        f"| {f'{row.target:,}' if row.target else ''} |"
        for row in rows
    ]
    loops = [row.loop for row in rows]
    return "\n".join([*lines, "", f"The loop took {min(loops):.0f} to {max(loops):.0f} ms."])


if __name__ == "__main__":
    main(sys.argv[1:])
