"""The page in a real Chromium: a chat, the pool's cells as they change, the key, the keyboard."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.engine.output import StreamPiece
from atoll.engine.scheduler import Scheduler
from tests.server.browser import CHROMIUM, DRIVER, END, ENTER, ESCAPE, RIGHT, Browser, chromium
from tests.server.running import Running, running_server

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs Chromium and chromedriver")]

SLOW_STEP_S = 0.02  # the demo model alone would have answered before a browser has looked
QUESTIONS = (
    "Ivan buys 3 notebooks at $4 each and 2 pens at $2 each. He pays with $20. How much change does he get?",
    "A chess club has 12 members who pay $15 a month. How many dollars does the club get in 4 months?",
)
# Notes the kinds of the legend whose colours are painted, several times a second.
WATCH = """
const canvas = document.getElementById('cells');
const colours = new Map([...document.querySelectorAll('#legend .swatch')].map((s) => [getComputedStyle(s).backgroundColor, s.dataset.kind]));
window.painted = () => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const kinds = {};
  for (let i = 0; i < data.length; i += 4) {
    const kind = data[i + 3] === 255 ? colours.get(`rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`) : undefined;
    if (kind !== undefined) kinds[kind] = (kinds[kind] ?? 0) + 1;
  }
  return kinds;
};
window.seen = new Set();
setInterval(() => Object.keys(window.painted()).forEach((kind) => window.seen.add(kind)), 50);
"""
NUM_ANSWERED = "return document.querySelectorAll('.turn.assistant:not(.live) .note').length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@dataclass
class Pace:
    """The engine rests while this holds, and answers who asks after its pool: what is there to be seen stays until a browser, however slow, has seen it."""

    rests: Callable[[Scheduler], bool] = lambda _: False


@contextmanager
def slow_server() -> Iterator[tuple[Running, Pace]]:
    with running_server() as server:
        step, pace = server.engine.step, Pace()

        def slow_step() -> list[StreamPiece]:
            time.sleep(SLOW_STEP_S)
            return [] if pace.rests(server.engine.scheduler) else step()

        server.engine.step = slow_step  # type: ignore[method-assign]
        try:
            yield server, pace
        finally:
            pace.rests = lambda _: False


def open_page(browser: Browser, server: Running) -> None:
    browser.open("about:blank")
    browser.errors()  # those of the page before, whose server has ended
    browser.open(server.url)
    browser.wait(lambda: browser.text("#status") == "ready", "the first view of the pool")
    browser.run(WATCH)
    browser.run("window.seen.clear()")


def num_shown(browser: Browser, kind: str) -> int:
    """Pages of a kind, as the legend counts them."""
    return int(browser.text(f'#legend li:has([data-kind="{kind}"]) b').replace(",", ""))


def ask(browser: Browser, question: str) -> None:
    browser.type("#prompt", question + ENTER)


def test_an_answer_and_its_pages(browser: Browser) -> None:
    # Past the 64 tokens at which a state is kept.
    question = " ".join(QUESTIONS)
    with slow_server() as (server, _):
        open_page(browser, server)
        assert browser.text("#model") == "demo"
        assert set(browser.run("return window.painted()")) == {"null", "free"}
        ask(browser, question)
        browser.wait(lambda: browser.run("return window.seen.has('kv')"), "cells of a running request")
        browser.wait(lambda: browser.run(NUM_ANSWERED) == 1, "the answer")
        browser.wait(lambda: browser.text("#num-running") == "0" and num_shown(browser, "kv") == 0, "the view after the request")
        assert browser.text(".turn.user p") == question
        expected = server.post("/v1/chat/completions", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=256).json()
        assert browser.text(".turn.assistant p").strip() == expected["choices"][0]["message"]["content"].strip()

        def shows(view: dict) -> bool:
            return all(num_shown(browser, kind) == count for kind, count in view["counts"].items())

        view = server.http.get("/pool").json()
        browser.wait(lambda: shows(view), "the last view")
        painted = browser.run("return window.painted()")
        assert set(painted) == {"null", "free", "indexed", "image"}
        # A cell of each page, all of one size: areas are as the counts.
        for kind, pixels in painted.items():
            assert pixels == view["counts"][kind] * painted["null"]
        assert browser.text("#hit-rate") == f"{100 * view['num_hits'] / view['num_queries']:.0f} %" != "0 %"
        assert browser.errors() == []


def test_stop_and_clear(browser: Browser) -> None:
    with slow_server() as (server, pace):
        pace.rests = lambda scheduler: any(len(request.output_token_ids) > 8 for request in scheduler.running)
        open_page(browser, server)
        for stop in (lambda: browser.click("#stop"), lambda: browser.type("#prompt", ESCAPE)):
            ask(browser, QUESTIONS[0])
            browser.wait(lambda: browser.text(".turn.live p"), "the answer's beginning")
            stop()
            browser.wait(lambda: browser.text(".turn:last-child .note") == "Stopped.", "the end")
            browser.wait(lambda: not server.engine.has_work, "the abort")
            browser.click("#clear")
            assert browser.run("return document.querySelectorAll('.turn').length") == 0 and "try one of these" in browser.text("#turns")
        assert server.engine.scheduler.cache.num_available == server.engine.scheduler.ledger.num_usable
        assert browser.errors() == []


def test_control_inline_code_is_refused_and_logged(browser: Browser, server: Running) -> None:
    open_page(browser, server)
    browser.run("const script = document.createElement('script'); script.textContent = 'window.ran = true'; document.body.append(script)")
    assert browser.run("return window.ran === undefined")
    assert any("Content Security Policy" in error for error in browser.errors())


def test_a_key_is_asked_for_and_kept(browser: Browser) -> None:
    with running_server(api_key="sesame") as server:
        browser.open(server.url)
        is_asked = "return document.getElementById('key-dialog').open"
        browser.wait(lambda: browser.run(is_asked), "the question for the key")
        assert browser.text("#pool-size") == ""
        browser.type("#key", "abracadabra" + ENTER)
        browser.wait(lambda: "wrong" in browser.text("#key-fault"), "the second question")
        browser.type("#key", "sesame" + ENTER)
        browser.wait(lambda: browser.text("#status") == "ready" and browser.text("#model") == "demo", "the pool")
        browser.open(server.url)
        browser.wait(lambda: browser.text("#status") == "ready", "the pool, without another question")
        assert not browser.run(is_asked)
        browser.errors()  # the refusals


def test_cells_by_keyboard_and_what_a_fault_looks_like(browser: Browser) -> None:
    with running_server() as server:
        open_page(browser, server)
        for key, said in ((RIGHT, "Page 1, free"), (END, "Page 599, free"), (RIGHT, "Page 599, free")):
            browser.type("#cells", key)
            assert browser.text("#cell-name").startswith(said)
        browser.type("#max-tokens", "x")
        ask(browser, "word " * 600)
        browser.wait(lambda: browser.run(NUM_ANSWERED) == 1, "the refusal")
        assert "max_model_len 512" in browser.text(".turn .note.fault")
    browser.wait(lambda: browser.run("return document.getElementById('status').dataset.state") == "fault", "the server's end")
    assert browser.text("#status") == "the server cannot be reached"
    browser.errors()  # the refusals


def brightness(browser: Browser) -> float:
    """Of the page's ground, 0 to 255."""
    colour = browser.run("return getComputedStyle(document.body).backgroundColor")
    return sum(json.loads(colour.replace("rgb(", "[").replace(")", "]"))) / 3


