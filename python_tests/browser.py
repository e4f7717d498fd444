"""A real browser for the tests of the live page, driven over a pipe by the DevTools protocol."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 60


class Browser:
    """One tab. Commands go out on the browser's file 3, answers come in from its file 4, each ended by a zero byte."""

    def __init__(self, profile: Path):
        from_us, self._out = os.pipe()
        self._in, to_us = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        command = [BROWSER, *flags, f"--user-data-dir={profile}", "about:blank"]
        # dup2 gives the two files the numbers that the browser expects.
        script = f'exec 3<&{from_us} 4>&{to_us}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "browser", *command], pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL
        )
        os.close(from_us)
        os.close(to_us)
        self._numbers, self._rest, self.errors = itertools.count(1), b"", []
        self._session = None
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._note(answer)

    def _message(self) -> dict:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 2**20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        """Errors of scripts, refusals of the content security policy, and the like."""
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"].get("exception", parameters)["description"])
        if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])

    def open(self, url: str, width: int, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")  # the last page may still ask a server that is gone
        self.wait("location.href === 'about:blank'")
        self.errors.clear()
        self.call("Page.navigate", url=url)

    def value(self, script: str) -> object:
        """Of an expression in the page; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> object:
        """Until the expression is true."""
        end = time.monotonic() + SECONDS
        while not (found := self.value(script)):
            assert time.monotonic() < end, f"{script} stays {found!r}; errors: {self.errors}"
            time.sleep(0.02)
        return found

    def picture(self, path: Path, whole: bool = True) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self.process.terminate()
        self.process.wait(SECONDS)
