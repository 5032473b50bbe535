"""Drives the playground as a user does: fills in fields, presses buttons, reads answers."""

from typing import Any

from playwright.sync_api import Locator, Page, expect


class Playground:
    """The open playground, once its model is shown; in Completion, unless it is left as it opens."""

    def __init__(self, page: Page, *, as_it_opens: bool = False) -> None:
        self.page = page
        page.goto("/")
        self.until_there()
        if not as_it_opens:
            page.get_by_role("radio", name="Completion").check()

    def until_there(self) -> None:
        self.page.get_by_label("max_tokens", exact=True).wait_for()

    def pane(self, number: int = 1) -> Locator:
        return self.page.get_by_role("region", name=f"Pane {number}", exact=True)

    def fill(
        self, *, prompt: str | None = None, seed: int | None = None, pane: int = 1, **settings: Any
    ) -> None:
        """Fill in a pane's prompt and seed, and parameters of all panes."""
        if prompt is not None:
            self.pane(pane).get_by_role("textbox", name="Prompt").fill(prompt)
        if seed is not None:
            self.pane(pane).get_by_label("Seed").fill(str(seed))
        for name, value in settings.items():
            self.setting(name).fill(str(value))

    def setting(self, name: str) -> Locator:
        return self.page.locator(f".setting[data-name={name}] :is(input, textarea, select)")

    def show_probabilities(self, shown: bool = True) -> None:
        self.page.get_by_label("Probabilities of tokens").set_checked(shown)

    def render_markdown(self, rendered: bool = True) -> None:
        self.page.get_by_label("Render Markdown").set_checked(rendered)

    def run(self, pane: int = 1) -> None:
        self.pane(pane).get_by_role("button", name="Run", exact=True).click()

    def text(self, pane: int = 1) -> str:
        """The answer so far."""
        return self.pane(pane).locator(".choice").first.text_content() or ""

    def finish(self, reason: str, pane: int = 1) -> str:
        """Wait for the end of an answer; its text."""
        expect(self.pane(pane).locator(".finish").last).to_have_text(reason)
        return self.text(pane)

    def chat(self) -> None:
        self.page.get_by_role("radio", name="Chat").check()

    def send(self, message: str) -> None:
        box = self.pane().get_by_role("textbox", name="Message", exact=True)
        box.fill(message)
        box.press("Enter")

    def turns(self) -> list[tuple[str, str]]:
        """The conversation's messages, with their roles."""
        return [
            (
                turn.get_attribute("data-role") or "",
                turn.locator(".choice, .plain-text").first.text_content() or "",
            )
            for turn in self.page.locator(".turn").all()
        ]

    def copied(self, label: str) -> str:
        """The text that a copy button has put on the clipboard."""
        self.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.pane().get_by_role("button", name=label).click()
        expect(self.page.locator("body > [role=status]")).to_have_text(f"{label}: copied")
        return self.page.evaluate("navigator.clipboard.readText()")
