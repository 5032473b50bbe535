"""The metrics of several processes as one page, each sample with the label `replica`."""

import re
from collections.abc import Iterator, Mapping

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_COMMENT = re.compile(r"# (?:HELP|TYPE) (\S+)")


def merged(pages: Mapping[str, str]) -> str:
    """One page in Prometheus's text format from the page of each replica.

    Each metric's samples are together, as the format asks, and its help is the first page's that has it.
    """
    comments = dict[str, list[str]]()
    samples = dict[str, list[str]]()
    for replica, page in pages.items():
        for metric, line in _lines(page):
            known = comments.setdefault(metric, [])
            if not line.startswith("#"):
                samples.setdefault(metric, []).append(_labelled(line, replica))
            elif metric not in samples and len(known) < 2:
                known.append(line)
    lines = (line for metric in comments for line in (*comments[metric], *samples.get(metric, ())))
    return "".join(f"{line}\n" for line in lines)


def _lines(page: str) -> Iterator[tuple[str, str]]:
    """Each line with the metric that it belongs to; a metric begins with its comments."""
    metric = ""
    for line in page.split("\n"):
        if comment := _COMMENT.match(line):
            metric = comment[1]
        if line and (comment or not line.startswith("#")):
            yield metric, line


def _labelled(sample: str, replica: str) -> str:
    name = _NAME.match(sample)
    assert name is not None, sample
    rest = sample[name.end() :]
    if not rest.startswith("{"):
        return f'{name[0]}{{replica="{replica}"}}{rest}'
    comma = "" if rest.startswith("{}") else ","
    return f'{name[0]}{{replica="{replica}"{comma}{rest[1:]}'
