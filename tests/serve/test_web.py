"""The page of `lmforge serve`, used in a real browser by clicking and typing."""

import itertools
import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.serve.conftest import Server
from tests.support.browser import open_page


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The page of a server that asks for no key; whatever the browser complains of fails the
    test.
    """
    yield from opened(browser, server)


def opened(browser: Browser, server: Server, allowed: str = "", **looks: object) -> Iterator[Page]:
    yield from open_page(
        browser, server.url, lambda complaint: bool(allowed) and allowed in complaint, **looks
    )


def say(page: Page, model: str, text: str) -> None:
    page.get_by_label("Model", exact=True).select_option(model)
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def last_answer(page: Page) -> str:
    return page.locator("article.assistant .body").last.inner_text()


def done(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_an_answer_is_shown_as_text_whatever_it_contains(page: Page) -> None:
    say(page, "hello", "What is <b>this</b>?")
    expect(page.get_by_text("Hey <s>", exact=True).last).to_be_visible()
    done(page)
    assert page.locator("article.user .body").inner_text() == "What is <b>this</b>?"
    assert page.locator("#log s, #log b").count() == 0
    expect(page.locator(".note")).to_have_text(re.compile(r"^8 tokens( · [\d.]+ tokens/s)?$"))
    page.get_by_label("Message").press_sequentially("More")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant .tools").nth(1)).to_be_visible()
    assert page.locator("article").count() == 4


def test_the_stop_button_and_escape_stop_an_answer_and_free_its_slot(
    page: Page, server: Server
) -> None:
    say(page, "endless", "Go on")
    expect(page.locator("article.assistant .body")).to_contain_text("ababab")
    page.get_by_role("button", name="Stop").click()
    done(page)
    expect(page.locator(".note")).to_have_text("stopped")
    assert server.is_idle()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("article.assistant .body")).to_contain_text("ababab")
    page.keyboard.press("Escape")
    done(page)
    assert page.locator("article").count() == 2
    assert server.is_idle()


def test_settings_reach_the_model_and_regenerate_requests_again(page: Page) -> None:
    if page.get_by_role("button", name="Settings").get_attribute("aria-expanded") == "false":
        page.get_by_role("button", name="Settings").click()
    page.get_by_label("Maximum tokens").fill("9")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("System prompt").fill("Be brief")
    say(page, "noise", "Hi")
    done(page)
    expect(page.locator(".note")).to_have_text(
        re.compile(r"^9 tokens · (.* · )?stopped at the maximum$")
    )
    first = last_answer(page)
    page.get_by_role("button", name="Regenerate").click()
    done(page)
    assert last_answer(page) == first
    page.get_by_label("Seed").fill("6")
    page.get_by_role("button", name="Regenerate").click()
    done(page)
    assert last_answer(page) != first
    page.get_by_label("Temperature").fill("0")
    expect(page.locator("#temperature-is")).to_have_text("0.00")
    greedy = set()
    for seed in ("5", "6"):
        page.get_by_label("Seed").fill(seed)
        page.get_by_role("button", name="Regenerate").click()
        done(page)
        greedy.add(last_answer(page))
    assert len(greedy) == 1


def test_a_checkpoint_is_chosen_and_continues_a_text(page: Page) -> None:
    options = [
        "hello",
        "endless",
        "noise",
        "plain",
        "tiny, newest",
        "tiny, step 6",
        "tiny, step 4",
        "tiny, step 2",
    ]
    # Once the server has named them.
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(options)
    longest = page.get_by_label("Maximum tokens")
    expect(longest).to_have_attribute("placeholder", "as many as fit")
    page.get_by_label("continue the text").check()
    expect(longest).to_have_attribute("placeholder", "128")
    page.get_by_label("Maximum tokens").fill("3")
    page.get_by_label("Temperature").fill("0")
    expect(page.get_by_label("System prompt")).to_be_hidden()
    say(page, "endless", "a")
    done(page)
    assert last_answer(page) == "bab"
    page.get_by_label("Model", exact=True).select_option(label="tiny, step 4")
    page.get_by_role("button", name="Regenerate").click()
    done(page)
    expect(page.locator(".note")).to_contain_text("3 tokens")


def test_a_new_chat_clears_the_conversation_and_stops_the_answer(
    page: Page, server: Server
) -> None:
    say(page, "endless", "Go on")
    expect(page.locator("article.assistant .body")).to_contain_text("ab")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_text("No messages yet")).to_be_visible()
    assert page.locator("article").count() == 0
    assert server.is_idle()
    done(page)


def test_a_speed_is_shown_only_where_it_was_measured(page: Page) -> None:
    """An answer that comes all at once has none, however many tokens it has."""
    chunks = [
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
        for _ in range(40)
    ]
    chunks += [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 40}},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    say(page, "hello", "Hi")
    done(page)
    expect(page.locator(".note")).to_have_text("40 tokens")
    assert page.evaluate("[speed(4, 9000), speed(65, 99), speed(65, 2000)]") == [
        "",
        "",
        "32.0 tokens/s",
    ]


def test_a_reload_keeps_the_chat_and_a_new_chat_does_not(page: Page) -> None:
    if page.get_by_role("button", name="Settings").get_attribute("aria-expanded") == "false":
        page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("System prompt").fill("Be <b>brief</b>")
    say(page, "hello", "<img src=x onerror=alert(1)>")
    done(page)
    say(page, "endless", "Go on")
    expect(page.locator("article.assistant .body").last).to_contain_text("abab")
    page.get_by_label("Message").fill("Not sent yet")
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    expect(page.get_by_label("Message")).to_have_value("Not sent yet")
    assert page.locator("article.user .body").all_inner_texts() == [
        "<img src=x onerror=alert(1)>",
        "Go on",
    ]
    assert page.locator("article.assistant .body").first.inner_text() == "Hey <s>"
    assert page.locator("#log img, #log s").count() == 0
    assert "abab" in last_answer(page)
    expect(page.locator(".note").last).to_have_text("stopped")
    expect(page.get_by_label("System prompt")).to_have_value("Be <b>brief</b>")
    expect(page.locator("#temperature-is")).to_have_text("0.50")
    expect(page.get_by_label("Model", exact=True)).to_have_value("endless")
    done(page)
    page.get_by_role("button", name="New chat").click()
    page.reload()
    expect(page.get_by_text("No messages yet")).to_be_visible()
    assert page.locator("article").count() == 0


def test_what_is_kept_and_damaged_is_ignored(page: Page) -> None:
    for kept in (
        "",
        "{",
        "null",
        "[1]",
        '{"turns": 3}',
        '{"turns": [null, 3, {"role": "x"}], "fields": [{}]}',
    ):
        page.evaluate("kept => { sessionStorage.setItem('chat', kept); restore(); draw(); }", kept)
    say(page, "hello", "Hi")
    done(page)
    assert last_answer(page) == "Hey <s>"
    assert page.locator("article").count() == 2


def test_an_error_is_shown_in_place_of_the_answer(browser: Browser, server: Server) -> None:
    for page in opened(browser, server, allowed="status of 400"):
        say(page, "plain", "Hi")
        expect(page.locator("article").get_by_role("alert")).to_contain_text(
            "plain: the tokenizer has no chat template"
        )
        page.get_by_label("Model", exact=True).select_option("hello")
        page.get_by_role("button", name="Try again").click()
        done(page)
        assert last_answer(page) == "Hey <s>"


def test_the_page_asks_for_a_key_where_one_is_needed(
    browser: Browser, narrow_server: Server
) -> None:
    for page in opened(browser, narrow_server, allowed="status of 401"):
        expect(page.get_by_text("This server needs an API key")).to_be_visible()
        page.get_by_label("API key").fill("open")
        page.keyboard.press("Enter")
        expect(page.get_by_text("not the API key of this server")).to_be_visible()
        page.get_by_label("API key").fill("sesame")
        page.keyboard.press("Tab")
        expect(page.get_by_label("Model", exact=True).locator("option")).to_have_count(2)
        say(page, "hello", "Hi")
        done(page)
        assert last_answer(page) == "Hey <s>"


def test_code_is_formatted_and_nothing_is_parsed_as_html(page: Page) -> None:
    text = (
        "See `a < b` and **c**:\n\n```html\n<img src=x"
        " onerror=alert(1)>\n```\n<script>alert(2)</script>\n```\nopen"
    )
    page.evaluate(
        "text => { turns = [{role: 'assistant', content: text, note: '', error: ''}]; draw(); }",
        text,
    )
    assert page.locator("#log pre code").all_inner_texts() == [
        "<img src=x onerror=alert(1)>",
        "open",
    ]
    assert page.locator("#log .body > code").all_inner_texts() == ["a < b"]
    assert page.locator("#log strong").all_inner_texts() == ["c"]
    assert page.locator("#log img, #log script").count() == 0
    expect(page.locator("#log")).to_contain_text("<script>alert(2)</script>")


@pytest.mark.parametrize("width", [390, 1440])
def test_the_header_is_one_row_however_long_the_names_are(
    browser: Browser, server: Server, width: int
) -> None:
    for page in opened(browser, server, viewport={"width": width, "height": 800}):
        page.get_by_label("Model", exact=True).select_option("hello")
        page.evaluate(
            "at('model').add(new Option('a-run-with-a-long-name, step 100,000 '.repeat(4), 'long'))"
        )
        page.get_by_label("Model", exact=True).select_option("long")
        boxes = [
            box
            for name in ("#model", "#fresh", "#more")
            if (box := page.locator(name).bounding_box())
        ]
        assert len(boxes) == 3
        assert max(box["height"] for box in boxes) < 1.2 * min(box["height"] for box in boxes), (
            "one of them has two lines"
        )
        for left, right in itertools.pairwise(boxes):
            assert left["x"] + left["width"] <= right["x"]
        assert boxes[-1]["x"] + boxes[-1]["width"] <= width
        assert boxes[0]["width"] >= 80
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_it_fits_a_phone_and_follows_light_and_dark(
    browser: Browser, server: Server, scheme: str
) -> None:
    for page in opened(
        browser, server, viewport={"width": 360, "height": 640}, color_scheme=scheme
    ):
        say(page, "hello", "word" * 60)
        done(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("Temperature")).to_be_visible()
        expect(page.get_by_label("Message")).to_be_in_viewport()
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) > 384) == (scheme == "light")


def test_the_content_security_policy_allows_nothing_from_elsewhere(
    page: Page, server: Server
) -> None:
    answer = page.request.get(server.url)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", answer.text())
