"""The copies of a request run as they are, whatever the texts in it, and give what the page shows."""

import json
import os
import subprocess
import sys

import pytest
from playwright.sync_api import Browser, Page

from server.settings.api_keys import ApiKeys
from tests.browser.chromium import watched
from tests.browser.playground import Playground
from tests.endpoint.harness import serving

HOSTILE = [
    "it's; echo $HOME `id` $(id) \"quoted\" \\ \\n !! \\'",
    "'''\"\"\"\n{x} %s #\r\n\tend\u2028\u0007",
    "naïve 日本 🐋 '\\''",
]


def run(command: list[str], text: str) -> str:
    """Run the copied text in a shell or in Python."""
    environment = {**os.environ, "ORCA_API_KEY": "a-secret-key", "no_proxy": "127.0.0.1"}
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("prompt", HOSTILE)
def test_curl_runs_in_bash(page: Page, prompt: str) -> None:
    playground = Playground(page)
    playground.fill(prompt=prompt, max_tokens=5, seed=1, stop="it's $HOME")
    playground.run()
    text = playground.finish("length")
    answer = json.loads(run(["bash", "-s"], playground.copied("Copy as curl")))
    assert answer["choices"][0]["text"] == text


def test_python_runs(page: Page) -> None:
    prompt = " ".join(HOSTILE)
    playground = Playground(page)
    page.get_by_text("more parameters").click()
    playground.fill(prompt=prompt, max_tokens=5, seed=1, top_k=40, bad_words=json.dumps(HOSTILE))
    playground.setting("ignore_eos").check()
    playground.run()
    text = playground.finish("length")
    assert run([sys.executable, "-"], playground.copied("Copy as Python")) == text + "\n"


def test_the_key_is_not_copied(browser: Browser) -> None:
    keys = ApiKeys(["a-secret-key"])
    with serving(keys=keys) as server, watched(browser, server.url) as (page, faults):
        faults.expected_statuses.add(401)
        page.goto("/")
        page.get_by_label("Key", exact=True).fill("a-secret-key")
        page.keyboard.press("Enter")
        playground = Playground(page)
        playground.fill(prompt="a", max_tokens=3)
        command, program = playground.copied("Copy as curl"), playground.copied("Copy as Python")
        assert "secret" not in command + program
        assert json.loads(run(["bash", "-s"], command))["usage"]["completion_tokens"] == 3
        assert run([sys.executable, "-"], program) == "abc\n"
