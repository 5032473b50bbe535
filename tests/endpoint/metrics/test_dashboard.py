"""Every query of the Grafana dashboard is about metrics and labels that a served engine's /metrics has."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from orca_jax.engine.stage_counters import RemoteCounters, StageCounters
from server.rpc import generation_pb2 as pb
from tests.endpoint.harness import serving, until
from tests.endpoint.http_client import connected
from tests.endpoint.rpc_client import client as rpc_client
from tests.host.engines import SOON
from tests.host.fragile_engine import LOST, FragileEngine
from tests.places import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/orca_jax.json").read_text(encoding="utf-8"))
OF_PROMETHEUS = frozenset(("instance", "job"))  # labels that it gives each sample itself
ROWS = ["Traffic", "Latency", "Scheduler", "Keys and values", "Workers", "Host"]
# Metrics that no panel shows: the creation times of two counters. Metrics that need a flag or a known device
# (docs/observability.md, docs/kubernetes.md) or Ray Serve's door are not on this page.
NOT_SHOWN = {
    *("orca_grpc_requests_created", "orca_http_requests_created"),
    # Of hybrids alone.
    *("orca_states_total", "orca_states_used", "orca_state_snapshots_most", "orca_state_snapshots"),
    *(f"orca_state_snapshots_{what}" for what in ("made", "used", "evicted")),
    # With --kv-host-bytes alone.
    *("orca_kv_host_blocks", "orca_kv_host_bytes", "orca_kv_host_bytes_most"),
    *(f"orca_kv_host_blocks_{what}" for what in ("stored", "read", "evicted")),
    "orca_kv_host_states",
    *(f"orca_kv_host_states_{what}" for what in ("stored", "read", "evicted")),
    *("orca_kv_disk_blocks", "orca_kv_disk_bytes"),
    *(f"orca_kv_disk_blocks_{what}" for what in ("written", "read", "bad", "removed")),
    # With --role alone.
    *("orca_kv_lease_bytes", "orca_kv_transfers", "orca_kv_transfers_failed", "orca_kv_transfer_blocks"),
    *("orca_kv_leases_granted", "orca_kv_leases_taken", "orca_kv_leases_expired"),
    "orca_kv_transfers_under_way",
}
# How Grafana fills in its variables.
FILLED = {"$__rate_interval": "5m", "$model": ".*", "$instance": ".*"}


@dataclass
class Page:
    """A /metrics page: the type of each metric, and the labels of each sample, by name."""

    types: dict[str, str] = field(default_factory=dict[str, str])  # by the sample's name
    labels: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    families: set[str] = field(default_factory=set[str])
    family: dict[str, str] = field(default_factory=dict[str, str])  # of a sample


@dataclass
class RemoteStages:
    """Figures of an engine's workers."""

    counters: RemoteCounters = field(default_factory=RemoteCounters)
    stages: list[StageCounters] = field(default_factory=lambda: [StageCounters(), StageCounters()])


