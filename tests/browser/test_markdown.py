"""A model's Markdown is rendered while it arrives, however it is cut, and nothing in it runs or loads."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.chromium import serious_faults, watched
from tests.browser.playground import Playground
from tests.endpoint.harness import Server, serving
from tests.host.engines import writing

# What `MarkdownText` makes of texts that come in these parts, each of them drawn.
RENDER = """async (texts) => {
    const { MarkdownText } = await import("/static/playground/markdown.js");
    return texts.map((parts) => {
        const view = new MarkdownText();
        for (const part of parts) { view.add(part); view.draw(); }
        view.end();
        return view.element.innerHTML;
    });
}"""

# By the rules of CommonMark and of GitHub's tables; each text with what it is to be.
RENDERED = {
    "*a* **b** ~~c~~ `d`": "<p><em>a</em> <strong>b</strong> <s>c</s> <code>d</code></p>",
    "a\nb": "<p>a\nb</p>",
    "# a\n\n### b": '<h4 data-level="1">a</h4><h6 data-level="3">b</h6>',
    "- a\n- b\n  1. c": "<ul><li>a</li><li>b<ol><li>c</li></ol></li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "> a\n\n***": "<blockquote><p>a</p></blockquote><hr>",
    "|a|b|\n|-|-:|\n|c|d|": (
        '<div class="scrolls" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th>a</th>'
        '<th data-align="right">b</th></tr></thead><tbody><tr><td>c</td><td data-align="right">d</td></tr>'
        "</tbody></table></div>"
    ),
    "<b>a</b> & &amp; &lt;": "<p>&lt;b&gt;a&lt;/b&gt; &amp; &amp; &lt;</p>",
    "<div onclick=x>\n\na": "<p>&lt;div onclick=x&gt;</p><p>a</p>",
    "[a](javascript:alert(1))": "<p>[a](javascript:alert(1))</p>",
    "[a](/v1/models)": '<p><span class="no-link">a<span class="target"> (/v1/models)</span></span></p>',
}

# Each of these ends a block, or turns the block before it into another one.
PIECES = (
    *(
        "a",
        "b c",
        "*",
        "**",
        "_",
        "`",
        "```",
        "~~~",
        "\n",
        "\n\n",
        "- ",
        "1. ",
        "2) ",
        "> ",
        "    ",
        "  ",
        "# ",
        "---",
    ),
    *(
        "===",
        "|",
        "|-|-|",
        "\n|-|\n",
        "[x]",
        "[x]: http://x.example/",
        "(y)",
        "<b>",
        "![i](http://i.example/)",
    ),
    *("https://a.example/b", "\\", "&amp;", "***", "\r\n", "\t", "+ ", "é", "🐋", "$", ":"),
)


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the tests for whatever goes wrong on it, a request to another host above all."""
    with serving(writing("a")) as server, watched(browser, server.url) as (page, _):
        page.goto("/docs")  # which uses no Markdown
        yield page


@pytest.mark.parametrize("text", RENDERED)
def test_markdown_is_rendered(page: Page, text: str) -> None:
    assert page.evaluate(RENDER, [[text]]) == [RENDERED[text]]


def test_the_pieces_in_which_a_text_comes_make_no_difference(page: Page) -> None:
    rng = random.Random(7)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(2, 40))) for _ in range(120)]
    cut = [parts_of(text, sorted(rng.choices(range(len(text) + 1), k=12))) for text in texts]
    whole = page.evaluate(RENDER, [[text] for text in texts])
    for parts in (cut, [list(text) for text in texts]):
        for one, shown, expected in zip(parts, page.evaluate(RENDER, parts), whole, strict=True):
            assert shown == expected, one


