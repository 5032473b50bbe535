"""How checkpoints store experts: one tensor for each, or since transformers 5 one for all of them."""

from collections.abc import Mapping

from orca_jax.families.stored_name import StoredName, all_experts, as_it_is, each_expert, one_row, stacked

_LAYER = "layers.{i}."


def separate_experts(router: str, gate: str, up: str, down: str) -> dict[str, StoredName]:
    """The router and the experts, "{x}" in their names, each with its own tensors."""
    return {
        f"{_LAYER}router.weight": as_it_is(router),
        f"{_LAYER}experts.up.weight": each_expert(gate, up),
        f"{_LAYER}experts.down.weight": each_expert(down),
    }


def fused_experts(router: str, gate_up: str, down: str) -> dict[str, StoredName]:
    """The router and the experts: `gate_up` [X, 2 F, H], `down` [X, H, F]."""
    return {
        f"{_LAYER}router.weight": as_it_is(router),
        f"{_LAYER}experts.up.weight": all_experts(gate_up),
        f"{_LAYER}experts.down.weight": all_experts(down),
    }


_MLP = "{prefix}layers.{i}.mlp."
_EXPERT = f"{_MLP}experts.{{x}}."
# Those of Qwen's mixtures and of most later ones.
WEIGHTS: Mapping[str, StoredName] = {
    **separate_experts(
        f"{_MLP}gate.weight", *(f"{_EXPERT}{part}_proj.weight" for part in ("gate", "up", "down"))
    ),
    f"{_LAYER}shared.up.weight": stacked(
        *(f"{_MLP}shared_expert.{part}_proj.weight" for part in ("gate", "up"))
    ),
    f"{_LAYER}shared.down.weight": as_it_is(f"{_MLP}shared_expert.down_proj.weight"),
    f"{_LAYER}shared.gate": one_row(f"{_MLP}shared_expert_gate.weight"),
}
# As transformers 5 saves them with save_original_format=False.
FUSED: Mapping[str, StoredName] = fused_experts(
    f"{_MLP}gate.weight", f"{_MLP}experts.gate_up_proj", f"{_MLP}experts.down_proj"
)