@pytest.fixture(scope="module")
def page() -> Page:
    """The /metrics page after requests over both endpoints, and the loss and return of a worker."""
    engine = FragileEngine()
    vars(engine)["workers"] = RemoteStages()
    body = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True}
    with (
        serving(engine=engine) as server,
        connected(server) as client,
        rpc_client(server) as stub,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(client.post, "/v1/completions", json=body)
        assert engine.waited_for.wait(SOON)
        engine.error = LOST
        engine.let(1)
        assert engine.is_down.wait(SOON)
        engine.recoveries.append(True)
        engine.let(1000)
        assert answer.result(SOON).status_code == 200
        assert list(stub.Generate(pb.GenerateRequest(text="a"), timeout=SOON))
        until(server.at_rest, "rest")
        text = client.get("/metrics").text
    result = Page()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            result.types[sample.name] = family.type
            result.labels.setdefault(sample.name, set()).update(sample.labels)
            result.family[sample.name] = family.name
        if family.name.startswith("orca_"):
            result.families.add(family.name)
    return result


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def targets() -> Iterator[tuple[str, str, str]]:
    """The panel's title, the query and the legend of each line of each panel."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def filled(query: str) -> str:
    for name, value in FILLED.items():
        query = query.replace(name, value)
    assert "$" not in query, f"a variable that the dashboard does not have: {query}"
    return query


@dataclass
class Read:
    """A query's samples by name and labels, those used as a rate, and all `by` labels."""

    selectors: list[tuple[str, set[str]]] = field(default_factory=list[tuple[str, set[str]]])
    rates: set[str] = field(default_factory=set[str])
    by: list[tuple[list[str], set[str]]] = field(default_factory=list[tuple[list[str], set[str]]])


def read(query: str) -> Read:
    """Parse a query. Raises ValueError if it is not PromQL."""
    result = Read()

    def visit(expr: promql.Expr) -> None:
        if isinstance(expr, promql.VectorSelector):
            assert expr.name is not None
            result.selectors.append((expr.name, {m.name for m in expr.matchers.matchers}))
        elif isinstance(expr, promql.MatrixSelector):
            visit(expr.vector_selector)
            result.rates.add(str(expr.vector_selector.name))
        elif isinstance(expr, promql.AggregateExpr) and expr.modifier is not None:
            assert expr.modifier.type == promql.AggModifierType.By
            inner = read(expr.expr.prettify())
            result.by.append((list(expr.modifier.labels), {name for name, _ in inner.selectors}))

    promql.walk(promql.parse(query), visit)
    return result


def unknown(query: str, page: Page) -> list[str]:
    """The samples and labels of the query that the page lacks."""
    asked = read(filled(query))
    wrong = list[str]()
    for name, labels in asked.selectors:
        if name not in page.labels:
            wrong.append(f"no sample {name}")
        elif more := labels - page.labels[name] - OF_PROMETHEUS:
            wrong.append(f"{name} has no labels {more}")
    for labels, names in asked.by:
        for name in names & page.labels.keys():
            if more := set(labels) - page.labels[name] - OF_PROMETHEUS:
                wrong.append(f"{name} does not have the labels {more}")
    for name in asked.rates & page.types.keys():
        if page.types[name] not in ("counter", "histogram"):
            wrong.append(f"a rate of {name}, which is a {page.types[name]}")
    for name, _ in asked.selectors:
        if page.types.get(name) in ("counter", "histogram") and name not in asked.rates:
            wrong.append(f"{name} only grows, so its rate is wanted")
    return wrong


def test_every_query_is_about_what_the_page_has(page: Page):
    assert {title: wrong for title, query, _ in targets() if (wrong := unknown(query, page))} == {}


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("sum(rate(orca_requests[5m]))", "no sample orca_requests"),
        ("sum(orca_requests_total)", "orca_requests_total only grows"),
        ("sum(rate(orca_slots_used[5m]))", "a rate of orca_slots_used, which is a gauge"),
        ("sum by (le) (orca_slots_used)", "orca_slots_used does not have the labels {'le'}"),
        ('orca_slots_used{stage="1"}', "orca_slots_used has no labels {'stage'}"),
        ('max by (stage) (max by (job) (orca_worker_up{stage="1"})) + orca_slots', "no sample orca_slots"),
    ],
)
def test_a_wrong_query_is_noticed(page: Page, query: str, what: str):
    assert any(line.startswith(what) for line in unknown(query, page)), unknown(query, page)


def test_a_legend_names_only_labels_that_are_left():
    for title, query, legend in targets():
        names = set(re.findall(r"\{\{(\w+)\}\}", legend))
        outer = read(filled(query)).by
        assert names <= ({*outer[0][0]} if outer else set()), f"{title}: {legend}"


def test_every_metric_of_ours_is_shown_or_listed(page: Page):
    shown = {page.family[name] for _, query, _ in targets() for name, _ in read(filled(query)).selectors}
    assert page.families - shown == NOT_SHOWN


def test_the_variables_of_the_dashboard_are_on_the_page_too(page: Page):
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("model", "instance"):
        query = variables[name]["query"]["query"]
        assert query == variables[name]["definition"]
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert match is not None
        for sample, labels in read(filled(match[1])).selectors:
            assert {match[2], *labels} <= page.labels[sample] | OF_PROMETHEUS


def test_the_dashboard_is_one_that_grafana_can_lay_out():
    every = DASHBOARD["panels"]
    assert [panel["title"] for panel in every if panel["type"] == "row"] == ROWS
    assert len({panel["id"] for panel in every}) == len(every)
    taken = set[tuple[int, int]]()
    for panel in every:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
