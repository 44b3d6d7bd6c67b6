"""A real browser for tests: Chromium, driven by Playwright. Import the fixture `browser`."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.tools import chromium, need

if TYPE_CHECKING:
    # Imported where it is used: a GPU's environment may lack it.
    from playwright.sync_api import Browser, Page

SECONDS = 60_000  # a busy machine answers late; nothing here waits longer than it has to


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from playwright.sync_api import expect, sync_playwright

    need("chromium")
    expect.set_options(timeout=SECONDS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield running
        running.close()


def open_page(
    browser: "Browser",
    url: str,
    is_allowed: Callable[[str], bool] = lambda complaint: False,
    *,
    within: str = "",
    **looks: object,
) -> "Iterator[Page]":
    """A page; whatever the browser complains of fails the test.

    So does what it loads from elsewhere than `within`.
    """
    page = browser.new_context(**looks).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(SECONDS)
    complaints: list[str] = []
    page.on("pageerror", lambda problem: complaints.append(str(problem)))
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith((within, "data:")) else complaints.append(request.url)
        ),
    )
    page.goto(url)
    yield page
    page.context.close()
    assert [complaint for complaint in complaints if not is_allowed(complaint)] == []
