"""docs/structure.md lists the calls of a request as they are; line numbers may be older."""

from scripts.request_path import BEGIN, DOCUMENT, END, lists, without_lines


def test_the_document_has_the_calls_that_are_made() -> None:
    text = DOCUMENT.read_text("utf-8")
    calls = lists()
    assert without_lines(calls) == without_lines(text[text.index(BEGIN) : text.index(END) + len(END)])
    assert calls.index("RequestPool.add") < calls.index("Scheduler.step") < calls.index("TokenChooser.choose")
