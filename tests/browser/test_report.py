"""The page of ``ckptool report`` in Chromium: what it asks for, what it shows, and who can use it.

``make test-browser`` runs these: with Playwright, axe-core and a Chromium of the system (``CKPTOOL_BROWSER`` may name
its program), and with torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES
from page_files import HOSTILE, hostile, pair

import ckptool
from ckptool.base.text import visible

if not os.environ.get("CKPTOOL_BROWSER"):
    pytest.skip("they are run by make test-browser", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[browser]'")
torch = pytest.importorskip("torch")
NAMES = (os.environ["CKPTOOL_BROWSER"], "chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
if PROGRAM is None:
    pytest.skip("there is no Chromium on the path", allow_module_level=True)

MANY = 20_000


class Opened:
    """A page in a browser, what it asked for and what the console said."""

    def __init__(self, context: Any, path: Path) -> None:
        self.page = context.new_page()
        self.path = path
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: self.messages.append(f"dialog {dialog.message}"))
        self.page.goto(path.as_uri())

    def ready(self) -> Any:
        self.page.wait_for_selector("html[data-ready]", state="attached")
        return self.page

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def column(self, by: str) -> list[str]:
        """The values of a column in the rows that are drawn, in full."""
        script = """(by) => {
            const heads = [...document.querySelectorAll("#tensors thead th")];
            const place = heads.findIndex((head) => head.dataset.by === by);
            return [...document.querySelectorAll("#tensors tbody tr:not(.gap)")].map((row) =>
                row.cells[place].querySelector("data")?.value ?? row.cells[place].textContent);
        }"""
        return list(self.page.evaluate(script, by))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Opened]]:
    contexts = []

    def open_page(path: Path, **how: Any) -> Opened:
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how}))
        return Opened(contexts[-1], path)

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages: of hostile names, of a pair, of a training checkpoint, and of 20,000 tensors."""
    folder = tmp_path_factory.mktemp("pages")
    a, b = pair(folder)
    state = {f"layers.{n // 10}.part{n % 10}.weight": torch.full((2, 2), float(n)) for n in range(MANY)}
    torch.save(state, folder / "many.pt")
    inputs: dict[str, tuple[Path, ...]] = {
        "hostile": (hostile(folder),),
        "pair": (a, b),
        "training": (FIXTURES / "ddp4_training.pth",),
        "many": (folder / "many.pt",),
        "bytes": (FIXTURES / "sparse.pt",),
    }
    return {
        name: Path(ckptool.report(*files, output=folder / f"{name}.html").path).absolute()
        for name, files in inputs.items()
    }


EVERY = ("hostile", "pair", "training", "many", "bytes")


@pytest.mark.parametrize("name", EVERY)
def test_a_page_asks_for_nothing_and_the_console_is_silent(name: str, pages: Any, opened: Any) -> None:
    shown = opened(pages[name])
    page = shown.ready()
    for target in ("#/tensor/0", "#/module/1", "#/tensor/1"):
        page.evaluate("(hash) => { location.hash = hash; }", target)
    page.wait_for_timeout(100)
    assert shown.messages == []
    assert set(shown.requests) == {pages[name].as_uri()}


def test_the_policy_stops_what_is_not_the_page_itself(pages: Any, opened: Any) -> None:
    """So silence above means that nothing was tried."""
    shown = opened(pages["hostile"])
    shown.ready().evaluate(
        "() => { document.body.append(Object.assign(new Image(), { src: 'https://example.org/x' })); }"
    )
    shown.page.evaluate("() => fetch('https://example.org/y').catch(() => 0)")
    shown.page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>'; } catch {} }")
    assert len([text for text in shown.messages if "Content Security Policy" in text or "TrustedHTML" in text]) >= 2
    assert shown.page.locator("header").count() == 1