def parts_of(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_a_long_text_is_not_parsed_again_for_each_token(page: Page) -> None:
    """Count the characters that the parser gets, for a text of blocks that comes a token at a time."""
    parsed = """async ([block, n]) => {
        const { default: MarkdownIt } = await import("/static/vendor/markdown-it.js");
        const { MarkdownText } = await import("/static/playground/markdown.js");
        const parse = MarkdownIt.prototype.parse;
        let total = 0;
        MarkdownIt.prototype.parse = function (text, env) {
            total += text.length;
            return parse.call(this, text, env);
        };
        const view = new MarkdownText();
        for (const word of block.repeat(n).match(/\\S*\\s*/g)) { view.add(word); view.draw(); }
        view.end();
        MarkdownIt.prototype.parse = parse;
        return total;
    }"""
    block = "It is *short* and has `code`.\n\n```\nfor a in b:\n    c(a)\n```\n\n- one\n- two\n\n"
    once, often = (page.evaluate(parsed, [block, n]) for n in (10, 100))
    assert often < 11 * once, "the work grows with the text, not with its square"


def test_a_code_block_that_grows_stays_the_same_element(page: Page) -> None:
    """Otherwise text that the user has selected would lose its selection."""
    grown = """async () => {
        const { MarkdownText } = await import("/static/playground/markdown.js");
        const view = new MarkdownText();
        view.add("```py\\na = 1\\n");
        view.draw();
        const [first, text] = [view.element.firstElementChild, view.element.querySelector("code").firstChild];
        view.add("b = 2\\n");
        view.draw();
        view.add("```\\n\\nend");
        view.end();
        const same = view.element.firstElementChild === first;
        return [same && view.element.contains(text), text.data];
    }"""
    assert page.evaluate(grown) == [True, "a = 1\nb = 2"]


@pytest.mark.parametrize(
    "text", ["[", "![", "> ", "- ", "*a_ ", "`", "<a@", "|a", "[a](", "http://", "&#", "\\", "~~a"]
)
def test_deeply_nested_markdown_does_not_stop_the_page(page: Page, text: str) -> None:
    """The parser stops at a depth, and shows the rest as text."""
    depth = """async (text) => {
        const { MarkdownText } = await import("/static/playground/markdown.js");
        const view = new MarkdownText();
        view.add(text);
        view.end();
        const depth = (node) => 1 + Math.max(0, ...[...node.children].map(depth));
        return depth(view.element);
    }"""
    assert page.evaluate(depth, text * 5000) < 250


@contextmanager
def chatting(browser: Browser, answer: str) -> Iterator[tuple[Playground, Page]]:
    """A playground with a conversation whose answer is this text."""
    with serving(writing(answer)) as server, watched(browser, server.url) as (page, _):
        playground = Playground(page)
        playground.chat()
        playground.fill(max_tokens=len(answer))
        playground.send("a")
        playground.finish("length")
        yield playground, page


LINKS = (
    "[paper](https://usenix.example/yu) https://plain.example/a "
    "[https://bank.example](https://evil.example/) <mailto:a@b.example> "
    "![a beacon](https://evil.example/x.png?q=secret) "
    "[![badge](https://i.example/b.svg)](https://c.example/)"
)


def test_links_say_where_they_lead_and_nothing_is_loaded(browser: Browser) -> None:
    with chatting(browser, LINKS) as (_, page):
        links = page.locator(".markdown a")
        assert [(link.text_content(), link.get_attribute("href")) for link in links.all()] == [
            ("paper (usenix.example)", "https://usenix.example/yu"),
            ("https://plain.example/a", "https://plain.example/a"),
            ("https://bank.example (evil.example)", "https://evil.example/"),
            ("mailto:a@b.example", "mailto:a@b.example"),
            ("Image: a beacon (evil.example)", "https://evil.example/x.png?q=secret"),
            ("badge (c.example)", "https://c.example/"),
        ]
        for link in links.all():
            assert link.get_attribute("rel") == "noopener noreferrer nofollow"
            assert link.get_attribute("target") == "_blank"
        assert page.locator("#panes img").count() == 0


def test_the_page_turns_no_text_into_html(browser: Browser, server: Server) -> None:
    with watched(browser, server.url) as (other, faults):
        other.goto("/")
        other.get_by_label("max_tokens", exact=True).wait_for()
        # Three events come, in any order: Chromium's line, the line of the page's listener, the exception.
        with (
            other.expect_console_message(lambda message: "requires 'TrustedHTML' assignment" in message.text),
            other.expect_console_message(lambda message: message.text.startswith("policy: ")),
            other.expect_event("pageerror"),
        ):
            other.evaluate("setTimeout(() => { document.body.innerHTML = '<b>'; })")
        assert other.locator("#panes").count() == 1
        assert faults.found
        faults.found.clear()


CODE = "Look:\n\n```python title\nif a < b:\n    print('<b>')\n```\n"


def test_code_is_copied_and_the_plain_text_is_there(browser: Browser) -> None:
    with chatting(browser, CODE) as (playground, page):
        expect(page.locator(".code-head span")).to_have_text("python")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy the code").click()
        expect(page.locator("body > [role=status]")).to_have_text("Copy the code: copied")
        assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('<b>')"
        page.get_by_role("button", name="Copy", exact=True).last.click()
        expect(page.locator("body > [role=status]")).to_have_text("Copy: copied")
        assert page.evaluate("navigator.clipboard.readText()") == CODE
        assert serious_faults(page) == []
        playground.render_markdown(False)
        assert playground.text() == CODE
        page.reload()
        playground.until_there()
        assert playground.text() == CODE, "the browser remembers the choice"
        playground.render_markdown()
        expect(page.locator(".code-block code")).to_have_text("if a < b:\n    print('<b>')")
