"""The README's comparison with vLLM shows exactly the figures of the log."""

from scripts.beside_vllm import LOG, PICTURE, entry, panels, picture


def test_it_is_the_logs() -> None:
    figures = entry(LOG.read_text(encoding="utf-8"))
    assert figures["paper's 30 at once"] == ([234.4], [216.1])
    assert figures["paper's, 2.03/s"] == ([37.0, 258.0], [37.5, 242.0])
    assert len(figures) == 6
    assert PICTURE.read_text(encoding="utf-8") == picture(panels(figures))


def test_a_bar_is_as_long_as_its_figure() -> None:
    drawn = picture([("t", [("a < b", 50.0, 100.0)])])
    assert 'class="ours" x="250" y="58" width="210.0"' in drawn
    assert 'class="theirs" x="250" y="71" width="420.0"' in drawn and "a &lt; b" in drawn
