"""The page at / in a real browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from qwenrt.runtime import LLM

from .conftest import Server

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="Chromium is not installed (Debian: apt-get install chromium chromium-driver)",
)


@pytest.fixture(scope="module")
def server(demo_engine: Path) -> Iterator[Server]:
    server = Server(LLM(demo_engine, num_kv_blocks=512), api_keys=["secret"])
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    # What the page loads from elsewhere shows as an error: no name but the server's address is found.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


class Page:
    """The page, as a person uses it."""

    def __init__(self, browser: webdriver.Chrome, server: Server) -> None:
        self.browser = browser
        self._wait = WebDriverWait(browser, 60, poll_frequency=0.05)
        browser.get(server.url)

    def find(self, css: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[str]:
        """The texts of all elements, those that are folded away too."""
        return [
            element.get_attribute("textContent") or "" for element in self.browser.find_elements(By.CSS_SELECTOR, css)
        ]

    def until(self, condition: Any) -> None:
        self._wait.until(lambda _: condition())

    def set(self, identifier: str, value: str) -> None:
        field = self.find(f"#{identifier}")
        field.clear()
        field.send_keys(value + Keys.TAB)

    def say(self, text: str) -> None:
        """Send a message and wait for the end of the answer."""
        before = len(self.all(".turn.assistant .note"))
        self.find("#message").send_keys(text.replace("\n", Keys.SHIFT + Keys.ENTER + Keys.NULL) + Keys.ENTER)
        self.until(lambda: len(self.all(".turn.assistant .note")) > before)


@pytest.fixture
def page(browser: webdriver.Chrome, server: Server) -> Iterator[Page]:
    page = Page(browser, server)
    page.until(lambda: "not connected" in page.find("#model").text)
    page.set("key", "secret")
    page.until(lambda: page.find("#model").text == "demo")
    page.set("temperature", "0")
    yield page
    severe = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [message for message in severe if "the server responded with a status of 4" not in message] == []


def test_a_chat_with_its_thinking_folded_and_remembered(page: Page, server: Server) -> None:
    page.say("27+58=?")
    assert page.all(".turn.user .text") == ["27+58=?"]
    assert page.all(".turn.assistant .text") == ["85"]
    assert page.all(".turn.assistant .thinking") == ["7+8+0=15\n2+5+1=8"]
    assert page.find("details").get_attribute("open") is None
    assert "24 tokens" in page.find(".turn.assistant .note").text
    page.find("#thinking").click()
    page.say("Copy:\n<b>")
    assert page.all(".turn.assistant .text")[1] == "<b>"
    assert len(page.all("details")) == 1
    page.find("#new").click()
    assert page.all(".turn") == []


def test_an_error_is_shown_and_the_chat_goes_on(page: Page) -> None:
    page.set("top_p", "7")
    page.find("#message").send_keys("27+58=?" + Keys.ENTER)
    page.until(lambda: page.all(".error"))
    assert "top_p is 7" in page.find(".error").text
    page.set("top_p", "1")
    page.say("27+58=?")
    assert page.all(".turn.assistant .text") == ["85"]


class Slow:
    """A backend whose steps take long enough for a person to act."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def execute(self, inputs: Any) -> Any:
        time.sleep(0.3)
        return self.real.execute(inputs)


def test_an_answer_can_be_stopped(page: Page, server: Server) -> None:
    engine = server.llm.engine
    engine.backend = Slow(engine.backend)
    try:
        page.find("#message").send_keys("27+58=?" + Keys.ENTER)
        page.until(lambda: page.find("#send").text == "Stop")
        page.until(lambda: page.all(".thinking"))
        page.find("#send").click()
        page.until(lambda: page.find("#send").text == "Send")
    finally:
        engine.backend = engine.backend.real
    server.until(lambda: server.is_idle)
    assert page.find(".error").text == "Stopped."
    assert page.all(".turn.assistant .text") == []


def test_the_servers_figures_are_shown(page: Page, server: Server) -> None:
    page.until(lambda: page.find("#running").text == "0")
    assert page.find("#cache").text == "0.0 %"
    page.until(lambda: "tokens/s" in page.find("#speed").text)
