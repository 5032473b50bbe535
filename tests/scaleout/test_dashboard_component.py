"""The ConfigMap that a kustomization makes of the Grafana dashboard."""

import os
from pathlib import Path

from tests.places import ROOT
from tests.scaleout.published_schemas import VERSIONS, validate
from tests.scaleout.test_kubernetes_schemas import rendered


def test_a_kustomization_with_the_component_has_the_dashboard(tmp_path: Path) -> None:
    grafana = ROOT / "deploy" / "grafana"
    component = os.path.relpath(grafana, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        f"kind: Kustomization\nnamespace: monitoring\ncomponents: [{component}]\n", encoding="utf-8"
    )
    (manifest,) = rendered(tmp_path)
    for version in VERSIONS:
        validate(manifest, version)
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("ConfigMap", "orca-dashboard")
    assert manifest["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert manifest["data"] == {"orca_jax.json": (grafana / "orca_jax.json").read_text(encoding="utf-8")}
