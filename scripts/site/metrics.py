"""The reference of the metrics, from what a server's registry says."""

from prometheus_client.parser import text_string_to_metric_families

from scripts.site.markdown import cell, code, table

_OURS = "orca_"


def metrics_page(scraped: str) -> str:
    """A table of the metrics in Prometheus's text format, with the labels that each has."""
    ours, others = list[tuple[str, ...]](), list[str]()
    for family in text_string_to_metric_families(scraped):
        if not family.name.startswith(_OURS):
            others.append(code(family.name))
        elif not family.name.endswith("_created"):
            labels = dict.fromkeys(
                label
                for sample in family.samples
                for label in sample.labels
                if label not in ("le", "model_name")
            )
            name = family.name + "_total" if family.type == "counter" else family.name
            row = (code(name), family.type, ", ".join(map(code, labels)), cell(family.documentation))
            ours.append(row)
    head = ("metric", "type", "labels", "meaning")
    return "\n".join(
        (
            "# Metrics\n",
            "`GET /metrics` returns these in Prometheus's text format. The engine's metrics also have the "
            "label `model_name`; with [`orca serve --metric-names vllm`](commands/serve.md) they have "
            "vLLM's names. Metrics that need worker processes, Ray or K/V events are in "
            "[workers](../workers.md) and [scale-out](../scale-out.md).\n",
            table(head, ours),
            f"The process itself has these: {', '.join(others)}.\n",
        )
    )
