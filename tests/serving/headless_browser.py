"""Chromium without a window, told what to do through a pipe in its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
MOST_SECONDS = 30
"""After so long a condition does not hold."""


class Tab:
    """A page that is open.

    Args:
        told, heard: the pipe's ends.
    """

    def __init__(self, told: Any, heard: Any) -> None:
        self._told, self._heard, self._number = told, heard, 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a command of the protocol returns."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._told.write(json.dumps(message).encode() + b"\0")
        self._told.flush()
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        found: dict[str, Any] = answer["result"]
        return found

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (one := self._heard.read(1)) != b"\0":
            assert one, "the browser has ended"
            text += one
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; of a promise, what it becomes."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait in the page until an expression holds."""
        waits = (
            f"(async () => {{ while (!({condition})) await new Promise((ok) => setTimeout(ok, 10)); return true; }})()"
        )
        assert self.run(waits)

    def write(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code, text = KEYS[key]
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **told, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def picture(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    @property
    def complaints(self) -> list[str]:
        """What the console says of errors: scripts that fail, and what the page's policy does not let it load."""
        self.run("1")
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    @property
    def loaded(self) -> set[str]:
        """Every address that was asked for."""
        asked = (one["params"] for one in self.events if one.get("method") == "Network.requestWillBeSent")
        return {params["request"]["url"] for params in asked}


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A tab of a browser whose profile is in a folder."""
    assert PROGRAM is not None
    commands_out, commands_in = os.pipe()
    answers_out, answers_in = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    flags += ["--no-first-run", f"--user-data-dir={folder}"]
    # The browser reads descriptor 3 and writes to 4.
    start = f'exec "$0" "$@" 3<&{commands_out} 4>&{answers_in}'
    process = subprocess.Popen(
        ["bash", "-c", start, PROGRAM, *flags],
        pass_fds=(commands_out, answers_in),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_out)
    os.close(answers_in)
    try:
        with os.fdopen(commands_in, "wb") as told, os.fdopen(answers_out, "rb") as heard:
            yield Tab(told, heard)
    finally:
        process.kill()
        process.wait()