def test_a_picture_with_several_clients(browser: Browser, request: pytest.FixtureRequest) -> None:
    """Kept where --page-screenshot says."""
    with ThreadPoolExecutor(6) as clients, slow_server() as (server, pace):
        browser.prefer("light")
        open_page(browser, server)
        assert brightness(browser) > 200
        ask(browser, QUESTIONS[0])
        browser.wait(lambda: browser.run(NUM_ANSWERED) == 1, "the first answer")
        pace.rests = lambda scheduler: len(scheduler.running) + len(scheduler.waiting) < 6 or len(scheduler.running) == 6
        others = [clients.submit(server.complete, [40 + i] * (30 * i), max_tokens=90, ignore_eos=True, temperature=1, seed=i) for i in range(1, 7)]
        browser.wait(lambda: browser.text("#num-running") == "6", "the other clients")
        decode = server.link.tokenizer.decode

        def is_nearly_answered(scheduler: Scheduler) -> bool:
            """Of the last that came, the question, while the other six run."""
            return len(scheduler.running) == 7 and "####" in decode(scheduler.running[-1].output_token_ids)

        pace.rests = lambda scheduler: len(scheduler.running) + len(scheduler.waiting) < 7 or is_nearly_answered(scheduler)
        ask(browser, QUESTIONS[1])
        browser.wait(lambda: "####" in browser.text(".turn.live p"), "most of the second answer")
        browser.wait(lambda: browser.text("#num-running") == "7" and num_shown(browser, "kv") > 0, "the pool beside it")
        picture = browser.screenshot()
        pace.rests = lambda _: False
        assert picture.startswith(b"\x89PNG") and 20_000 < len(picture) < 300_000
        target: Path | None = request.config.getoption("--page-screenshot")
        if target is not None:
            target.write_bytes(picture)
        for client in others:
            client.result()
        browser.wait(lambda: browser.run(NUM_ANSWERED) == 2, "the second answer")
        # The cells change their colours with the page.
        browser.prefer("dark")
        browser.run(WATCH)
        browser.wait(lambda: {"free", "indexed", "image"} <= set(browser.run("return window.painted()")), "cells in the dark")
        assert brightness(browser) < 50 and browser.errors() == []
        browser.prefer("light")
