"""Hooks that mkdocs calls while it builds the site: pages from the code, links, diagrams, a check."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import orca_jax
from bench.server.server_process import ServerProcess
from scripts.site.commands import command_pages
from scripts.site.foreign import foreign
from scripts.site.http import http_page
from scripts.site.links import PROJECT, site_links
from scripts.site.mermaid import mermaid_script
from scripts.site.metrics import metrics_page
from scripts.site.options import options_page

_ROOT = Path(__file__).parents[2]
_MERMAID = "assets/mermaid.min.js"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    document, scraped = _ask_a_server()
    pages: dict[str, str | bytes] = {
        "reference/http.md": http_page(document),
        "reference/metrics.md": metrics_page(scraped),
        "reference/options.md": options_page(),
        "reference/grpc.md": _grpc_page(),
        "reference/python.md": _python_page(),
        _MERMAID: mermaid_script(_ROOT / "build" / "site"),
    }
    pages |= {f"reference/commands/{name}.md": page for name, page in command_pages()}
    for source, page in PROJECT.items():
        pages[page] = (_ROOT / source).read_text(encoding="utf-8")
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between the repository's files into links between pages."""
    sources = {page: source for source, page in PROJECT.items()}
    uri = page.file.src_uri
    return site_links(markdown, sources.get(uri, f"docs/{uri}"), uri)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Load mermaid where there is a diagram; without it the theme would load it from another host."""
    if 'class="mermaid"' not in output:
        return output
    up = "../" * page.url.count("/")
    return output.replace("</body>", f'<script src="{up}{_MERMAID}"></script></body>')


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page would load anything from another host."""
    found = list(foreign(Path(config.site_dir)))
    if found:
        raise PluginError("loaded from other hosts:\n" + "\n".join(found))


def _ask_a_server() -> tuple[dict[str, Any], str]:
    """The OpenAPI document and the metrics of a server of the demo model."""
    with ServerProcess(variables={"ORCA_ADMIN_KEYS": "only-for-this-page"}) as server:
        server.wait_until_ready()
        answers: list[str] = []
        for path in ("/openapi.json", "/metrics"):
            with urllib.request.urlopen(server.url + path, timeout=60) as answer:
                answers.append(answer.read().decode())
        server.stop()
    return json.loads(answers[0]), answers[1]


def _python_page() -> str:
    first = ("LLM", "SamplingParams", "FunctionModel")
    names = [*first, *(name for name in orca_jax.__all__ if name not in (*first, "__version__"))]
    return "# Python\n\n" + "\n".join(f"::: orca_jax.{name}\n" for name in names)


def _grpc_page() -> str:
    proto = (_ROOT / "server/rpc/generation.proto").read_text(encoding="utf-8")
    return (
        "# gRPC\n\n`orca.v1.Generation`, as the server's reflection gives it too. "
        "[Serving](../http.md#grpc) has an example.\n\n"
        f"```protobuf\n{proto}```\n"
    )
