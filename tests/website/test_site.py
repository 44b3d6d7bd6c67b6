"""The site: built without a warning, opened from disk and from a server in a real browser, at the
widths of a desk and of a phone, clicked through and searched.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import open_page
from website.cut_down import shortened

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def opened(
    browser: Browser, address: str, size: dict[str, int], scheme: str = "light"
) -> Iterator[Page]:
    """A page of the site, which loads nothing from elsewhere."""
    here = address.partition("/index.html")[0]
    yield from open_page(browser, address, within=here, viewport=size, color_scheme=scheme)


@pytest.fixture
def desk(browser: Browser, site: Path) -> Iterator[Page]:
    yield from opened(browser, (site / "index.html").as_uri(), DESK)


@pytest.fixture
def phone(browser: Browser, site: Path) -> Iterator[Page]:
    yield from opened(browser, (site / "index.html").as_uri(), PHONE, "dark")


@pytest.fixture
def served(browser: Browser, site: Path) -> Iterator[Page]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield from opened(browser, f"http://127.0.0.1:{server.server_port}/index.html", DESK)
    server.shutdown()
    server.server_close()


def search(page: Page, words: str) -> None:
    """Type into the search, and take the first section that is found."""
    field = page.locator("input.md-search__input")
    field.press_sequentially(words)
    result = page.locator(".md-search-result__item a.md-search-result__link")
    expect(result.filter(has_text=words).first).to_be_visible()
    result.filter(has=page.locator("h2", has_text=words)).first.click()


def test_every_link_and_picture_of_a_page_is_there(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    dead = []
    for path, text in pages.items():
        for target in re.findall(r'(?:href|src)="([^"]+)"', text):
            address, _, anchor = unquote(target).partition("#")
            file = (path.parent / address).resolve() if address else path
            if re.match(r"\w+:", target) or path.name == "404.html":
                continue
            if not file.exists() or (
                anchor
                and file in anchors
                and anchor not in anchors[file]
                and not anchor.startswith("__")
            ):
                dead.append(f"{path.relative_to(site)}: {target}")
    assert len(pages) > 60
    assert dead == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = [
        re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(\w+:[^"]*)"', path.read_text())
        for path in site.rglob("*.html")
    ]
    assert [each for each in loaded if each] == []


def click_through(page: Page, link: Locator) -> None:
    """Click a link, and wait for the page that it leads to."""
    target = link.evaluate("link => link.href")
    link.click()
    page.wait_for_url(target)


def test_every_page_of_the_navigation_opens_by_clicking(desk: Page) -> None:
    tabs = desk.locator(".md-tabs__link")
    seen = set()
    for name in tabs.all_inner_texts():
        click_through(desk, tabs.filter(has_text=name))
        menu = desk.locator(
            ".md-sidebar--primary .md-nav__item--active.md-nav__item--section > .md-nav > ul > li"
        )
        for number in range(menu.count()):
            link = menu.nth(number).locator("a.md-nav__link").first
            if not link.is_visible():
                continue
            click_through(desk, link)
            expect(desk.locator("article h1")).to_be_visible()
            seen.add(desk.url.partition("#")[0])
    assert len(seen) > 40


def test_below_a_long_command_the_page_shows_how_the_tests_cut_it_down(
    desk: Page, site: Path
) -> None:
    desk.goto((site / "tutorials" / "pretrain-124m.html").as_uri())
    note = desk.locator("details.example").first
    expect(note.locator("code")).not_to_be_visible()
    note.locator("summary").click()
    expect(note.locator("code")).to_be_visible()
    command = note.locator("xpath=preceding-sibling::div[1]//code").inner_text().strip()
    shown = note.locator("code").inner_text().strip().splitlines()
    lines = [line for line in command.splitlines() if line.strip() and not line.startswith("#")]
    assert [shortened(line).removeprefix(line).strip() or "(nothing)" for line in lines] == shown


@pytest.mark.parametrize("where", ["desk", "served"])
def test_search_finds_an_option_and_goes_there(where: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(where)
    search(page, "max_grad_norm")
    expect(page.locator('h3[id="optimizer.max_grad_norm"]')).to_be_in_viewport()
    assert page.url.partition("?")[0].endswith("reference/options.html")


def test_on_a_phone_the_menu_leads_to_a_tutorial_and_nothing_is_cut_off(
    phone: Page, site: Path
) -> None:
    phone.locator("label.md-header__button[for=__drawer]").click()
    phone.locator("label.md-nav__title").filter(has_text="Start").click()
    phone.locator(".md-nav--primary a.md-nav__link").filter(has_text="Tutorials").click()
    expect(phone.get_by_role("heading", level=1, name="Your own data")).to_be_visible()
    for page in (
        "index",
        "strategies",
        "reference/options",
        "reference/api/core.steps",
        "architecture",
        "troubleshooting",
        "performance",
    ):
        phone.goto((site / f"{page}.html").as_uri())
        assert phone.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), page


def test_figures_follow_the_colours_of_the_page(phone: Page, desk: Page) -> None:
    figures = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8").count("](figures/")
    for page, dark in ((phone, True), (desk, False)):
        page.goto(page.url.replace("index.html", "strategies.html"))
        colour = page.locator(".figure text").first.evaluate("each => getComputedStyle(each).fill")
        brightness = sum(map(int, re.findall(r"\d+", colour)[:3]))
        assert (brightness > 384) == dark
        assert page.locator(".figure svg").count() == figures
