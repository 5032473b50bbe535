"""Shared parts of all pages: the navigation, the theme, the key, and keyboard behaviour."""

import pytest
from playwright.sync_api import Browser, Page, expect

from server.http.pages import PAGES
from tests.browser.chromium import serious_faults, watched
from tests.endpoint.harness import Server

# What is there once a page has shown what it fetches.
READY = {"/": "#model-card dl", "/docs": ".route", "/live": ".header"}


def test_the_pages_link_to_each_other(page: Page) -> None:
    page.goto("/")
    for name, path in (("Live", "/live"), ("API", "/docs"), ("Playground", "/")):
        page.get_by_role("navigation", name="Pages").get_by_role("link", name=name).click()
        page.wait_for_url(f"**{path}")
        current = page.locator("nav [aria-current=page]")
        expect(current).to_have_text(name)
    expect(page.locator(".server-status")).to_have_text("ready")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing_serious(browser: Browser, server: Server, path: str, scheme: str) -> None:
    with watched(browser, server.url, color_scheme=scheme) as (page, _):
        page.goto(path)
        page.locator(READY[path]).first.wait_for()
        assert serious_faults(page) == []


def test_the_theme_is_the_system_s_until_one_is_chosen(browser: Browser, server: Server) -> None:
    with watched(browser, server.url, color_scheme="dark") as (page, _):
        page.goto("/docs")
        dark = background(page)
        page.get_by_role("button", name="Use the light theme").click()
        light = background(page)
        assert dark != light
        page.goto("/")
        assert background(page) == light
        page.get_by_role("button", name="Use the dark theme").click()
        assert background(page) == dark


@pytest.mark.parametrize("path", PAGES)
def test_nothing_is_wider_than_the_window(page: Page, path: str) -> None:
    page.goto(path)
    page.get_by_role("navigation", name="Pages").wait_for()
    for width in (320, 390, 800, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_skip_link_leads_to_the_content(page: Page) -> None:
    page.goto("/docs")
    page.get_by_role("navigation", name="Pages").wait_for()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


def background(page: Page) -> str:
    page.get_by_role("navigation", name="Pages").wait_for()
    return page.evaluate("getComputedStyle(document.body).backgroundColor")
