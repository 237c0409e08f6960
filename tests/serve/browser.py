"""Drives headless Chromium over its debugging pipe: keys, sizes, themes, requests, pictures.

The pipe is two file descriptors that carry JSON with a zero byte after each message, so that no
package is needed. `find()` is None where no Chromium is installed.
"""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "ArrowLeft": (37, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    " ": (32, " "),
    "/": (191, "/"),
}
SHIFT = 8


def find():
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab of a Chromium of its own; what it asked the network for is in `requests`."""

    def __init__(self, folder):
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", "--no-first-run", f"--user-data-dir={folder}"]
        # The pipe is on descriptors 3 and 4 of the browser, whatever they are here.
        words = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", words, find(), *flags, "about:blank"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._numbers, self._held, self._session = itertools.count(1), b"", None
        self.requests, self.problems, self.challenges, self.files = [], [], [], folder / "files"
        self.credentials = None
        self.files.mkdir(parents=True)
        targets = self.send("Target.getTargets")["targetInfos"]
        (tab,) = [one["targetId"] for one in targets if one["type"] == "page"]
        reported = self.send("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = reported["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.send(f"{domain}.enable")
        self.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(self.files))

    def send(self, method, **params):
        """Call a method of the protocol; its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for reported in self._messages(120):
            if reported.get("id") == number:
                assert "error" not in reported, (method, reported["error"])
                return reported["result"]
        raise TimeoutError(method)

    def _messages(self, seconds):
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            while b"\0" in self._held:
                data, self._held = self._held.split(b"\0", 1)
                reported = json.loads(data)
                self._note(reported)
                yield reported
            if select.select([self._in], [], [], left)[0]:
                data = os.read(self._in, 1 << 16)
                assert data, "the browser ended"
                self._held += data

    def _note(self, reported):
        method, params = reported.get("method"), reported.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", details).get("description", "exception"))
        elif method == "Fetch.requestPaused":
            self._answer("Fetch.continueRequest", params["requestId"])
        elif method == "Fetch.authRequired":
            self.challenges.append(params["authChallenge"]["scheme"])
            said = {"response": "CancelAuth"}
            if self.credentials:
                name, password = self.credentials
                said = {"response": "ProvideCredentials", "username": name, "password": password}
            self._answer("Fetch.continueWithAuth", params["requestId"], authChallengeResponse=said)

    def _answer(self, method, request, **params):
        message = {"id": next(self._numbers), "method": method, "sessionId": self._session}
        message["params"] = {"requestId": request, **params}
        os.write(self._out, json.dumps(message).encode() + b"\0")

    def look(self, width=1200, height=800, dark=False, still=False, touch=False):
        """Size and the reader's settings."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open(self, url):
        """Go to a page and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """The value of an expression, awaited."""
        reported = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reported, (script, reported["exceptionDetails"])
        return reported["result"].get("value")

    def wait(self, condition, seconds=120):
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.run(f"(({condition}) && true) || false"):
                return
            time.sleep(0.05)
        raise AssertionError(f"never came true: {condition}; {self.problems}")

    def type(self, text):
        """Write where the focus is."""
        self.send("Input.insertText", text=text)

    def press(self, *names, modifiers=0):
        """Press keys, one after the other."""
        for name in names:
            code, text = KEYS.get(name, (ord(name[0].upper()), name))
            reported = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
            self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **reported)
            self.send("Input.dispatchKeyEvent", type="keyUp", **reported)

    def picture(self, path):
        """A PNG of what is seen."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def tree(self):
        """Roles and names of what a screen reader gets, in order."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def close(self):
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            os.close(self._in)
            os.close(self._out)
