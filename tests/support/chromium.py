"""Just enough of the DevTools protocol to look at a page in Chromium, over its pipe (no driver needed)."""

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

PROGRAM = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), ""
)
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1400,1400 "
    "--remote-debugging-pipe"
)


class Page:
    """One tab. `errors` collects what its scripts threw or logged as an error."""

    def __init__(self, reader: asyncio.StreamReader, writer: Any) -> None:
        self.errors: list[str] = []
        self._reader, self._writer = reader, writer
        self._session: str | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def open(self, url: str) -> None:
        """Attaches to a new tab and goes to an address."""
        target = (await self._call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        await self._call("Runtime.enable")
        await self._call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        answer = await self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 20) -> None:
        """Returns when an expression is true; until then it may throw."""
        check = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        for _ in range(int(timeout_s / 0.05)):
            if await self.evaluate(check):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"not within {timeout_s} s: {expression}; page errors: {self.errors}")

    async def text(self, selector: str = "body") -> str:
        """Visible text of an element."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def press(self, key: str) -> None:
        """Presses a named key (`ArrowLeft`, `Home`)."""
        for kind in ("rawKeyDown", "keyUp"):
            await self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def screenshot(self) -> bytes:
        """PNG of the window."""
        return base64.b64decode((await self._call("Page.captureScreenshot", format="png"))["data"])

    async def close(self) -> None:
        self._listening.cancel()
        self._writer.close()

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = len(self._answers) + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(answer, 30)

    async def _listen(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if answer := self._answers.get(message.get("id", -1)):
                if "error" in message:
                    answer.set_exception(AssertionError(message["error"]))
                else:
                    answer.set_result(message["result"])
            elif message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
            elif message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] == "error":
                self.errors.append(json.dumps(message["params"]["args"])[:500])


@contextlib.asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Page]:
    """Starts a browser with an empty profile and one tab; ends it with everything it started."""
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    # The browser reads commands from descriptor 3 and writes to 4: keep ours clear of those.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_read, from_write)]

    def connect() -> None:
        for ours, wanted in zip(theirs, (3, 4), strict=True):
            os.dup2(ours, wanted)

    process = await asyncio.create_subprocess_exec(
        PROGRAM, *_FLAGS.split(), f"--user-data-dir={profile}", preexec_fn=connect, pass_fds=(3, 4),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    for fd in (to_read, from_write, *theirs):
        os.close(fd)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 * 2**20)
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_read, "rb")
    )
    outgoing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_write, "wb"))
    page = Page(reader, outgoing)
    try:
        yield page
    finally:
        # A browser ends when its pipe closes.
        await page.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10)
        if process.returncode is None:
            process.kill()
            await process.wait()
        incoming.close()


async def _picture(url: str, until: str, file: Path) -> None:
    with tempfile.TemporaryDirectory() as profile:
        async with chromium(Path(profile)) as page:
            await page.open(url)
            await page.until(until)
            file.write_bytes(await page.screenshot())


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m tests.support.chromium URL 'JAVASCRIPT THAT IS TRUE WHEN READY' FILE.png")
    asyncio.run(_picture(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
