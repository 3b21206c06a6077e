# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Opens pages in a real browser: chromium without a window, driven through its debugging pipe."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Optional

WIDTH, HEIGHT = 1280, 900
"""Size of a page in pixels, unless a test changes it."""
TIMEOUT_S = 120
"""Maximum time for one answer, the start of the browser included."""
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # It does not start as root; the pages are the project's own.
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--force-prefers-reduced-motion",  # Scrolling ends at once.
)


def find_browser() -> Optional[str]:
    """Return the path of chromium (or of Chrome), or None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """A browser process; see https://chromedevtools.github.io/devtools-protocol for its commands.

    Args:
        executable: Path of the browser.
        folder: Folder for its profile and log.
    """

    def __init__(self, executable: str, folder: Path) -> None:
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # The browser reads commands from descriptor 3 and answers to 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (command_read, answer_write)]
        redirected = f'exec "$0" "$@" 3<&{ends[0]} 4>&{ends[1]}'
        profile = f"--user-data-dir={folder / 'profile'}"
        self.log = folder / "chromium.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", redirected, executable, *FLAGS, profile],
                pass_fds=ends,
                stdout=log,
                stderr=log,
            )
        for end in (command_read, answer_write, *ends):
            os.close(end)
        self._received = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Run a command and return its result; events that arrive before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> None:
        """Wait for an event of a page."""
        while not any(e.get("method") == method and e["sessionId"] == session for e in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            assert part, f"the browser does not answer: {self.log.read_text()[-2000:]}"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(TIMEOUT_S)
        os.close(self._read)
        os.close(self._write)


class BrowserPage:
    """A page in a tab of its own.

    Args:
        browser: The browser.
        address: Address of the page.
        width: Width of the window in pixels.
        runs_script: Whether the browser runs the page's scripts.
    """

    def __init__(
        self, browser: Browser, address: str, width: int = WIDTH, runs_script: bool = True
    ) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setScriptExecutionDisabled", value=not runs_script)
        self.resize(width)
        self._call("Page.navigate", url=address)
        browser.wait_for("Page.loadEventFired", self._session)
        if runs_script:
            self.draw()

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def errors(self) -> list[str]:
        """Return the exceptions of the page's scripts, and what the browser refused."""
        events = [e for e in self._browser.events if e.get("sessionId") == self._session]
        thrown = [e["params"] for e in events if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"]["entry"] for e in events if e["method"] == "Log.entryAdded"]
        return [*map(str, thrown), *(entry["text"] for entry in logged)]

    def resize(self, width: int) -> None:
        """Set the width of the window."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=HEIGHT,
            deviceScaleFactor=1,
            mobile=False,
        )

    def get(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which JSON can express."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def draw(self) -> None:
        """Wait until everything that is due has been drawn."""
        self.get("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def box(self, element: str) -> tuple[float, float, float, float]:
        """Bring an element into view and return its left edge, top, width and height in pixels."""
        return tuple(
            self.get(
                f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}});"
                "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
            )
        )

    def mouse(self, kind: str, x: float, y: float, **facts: Any) -> None:
        """Send an event of the mouse at a place of the window, such as ``mouseMoved``."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **facts)

    def click(self, element: str, modifiers: int = 0, count: int = 1) -> None:
        """Click the middle of an element."""
        left, top, width, height = self.box(element)
        self.click_at(left + width / 2, top + height / 2, modifiers=modifiers, count=count)

    def click_at(self, x: float, y: float, modifiers: int = 0, count: int = 1) -> None:
        """Click a place of the window, several times in a row with ``count``."""
        facts = {"button": "left", "modifiers": modifiers}
        for number in range(1, count + 1):
            self.mouse("mousePressed", x, y, clickCount=number, buttons=1, **facts)
            self.mouse("mouseReleased", x, y, clickCount=number, **facts)
        self.draw()

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key in the element that has the focus."""
        text = {} if modifiers or len(key) > 1 else {"text": key}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=modifiers, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, modifiers=modifiers)
        self.draw()
