"""bench.tokens accepts a correct engine, and rejects one whose weights differ from the reference's."""

import pytest

from bench import tokens
from bench.tokens import CPU_SHARE, Agreement, Reference, check_model, requests_of
from orca_jax.families.presets import PRESETS
from tests.gpt_config import changed_config

SMALL = changed_config(PRESETS["demo"], vocab_size=97, hidden_size=64, n_layers=2, n_heads=2, ffn_size=96)


def test_choices_are_held_against_the_reference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(tokens.MODELS, "small", SMALL)
    looked = Reference.look
    requests = []

    def look(truth: Reference, request, share, into) -> None:
        requests.append(request)
        looked(truth, request, share, into)

    monkeypatch.setattr(Reference, "look", look)
    result = check_model("small", "float32", [8, 512], 2, CPU_SHARE)
    assert [one["right"] for one in result["buckets"].values()] == [True, True]
    assert "WRONG" not in capsys.readouterr().out
    asked = [request for bucket in (8, 512) for some in requests_of(bucket, 2, 97) for request in some]
    assert len(requests) == len(asked) == 1 + 8 + 1
    assert [request.prompt_ids for request in requests] == [request.prompt_ids for request in asked]
    # The smallest change that matters is seen: one head's sixteen values of one layer.
    other = dict(tokens.BareEngine(SMALL, tokens.Sizes(max_batch_size=1, n_slots=512)).parameters[0])
    other["layers.0.out.weight"] = other["layers.0.out.weight"].at[:, :16].set(0)
    truth = Reference(SMALL, other)
    actual = Agreement()
    for request in requests:
        looked(truth, request, CPU_SHARE, actual)
    assert actual.choices == 2 * len(requests) and not actual.holds(CPU_SHARE)
    assert actual.off > 3 * CPU_SHARE


def test_an_empty_comparison_proves_nothing() -> None:
    assert not Agreement().holds(1.0)
