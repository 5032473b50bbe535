"""Several pages of metrics as one, read back by Prometheus's own parser."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.ray.door import merged

texts = st.text(max_size=12)


def page(values: list[tuple[str, float]], count: float, seconds: list[float]) -> str:
    registry = CollectorRegistry()
    gauge = Gauge("some_gauge", 'Its help has # HELP and "quotes".', ["where"], registry=registry)
    for where, value in values:
        gauge.labels(where).set(value)
    Counter("some_count", "A counter without labels.", registry=registry).inc(count)
    histogram = Histogram("some_seconds", "Times.", buckets=(0.1, 1.0), registry=registry)
    for each in seconds:
        histogram.observe(each)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(
    pages=st.dictionaries(
        st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True),
        st.builds(
            page,
            st.lists(st.tuples(texts, st.floats(allow_nan=False)), max_size=4),
            st.floats(0, 1e9),
            st.lists(st.floats(0, 10), max_size=4),
        ),
        max_size=4,
    )
)
def test_every_sample_is_there_with_its_replica(pages: dict[str, str]) -> None:
    expected = {
        (name, labels | {("replica", replica)}): value
        for replica, text in pages.items()
        for (name, labels), value in samples(text).items()
    }
    assert samples(merged(pages)) == expected


def test_each_metric_is_described_once_and_its_samples_are_together() -> None:
    one, two = page([("a", 1.0)], 2.0, []), page([("b", 3.0)], 4.0, [0.5])
    families = list(text_string_to_metric_families(merged({"x": one, "y": two})))
    assert [family.name for family in families] == [
        family.name for family in text_string_to_metric_families(one)
    ]
    assert {family.name: family.type for family in families}["some_seconds"] == "histogram"
    assert merged({"x": one, "y": two}).count("# TYPE some_gauge gauge\n") == 1


def test_a_metric_of_one_page_only_is_kept() -> None:
    text = merged(
        {"x": "# HELP a A.\n# TYPE a gauge\na 1.0\n", "y": "# HELP b B.\n# TYPE b gauge\nb{} 2.0\n"}
    )
    assert text == (
        '# HELP a A.\n# TYPE a gauge\na{replica="x"} 1.0\n# HELP b B.\n# TYPE b gauge\nb{replica="y"} 2.0\n'
    )


def test_a_metric_without_samples_is_described_once_too() -> None:
    text = "# HELP a A.\n# TYPE a gauge\n"
    assert merged({"x": text, "y": text}) == text
