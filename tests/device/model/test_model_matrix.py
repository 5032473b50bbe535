"""docs/models.md agrees with the tables of families and of attention in the code."""

from orca_jax.families.registry import FAMILIES
from scripts.model_matrix import BEGIN, DOCUMENT, END, golden_models, tables


def test_the_document_is_up_to_date():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == tables(), "run python -m scripts.model_matrix"


def test_every_family_has_golden_models():
    models = golden_models()
    assert set(models) == set(FAMILIES)
    needed = {name: 1 if family.serves else 2 for name, family in FAMILIES.items()}
    assert all(len(found) >= needed[name] for name, found in models.items()), models.keys()
