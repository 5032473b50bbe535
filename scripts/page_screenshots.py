"""Takes the pictures of docs/figures/pages, light and dark, wide and narrow, from a server of the demo model.

    python -m scripts.page_screenshots [--out DIRECTORY] [--chat-model DIRECTORY] [PAGE ...]

It needs the packages of the group `browser` and Debian's Chromium. In the pictures of the chat the model in
--chat-model answers: those of the documentation are of SmolLM2-135M-Instruct.
"""

import argparse
import json
import random
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from bench.server.server_process import ServerProcess

CHROMIUM = "/usr/bin/chromium"
FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "pages"
# Small, so that requests wait in the pictures of the live view.
FLAGS = ("--max-batch-size=8", "--max-batch-tokens=256", "--prefill-tokens=64", "--n-slots=2048")
# The pictures of each page: theme, and width in pixels.
VIEWS = (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390))
FEWER = {"chat": (VIEWS[0], VIEWS[3])}
QUESTION = "Write a Python function that merges two sorted lists."


def playground(page: Page) -> None:
    """Two seeds of one prompt, and the alternatives of a token."""
    page.get_by_text("Completion", exact=True).click()
    page.get_by_label("Probabilities of tokens").check()
    page.get_by_label("Prompt", exact=True).fill("In the beginning")
    page.get_by_label("Seed").fill("5")
    page.get_by_label("temperature").fill("0.7")
    if page.viewport_size and page.viewport_size["width"] > 800:
        page.get_by_role("button", name="Add pane").click()
        page.get_by_role("button", name="Run all").click()
    else:
        page.get_by_role("button", name="Run", exact=True).click()
    page.locator("[data-finish=length]").last.wait_for()
    page.locator(".token").nth(24).focus()


def chat(page: Page) -> None:
    """A question and its answer."""
    page.get_by_label("max_tokens").fill("200")
    page.get_by_label("temperature").fill("0")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator("[data-finish=writing], [data-finish=waiting]").wait_for(state="detached", timeout=120_000)
    page.locator(".turn-head").last.scroll_into_view_if_needed()


def docs(page: Page) -> None:
    """The first routes, with the fields of one open."""
    page.get_by_role("navigation", name="Routes").get_by_role("link").first.wait_for()


def live(page: Page) -> None:
    """Some seconds of traffic; where there is room, with a request that waited."""
    with traffic(page.url.removesuffix("/live")):
        while page.evaluate("window.orcaLive?.counts().iterations ?? 0") < 500:
            page.wait_for_timeout(100)
        page.get_by_role("button", name="Pause").click()
    if page.viewport_size and page.viewport_size["width"] > 800:
        page.locator("#list > li").nth(-8).click()
        canvas = page.locator("#iterations").bounding_box()
        assert canvas is not None
        page.mouse.move(canvas["x"] + 0.45 * canvas["width"], canvas["y"] + 0.8 * canvas["height"])
    page.get_by_text("view paused", exact=True).wait_for()


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Prompts of many lengths, some of which are abandoned, for as long as the context is open."""
    ended = threading.Event()
    words = ("In", "the", "beginning", "God", "created", "the", "heaven", "and", "the", "earth")

    def user(number: int) -> None:
        rng = random.Random(number)
        while not ended.wait(rng.random() * 0.4):
            prompt = " ".join(rng.choices(words, k=rng.choice([4, 10, 30, 90, 160])))
            body = {
                "prompt": prompt,
                "max_tokens": rng.choice([8, 24, 60, 120]),
                "ignore_eos": True,
                "stream": True,
            }
            data = json.dumps(body).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", data, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                for i, _ in enumerate(response):
                    if ended.is_set() or (number % 5 == 4 and i > 40):
                        break

    threads = [threading.Thread(target=user, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


PAGES: dict[str, tuple[str, Callable[[Page], None]]] = {
    "playground": ("/", playground),
    "chat": ("/", chat),
    "docs": ("/docs", docs),
    "live": ("/live", live),
}

HEIGHTS = {"live": 1060}  # of the wide pictures, in pixels; the others have 800


def take(browser: Browser, url: str, name: str, theme: str, width: int, out: Path) -> None:
    """One picture."""
    path, prepare = PAGES[name]
    context = browser.new_context(
        base_url=url,
        viewport={"width": width, "height": HEIGHTS.get(name, 800) if width > 800 else 844},
        color_scheme="dark" if theme == "dark" else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(path)
    prepare(page)
    page.screenshot(path=out / f"{name}-{theme}-{width}.png")
    context.close()


def take_all(browser: Browser, names: Sequence[str], model: Sequence[str], out: Path) -> None:
    """The pictures of these pages, from a server of `model`: a directory, or nothing for the demo model."""
    if not names:
        return
    with ServerProcess([*model, *FLAGS], compile_ahead=True) as server:
        server.wait_until_ready()
        for name in names:
            for theme, width in FEWER.get(name, VIEWS):
                take(browser, server.url, name, theme, width, out)


def main() -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", choices=[*PAGES, []], help=", ".join(PAGES))
    parser.add_argument("--out", type=Path, default=FIGURES)
    parser.add_argument(
        "--chat-model", type=Path, help="the checkpoint that answers in the pictures of the chat"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = arguments.pages or list(PAGES)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        take_all(browser, [name for name in names if name != "chat"], (), arguments.out)
        model = () if arguments.chat_model is None else (str(arguments.chat_model),)
        take_all(browser, [name for name in names if name == "chat"], model, arguments.out)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
