"""The live view left open: memory and the rate of frames hold over 10,000 iterations."""

import statistics
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Browser, CDPSession

from tests.browser.live_page import complete, live_page, read, until

KEEP = 2000
# The intervals between frames, in milliseconds, as long as the page is open.
COUNT_FRAMES = """() => {
    window.intervals = [];
    let last = performance.now();
    const frame = (now) => { window.intervals.push(now - last); last = now; requestAnimationFrame(frame); };
    requestAnimationFrame(frame);
}"""


def heap(session: CDPSession) -> int:
    """Bytes in use after a collection."""
    for _ in range(2):
        session.send("HeapProfiler.collectGarbage")
    return session.send("Runtime.getHeapUsage")["usedSize"]


@pytest.mark.long
def test_memory_and_frames_over_ten_thousand_iterations(browser: Browser) -> None:
    with live_page(browser, path=f"/live?keep={KEEP}", seconds=0.001) as (server, page):
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.enable")
        ended = threading.Event()

        def user(number: int) -> None:
            while not ended.is_set():
                complete(server, f"{number:03}" + "x" * (number * 11), 40 + number)

        def seen(n: int) -> int:
            until(page, f"{n} iterations", lambda: read(page, "counts")["iterations"] >= n, 120)
            return heap(session)

        with ThreadPoolExecutor(6) as pool:
            users = [pool.submit(user, number) for number in range(6)]
            try:
                early = seen(2 * KEEP)
                page.evaluate(COUNT_FRAMES)
                late = seen(2 * KEEP + 10_000)
                intervals = page.evaluate("window.intervals")
            finally:
                ended.set()
            for one in users:
                one.result(30)
        counts = read(page, "counts")
        assert counts["iterations"] - counts["forgotten"] == len(read(page, "iterations")) == KEEP
        assert late < early + (2 << 20), f"{early:,} bytes became {late:,}"
        median, slow = statistics.median(intervals), statistics.quantiles(intervals, n=100)[98]
        print(f"heap {early:,} then {late:,} bytes; frames: {median:.1f} ms, 99 of 100 in {slow:.1f}")
        assert median < 34 and slow < 250