def test_hostile_names_are_texts(pages: Any, opened: Any) -> None:
    shown = opened(pages["hostile"])
    page = shown.ready()
    rows = "\n".join(page.eval_on_selector_all("#tensors tbody a", "links => links.map((link) => link.title)"))
    for name in HOSTILE:
        # The path has its own escapes around what is not printable; what is left of them is visible.
        plain = name.replace('"', '\\"')
        assert plain in rows or not plain.isprintable(), name
    assert page.locator("#tensors tbody a").count() == len(HOSTILE)
    assert "lone\\ud800surrogate" in rows and "reversed\\u202eb" in rows and "\\u2028" in rows
    everything = page.evaluate("() => document.documentElement.textContent")
    assert [char for char in everything if visible(char) != char and char != "\n"] == []
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("() => ({}).polluted === undefined && Object.keys(Object.prototype).length") == 0


def test_a_page_of_many_tensors_is_small_and_found_its_way_around(pages: Any, opened: Any) -> None:
    shown = opened(pages["many"])
    page = shown.ready()
    nodes = "() => document.getElementsByTagName('*').length"
    assert page.evaluate(nodes) < 6000
    scroll = "() => { document.querySelector('.rows').scrollTop = 300000; }"
    for step in (scroll, "() => { location.hash = '#/tensor/7'; }"):
        page.evaluate(step)
        page.wait_for_timeout(100)
        assert page.evaluate(nodes) < 6000
    page.keyboard.press("Escape")
    search = page.get_by_label("Search names")
    found = {"part3": MANY // 10, "*.part3.weight": MANY // 10, "layers.77.*": 10, "LAYERS.1999.PART9": 1}
    for text, count in found.items():
        search.fill(text)
        assert shown.texts("#all [role=status]") == [f"{count:,} of 20,000 tensors"]
    search.fill("")
    page.locator("#tensors th[data-by=max] button").click()
    assert page.locator("#tensors th[data-by=max]").get_attribute("aria-sort") == "descending"
    assert [float(value) for value in shown.column("max")[:3]] == [MANY - 1, MANY - 2, MANY - 3]
    assert page.locator("#tensors").get_attribute("aria-rowcount") == str(MANY + 1)


@pytest.mark.parametrize("name", ["training", "pair", "bytes"])
def test_the_numbers_are_those_of_stats(name: str, pages: Any, opened: Any) -> None:
    shown = opened(pages[name], viewport={"width": 1280, "height": 20_000})
    page = shown.ready()
    if name == "pair":
        page.get_by_label("Change", exact=True).select_option("all tensors")
    source = {"training": FIXTURES / "ddp4_training.pth", "bytes": FIXTURES / "sparse.pt"}
    rows = ckptool.stats(source.get(name, pages[name].parent / "a.pt"), all=True)["tensors"]
    for by in ("min", "max", "mean", "std", "zeros"):
        cells = shown.column(by)[: len(rows)]
        expected = [float("nan") if row[by] is None else row[by] for row in rows]  # type: ignore[literal-required]
        # Sums of a tensor that is read beside its partner in B are rounded in another order.
        assert [float(cell or "nan") for cell in cells] == pytest.approx(expected, rel=1e-14, nan_ok=True), by


def test_the_figures_are_those_of_diff(pages: Any, opened: Any) -> None:
    shown = opened(pages["pair"], viewport={"width": 1280, "height": 20_000})
    page = shown.ready()
    folder = pages["pair"].parent
    values = {item["path"]: item for item in ckptool.diff(folder / "a.pt", folder / "b.pt")["values"]}
    paths = page.eval_on_selector_all("#tensors tbody a", "links => links.map((link) => link.title)")
    for by in ("rel_l2", "cosine", "max_abs"):
        cells = dict(zip(paths, shown.column(by)))
        found = {path: float(cells[path]) if cells[path] else None for path in values}
        assert found == {path: item[by] for path, item in values.items()}  # type: ignore[literal-required]
    assert shown.texts("#changes h3")[0] == "Renamed 1"


def test_a_comparison_opens_with_what_changed(pages: Any, opened: Any) -> None:
    shown = opened(pages["pair"])
    page = shown.ready()
    assert page.eval_on_selector_all("main > section", "found => found.map((one) => one.id)")[:3] == [
        "changes",
        "all",
        "about",
    ]
    assert page.locator("#about-b dl").count() == 1
    total = int(shown.texts("#all [role=status]")[0].split(" of ")[1].split()[0])
    assert "same" not in page.eval_on_selector_all(
        "#tensors tbody td:nth-child(2)", "of => of.map((c) => c.textContent)"
    )
    page.get_by_label("Change", exact=True).select_option("all tensors")
    assert shown.texts("#all [role=status]") == [f"{total} tensors"]


def test_the_area_is_bytes_or_parameters(pages: Any, opened: Any) -> None:
    shown = opened(pages["training"])
    page = shown.ready()
    assert "kB in " in shown.texts("#map .readout")[0]
    page.get_by_label("Area").select_option("parameters")
    elements = sum(row["numel"] for row in ckptool.stats(FIXTURES / "ddp4_training.pth", all=True)["tensors"])
    assert shown.texts("#map .readout")[0].startswith(f"{elements:,} elements in ")


def test_the_keyboard_is_enough(pages: Any, opened: Any) -> None:
    page = opened(pages["training"]).ready()
    picture = page.locator("#map svg")
    picture.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#map rect.marked").count() == 1
    readout = page.locator("#map .readout").inner_text()
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash").startswith("#/tensor/") and readout
    assert page.locator("dialog[open]").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.locator("#map .frame button").first.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash").startswith("#/module/")
    picture.focus()
    page.keyboard.press("Escape")
    playwright.expect(page.locator("#map .trail button")).to_have_count(1)
    page.locator("#tensors tbody a[tabindex='0']").focus()
    for key in ("ArrowDown", "ArrowDown", "End", "Home", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.getAttribute('href')") == "#/tensor/1"
    page.keyboard.press("Enter")
    assert page.locator("dialog[open] h2").inner_text() == 'state_dict["module.stem.1.weight"]'
    page.go_back()
    assert page.locator("dialog[open]").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["training", "pair", "hostile"])
def test_axe_finds_nothing(name: str, scheme: str, pages: Any, opened: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
    page = opened(pages[name], color_scheme=scheme).ready()
    for target in ("", "#/tensor/0"):
        page.evaluate("(hash) => { location.hash = hash; }", target)
        page.wait_for_timeout(100)
        found = axe.Axe().run(page).response["violations"]
        assert [(rule["id"], [node["html"][:200] for node in rule["nodes"][:3]]) for rule in found] == []


@pytest.mark.parametrize("name", ["pair", "hostile", "many"])
def test_a_phone_needs_no_scrolling_aside(name: str, pages: Any, opened: Any) -> None:
    page = opened(pages[name], viewport={"width": 390, "height": 844}, has_touch=True).ready()
    for target in ("", "#/tensor/0"):
        page.evaluate("(hash) => { location.hash = hash; }", target)
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("document.querySelector('dialog').scrollWidth") <= 390


def test_without_a_program_the_facts_are_there(pages: Any, opened: Any) -> None:
    shown = opened(pages["training"], java_script_enabled=False)
    text = shown.page.locator("main").inner_text()
    assert "Without JavaScript" in text and "module.stem.0.weight" in text
    assert "ckptool edit" in text and "cuda:0" in text and "epoch" in text
    assert shown.page.locator("#tensors tbody tr").count() == 38


@pytest.mark.parametrize("name", ["pair", "hostile", "many"])
def test_print_clips_nothing(name: str, pages: Any, opened: Any) -> None:
    # 273 mm, the width of A4 across without its margins.
    page = opened(pages[name], viewport={"width": 1031, "height": 700}).ready()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1031
    clipped = """() => [...document.querySelectorAll("main *")]
        .filter((part) => part.checkVisibility() && !part.matches(".unseen"))
        .filter((part) => part.getBoundingClientRect().right > 1031.5)
        .map((part) => part.outerHTML.slice(0, 120))"""
    assert page.evaluate(clipped) == []
    assert page.pdf(prefer_css_page_size=True)[:5] == b"%PDF-"
