"""The web page: files, JSON for the charts, server-sent events, Prometheus metrics, health."""

import asyncio
import json
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from slipstream_monitor.exposition import CONTENT_TYPE, render
from slipstream_monitor.feed import Feed
from slipstream_monitor.views import overview, series

PAGE = Path(str(files("slipstream_monitor") / "page"))
MIN_PAUSE_S = 0.5
"""Between two events of one stream, however fast messages come."""
MAX_PAUSE_S = 5.0
"""An event at least this often: ages go on, and a dead connection is noticed."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_app(feed: Feed) -> Starlette:
    """The page over a feed. Nothing here changes anything: every route is a GET."""

    async def index(request: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers={**_HEADERS, "Cache-Control": "no-cache"})

    async def runs(request: Request) -> Response:
        return JSONResponse({"runs": feed.state.run_ids()})

    async def snapshot(request: Request) -> Response:
        run_id = request.query_params.get("run", "")
        if run_id and feed.state.find(run_id) is None:
            return JSONResponse({"error": f"no run {run_id} is known"}, status_code=404)
        return JSONResponse(_event(feed, run_id, None))

    async def events(request: Request) -> Response:
        stream = _stream(feed, request.query_params.get("run", ""))
        headers = {**_HEADERS, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def metrics(request: Request) -> Response:
        return Response(render(feed), media_type=CONTENT_TYPE)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    return Starlette(
        routes=[
            Route("/", index),
            Route("/api/runs", runs),
            Route("/api/run", snapshot),
            Route("/api/events", events),
            Route("/metrics", metrics),
            Route("/healthz", healthz),
            Mount("/static", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(GZipMiddleware, minimum_size=4096)],
    )


async def _stream(feed: Feed, run_id: str) -> AsyncIterator[str]:
    """Events as text: first everything, then what changed; everything again when the run is another one."""
    shown: dict[str, Any] | None = None
    while not feed.closing:
        shown = _event(feed, run_id, shown)
        yield f"data: {json.dumps(shown, separators=(',', ':'))}\n\n"
        if feed.state.serial == shown["serial"]:
            await feed.changed(MAX_PAUSE_S)
        if not feed.closing:
            await asyncio.sleep(MIN_PAUSE_S)


def _event(feed: Feed, run_id: str, before: dict[str, Any] | None) -> dict[str, Any]:
    """One event; `full` says that earlier chart data is void. `before` is the event sent last."""
    state, now = feed.state, feed.clock.unix()
    run = state.find(run_id)
    source = [run.run_id, run.generation] if run else None
    full = before is None or before["source"] != source
    after = -1 if before is None or full else before["serial"]
    return {
        "serial": state.serial,
        "source": source,
        "full": full,
        "now": now,
        "skipped": sum(feed.skipped.values()),
        "overview": overview(state, run, feed.topics, now),
        "series": series(run, after) if run else None,
    }
