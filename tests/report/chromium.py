"""A page in headless Chromium for tests, driven over the browser's own pipe: no driver, no package, no port."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]

#: None where there is no browser.
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """One browser with one page. `requests`: every URL that the page asked for; `complaints`: exceptions, console
    errors and violations of the policy."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="kdtr-chromium-")
        # the browser reads from 3 and writes to 4: the shell makes them of descriptors that are neither
        (from_us, self._to), (self._from, to_us) = (map(_high, os.pipe()) for _ in range(2))
        shell = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us} {from_us}<&- {to_us}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, PROGRAM, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(from_us, to_us),
            start_new_session=True,
        )
        os.close(from_us)
        os.close(to_us)
        self._number, self._buffer, self._session = 0, b"", None
        self.events: list[dict] = []
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            page = next(t for t in targets if t["type"] == "page")
            attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def call(self, method: str, timeout: float = 60, **params: object) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        end = time.monotonic() + timeout
        while True:
            answer = self._read(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _read(self, end: float) -> dict:
        while b"\0" not in self._buffer:
            left = end - time.monotonic()
            assert left > 0, "the browser does not answer"
            if select.select([self._from], [], [], left)[0]:
                chunk = os.read(self._from, 1 << 20)
                assert chunk, "the browser has gone"
                self._buffer += chunk
        one, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(one)

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False, scripts: bool = True) -> float:
        """Open a file; the seconds until all is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        begun = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read(begun + 60))
        if scripts:  # drawn and shown: two frames later
            self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        return time.monotonic() - begun

    def run(self, script: str) -> object:
        """The value of an expression on the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            named = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **named)

    @property
    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    @property
    def complaints(self) -> list[str]:
        found = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(params["exceptionDetails"])[:600])
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    found.append(params["entry"]["text"])
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(params["args"])[:600])
        return found

    def picture(self, path: Path, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        for descriptor in (self._to, self._from):
            os.close(descriptor)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)


def _high(descriptor: int) -> int:
    """The same, numbered 10 or above."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high
