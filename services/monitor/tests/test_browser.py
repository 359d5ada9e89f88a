"""The page in a real browser, where there is one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from slipstream_monitor.feed import Feed
from slipstream_monitor.page import make_app
from slipstream_monitor.state import MonitorState
from slipstream_monitor.web import WebServer

from slipstream.clock import SystemClock
from slipstream.v1.train_pb2 import Alert, StepRecord
from tests.support.chromium import PROGRAM, Page, chromium
from tests.support.page_demo import fill, run, topic_lengths

pytestmark = pytest.mark.skipif(not PROGRAM, reason="no chromium or google-chrome on this machine")

SHOWN = "document.body.dataset.view === 'run' && document.querySelectorAll('canvas').length === 9"


@pytest.fixture
def feed() -> Feed:
    return Feed(MonitorState(), SystemClock())


@pytest.fixture
async def url(feed: Feed) -> AsyncIterator[str]:
    web = WebServer(make_app(feed), "127.0.0.1", 0, "PORT")
    port = web.bind()
    await web.start()
    yield f"http://127.0.0.1:{port}/"
    feed.close()
    await web.close()


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with chromium(tmp_path / "profile") as page:
        yield page
        assert page.errors == []


def a_run(feed: Feed, steps: int = 12) -> None:
    feed.topics = topic_lengths("ns", steps)
    fill(feed, run("arithmetic", steps, start_ms=int(feed.clock.unix() * 1000) - steps * 9000))


async def test_charts_and_tables_show_a_run(feed: Feed, url: str, page: Page, tmp_path: Path) -> None:
    a_run(feed)
    await page.open(url)
    await page.until(SHOWN)
    text = await page.text()
    for expected in (
        "version 1-12",
        "rollout-1",
        "ns.prompts.v1",
        "reward raised ValueError",
        "lag 2",
        "live",
    ):
        assert expected in text
    assert "no values yet" not in text
    picture = await page.screenshot()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000


async def test_an_empty_page_says_what_it_waits_for_and_goes_on_by_itself(
    feed: Feed, url: str, page: Page
) -> None:
    await page.open(url)
    await page.until("document.body.dataset.view === 'no-run'")
    text = await page.text()
    assert "Waiting for a run" in text
    assert "slipstream run examples/arithmetic/recipe.py" in text
    a_run(feed)
    await page.until(SHOWN)
    await page.until("document.body.dataset.step === '12'")


async def test_new_steps_and_a_gate_that_closes_appear_without_a_reload(
    feed: Feed, url: str, page: Page
) -> None:
    a_run(feed, 3)
    await page.open(url)
    await page.until(SHOWN)
    a_run(feed, 4)
    await page.until("document.body.dataset.step === '4'")
    fill(
        feed,
        iter(
            [(Alert(run_id="arithmetic", state="GATE_STATE_HOLD", step=4, reason="k3 is <b>high</b>"), 2**42)]
        ),
    )
    await page.until("!document.getElementById('alert').hidden")
    assert "HOLD at step 4: k3 is <b>high</b>" in await page.text("#alert")


async def test_arrow_keys_walk_through_the_steps_of_all_charts(feed: Feed, url: str, page: Page) -> None:
    a_run(feed)
    await page.open(url)
    await page.until(SHOWN)
    await page.evaluate("document.querySelector('#chart-reward .plot').focus()")
    for key in ("Home", "ArrowRight"):
        await page.press(key)
    told = "document.querySelector('#chart-lag .plot').getAttribute('aria-valuetext')"
    assert str(await page.evaluate(told)).startswith("step 2: max 1")
    await page.evaluate("document.activeElement.blur()")
    assert str(await page.evaluate(told)).startswith("step 12:")


async def test_the_page_connects_again_after_the_monitor_restarted(feed: Feed, page: Page) -> None:
    a_run(feed, 2)
    first = WebServer(make_app(feed), "127.0.0.1", 0, "PORT")
    port = first.bind()
    await first.start()
    await page.open(f"http://127.0.0.1:{port}/")
    await page.until(SHOWN)
    feed.close()
    await first.close()
    await page.until("document.getElementById('link').textContent === 'reconnecting'")
    again = Feed(MonitorState(), SystemClock())
    a_run(again, 3)
    second = WebServer(make_app(again), "127.0.0.1", port, "PORT")
    await second.start()
    await page.until(
        "document.body.dataset.step === '3' && document.getElementById('link').className === 'link live'"
    )
    again.close()
    await second.close()


async def test_a_run_without_metrics_is_no_error(feed: Feed, url: str, page: Page) -> None:
    for message, time_ms in run("bare", 3, start_ms=int(feed.clock.unix() * 1000)):
        if isinstance(message, StepRecord):
            message.ClearField("metrics")
            feed.state.apply(message, time_ms)
    await page.open(url)
    await page.until(SHOWN)
    assert "no values yet" in await page.text("#chart-reward")


async def test_a_run_can_be_picked(feed: Feed, url: str, page: Page) -> None:
    a_run(feed, 2)
    fill(feed, run("other", 5, start_ms=1000))
    await page.open(f"{url}?run=other")
    await page.until("document.body.dataset.step === '5'")
    await page.evaluate("document.getElementById('run').value = 'arithmetic'")
    await page.evaluate("document.getElementById('run').dispatchEvent(new Event('change'))")
    await page.until("document.body.dataset.step === '2' && location.search === '?run=arithmetic'")
