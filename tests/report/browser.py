"""Headless Chromium over its DevTools protocol, by a pipe: no package is needed, and no port is open."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PATIENCE = 60.0  # seconds for an answer, on a machine that is busy


class Browser:
    """One page. ``errors``: what it wrote on the console as one; ``requests``: addresses that it asked for.

    ``context``: where scripts of the newest document run, which is that of the last frame.
    """

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        assert CHROMIUM is not None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.context: int | None = None
        self._number, self._buffer, self._loaded = 0, b"", False
        self._home = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        arguments = [CHROMIUM, "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu"]
        arguments += ["--hide-scrollbars", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"]
        arguments += ["--disable-features=IsolateSandboxedIframes"]  # frames are heard as the page is
        arguments += ["--disable-background-networking", f"--user-data-dir={self._home.name}", "about:blank"]
        # Chromium reads from 3 and writes to 4, whatever the numbers of our pipe are.
        script = f'exec 200<&{to_read} 201>&{to_write}; exec "$@" 3<&200 4>&201 200<&- 201>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._session: str | None = None
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.look(width, height, dark)

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """The window's size, and the colours that the reader prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call(
            "Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}]
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(deadline - time.monotonic(), 0))[0]:
                raise TimeoutError(f"expected an answer of Chromium within {_PATIENCE:.0f} s, got none")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise RuntimeError("expected an answer of Chromium, but it ended")
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, of = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = of["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and of["type"] in ("error", "warning", "assert"):
            self.errors.append(str(of["args"]))
        elif method == "Log.entryAdded" and of["entry"]["level"] in ("error", "warning"):
            self.errors.append(of["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(of["request"]["url"])
        elif method == "Runtime.executionContextCreated":
            self.context = of["context"]["id"]
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, page: Path | str) -> None:
        """Until the page says that it is ready."""
        self._loaded = False
        url = page.as_uri() if isinstance(page, Path) else page
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def run(self, script: str, context: int | None = None) -> Any:
        """The value of an expression, awaited; in the page, or in another context."""
        where = {} if context is None else {"contextId": context}
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, **where)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = _PATIENCE, context: int | None = None) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(script, context):
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected {script} within {seconds:.0f} s; errors: {self.errors}")
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("Moved", x, y)
        for kind in ("Pressed", "Released"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, key: str, shift: bool = False) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            of = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
            self.call("Input.dispatchKeyEvent", type=kind, **of, **more)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({selector!r}).innerText"))

    def cell(self, row: float, column: float, rows: int, columns: int) -> tuple[float, float]:
        """Find the place of a cell of the map while all are seen."""
        left, top, width, height = self.run(
            "(() => { document.querySelector('#heat').scrollIntoView({block: 'center'});"
            "const box = document.querySelector('#heat').getBoundingClientRect();"
            "return [box.left, box.top, box.width, box.height] })()"
        )
        left, top, width, height = left + 216, top + 78, width - 217, height - 78 - 24  # inside
        return left + (column + 0.5) / columns * width, top + (row + 0.5) / rows * height

    def colours(self) -> str:
        """The pixels of the cells, to be compared."""
        return str(self.run("document.querySelector('#heat-cells').toDataURL()"))

    def picture(self, path: Path, whole: bool = True, clip: dict[str, float] | None = None) -> None:
        """Take a picture as PNG."""
        more: dict[str, Any] = {"clip": {**clip, "scale": 1}} if clip else {}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more)["data"]
        path.write_bytes(base64.b64decode(data))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        try:
            self.call("Browser.close")
        except (RuntimeError, TimeoutError, OSError):
            self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._home.cleanup()
