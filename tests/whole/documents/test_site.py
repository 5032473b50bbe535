"""Parts of the documentation site, without building it: `make docs` does that."""

import json
from pathlib import Path

import pytest

from scripts.site.commands import command_pages, command_parsers
from scripts.site.foreign import foreign
from scripts.site.http import http_page
from scripts.site.links import site_links
from scripts.site.metrics import metrics_page
from scripts.site.options import options_page
from server.parser import shown_flags
from server.settings.flags import ALL_OPTIONS


def test_a_page_has_every_flag_of_its_command() -> None:
    pages = dict(command_pages())
    commands = (
        *("generate", "chat", "serve", "compile", "worker", "plan", "bench", "route", "replay", "convert"),
        *("diff", "completion"),
    )
    assert tuple(pages) == commands
    for name, command in command_parsers().items():
        flags = shown_flags(command) - {"-h", "--help"}
        assert not [flag for flag in flags if f"`{flag}`" not in pages[name]]
        assert flags or name == "completion"
    assert "SUPPRESS" not in "".join(pages.values())


def test_the_page_of_options_says_who_has_them_and_their_defaults() -> None:
    page = options_page()
    (queue,) = (line for line in page.splitlines() if line.startswith("| `max_queue` |"))
    assert queue == (
        "| `max_queue` | a whole number | `1048576`; of `orca serve` `1024` | maximum number of waiting "
        "requests; more are refused | `LLM`, `serve` |"
    )
    assert "| `reservation` | one of full, on-demand, or none | on-demand |" in page
    assert "`LLM` (`deadlines.ready_seconds`), `serve` |" in page
    assert page.count("\n| `") == len(ALL_OPTIONS) and page.count("## Model and engine") == 1


def test_a_route_has_its_fields_and_bounds() -> None:
    number = {
        "anyOf": [{"type": "number"}, {"type": "null"}],
        "minimum": 0,
        "maximum": 2,
        "description": "a|b",
    }
    fields = {"properties": {"heat": number, "words": {"type": "array", "items": {"type": "string"}}}}
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/Asked"}}}
    post = {"requestBody": {"content": body}, "responses": {"200": {"description": "Fine"}}}
    page = http_page(
        {
            "info": {"description": "An API."},
            "paths": {"/v1/ask": {"post": post}},
            "components": {"schemas": {"Asked": fields | {"required": ["words"]}}},
        }
    )
    assert "## `POST /v1/ask`" in page and "Body: [Asked](#asked)" in page
    assert "| `heat` | number, 0 to 2 |  | a\\|b |" in page
    assert "| `words` | list of string | yes |  |" in page


def test_metrics_have_types_and_labels() -> None:
    page = metrics_page(
        "# HELP orca_x_total Things.\n# TYPE orca_x_total counter\n"
        'orca_x_total{model_name="m",reason="stop"} 1\n'
        "# HELP process_y Others.\n# TYPE process_y gauge\nprocess_y 2\n"
    )
    assert "| `orca_x_total` | counter | `reason` | Things. |" in page and "`process_y`" in page


@pytest.mark.parametrize(
    "source, page, link, expected",
    [
        ("docs/a.md", "a.md", "[log](../bench/LOG.md)", "[log](project/log.md)"),
        ("docs/tutorials/a.md", "tutorials/a.md", "[s](../serving.md#http)", "[s](../serving.md#http)"),
        ("docs/a.md", "a.md", "[it](../README.md)", "[it](index.md)"),
        ("docs/a.md", "a.md", "[deploy/x.yaml](../deploy/x.yaml)", "deploy/x.yaml"),
        ("docs/a.md", "a.md", "[a file](../deploy/x.yaml)", "a file (`deploy/x.yaml`)"),
        ("CONTRIBUTING.md", "project/contributing.md", "[s](docs/structure.md)", "[s](../structure.md)"),
        ("docs/a.md", "a.md", "[there](https://example.org/x)", "[there](https://example.org/x)"),
        ("docs/a.md", "a.md", "![figure](figures/f.png)", "![figure](figures/f.png)"),
    ],
)
def test_links_lead_to_pages(source: str, page: str, link: str, expected: str) -> None:
    assert site_links(f"See {link}.", source, page) == f"See {expected}."


@pytest.mark.parametrize(
    "html, loads",
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example/x.css">', True),
        ('<img srcset="a.png 1x, https://img.example/b.png 2x">', True),
        ('<p style="background: url(https://img.example/b.png)">', True),
        ('<script src="assets/x.js"></script><a href="https://example.org/">a link is no load</a>', False),
    ],
)
def test_what_comes_from_another_host_is_found(html: str, loads: bool, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    assert bool(list(foreign(tmp_path))) is loads


def test_style_sheets_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text('@import "https://fonts.example/a.css"; b {src: url(here.woff)}', "utf-8")
    assert list(foreign(tmp_path)) == ["a.css: https://fonts.example/a.css"]


def test_an_openapi_document_may_lack_descriptions() -> None:
    empty = json.loads('{"info": {"description": ""}, "paths": {}, "components": {"schemas": {"A": {}}}}')
    assert "### A" in http_page(empty)
