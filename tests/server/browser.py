"""A headless Chromium, driven over WebDriver's HTTP by chromedriver, with a profile of its own that is thrown away."""

import base64
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
ENTER, ESCAPE, RIGHT, END = "\ue007", "\ue00c", "\ue014", "\ue010"  # WebDriver's keys
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name for a reference


class Browser:
    """One window. Elements are named by CSS selectors."""

    def __init__(self, http: httpx2.Client, session: str) -> None:
        self._http = http
        self._path = f"/session/{session}"

    def send(self, path: str, **body: Any) -> Any:
        return _value(self._http.post(f"{self._path}/{path}", json=body))

    def open(self, url: str) -> None:
        self.send("url", url=url)

    def run(self, script: str) -> Any:
        """What a function body returns, in the page."""
        return self.send("execute/sync", script=script, args=[])

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector({selector!r})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        self.send(f"element/{self._element(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Keys to an element, which gets the focus."""
        self.send(f"element/{self._element(selector)}/value", text=text)

    def wait(self, holds: Callable[[], Any], what: str, wait_s: float = 60.0) -> Any:
        deadline = time.monotonic() + wait_s
        while not (found := holds()):
            assert time.monotonic() < deadline, f"waited {wait_s} s for {what}; the page says {self.text('body')!r}"
            time.sleep(0.02)
        return found

    def errors(self) -> list[str]:
        """What the page logged as errors since the last call, refusals by its Content-Security-Policy included."""
        return [entry["message"] for entry in self.send("se/log", type="browser") if entry["level"] == "SEVERE"]

    def prefer(self, scheme: str) -> None:
        """dark or light."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def screenshot(self) -> bytes:
        return base64.b64decode(_value(self._http.get(f"{self._path}/screenshot")))

    def _element(self, selector: str) -> str:
        return self.send("element", using="css selector", value=selector)[ELEMENT]


@contextmanager
def chromium(width: int = 1280, height: int = 860) -> Iterator[Browser]:
    assert CHROMIUM is not None and DRIVER is not None
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            with httpx2.Client(base_url=f"http://127.0.0.1:{_port(driver)}", timeout=90) as http:
                flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
                wanted = {"goog:chromeOptions": {"binary": CHROMIUM, "args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
                session = _value(http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}))["sessionId"]
                try:
                    yield Browser(http, session)
                finally:
                    http.delete(f"/session/{session}")
        finally:
            driver.terminate()
            driver.wait(30)
            assert driver.stdout is not None
            driver.stdout.close()


def _port(driver: "subprocess.Popen[str]") -> int:
    assert driver.stdout is not None
    for line in driver.stdout:
        if "started successfully on port " in line:
            return int(line.rstrip().rstrip(".").rpartition(" ")[2])
    raise AssertionError("chromedriver did not start")


def _value(response: httpx2.Response) -> Any:
    value = response.json()["value"]
    assert response.status_code == 200, value
    return value
