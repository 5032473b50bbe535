"""The names of a checkpoint's layer that predicts a further token, where a family publishes one."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class FurtherLayer:
    """The tensors of a layer that predicts a further token (next_token.py).

    `layer` stands in the names of its layer's weights for "{prefix}layers.{i}.", and the others are whole
    names; "{n}" is the model's number of layers, which is the number of the layer after the last. `embedding`
    and `head` are copies of the model's that the layer brings; without these names it shares them. After its
    first draft it goes on from its last layer's output, with `goes_on_normed` after its final norm.

    `tensors` is a pattern of all tensors that it has; without it any others are left unread.
    """

    layer: str
    embedding_norm: str
    state_norm: str
    project: str
    final_norm: str
    embedding: str = ""
    head: str = ""
    goes_on_normed: bool = False
    tensors: str = ""

    @property
    def is_numbered(self) -> bool:
        """Whether the layer is numbered as one more of the model's."""
        return "{n}" in self.layer


# DeepSeek-V3's, also GLM-4.5's. The paper's layer shares embedding and head; checkpoints have copies in it.
AFTER_LAST = FurtherLayer(
    layer="{prefix}layers.{n}.",
    embedding_norm="{prefix}layers.{n}.enorm.weight",
    state_norm="{prefix}layers.{n}.hnorm.weight",
    project="{prefix}layers.{n}.eh_proj.weight",
    final_norm="{prefix}layers.{n}.shared_head.norm.weight",
    embedding="{prefix}layers.{n}.embed_tokens.weight",
    head="{prefix}layers.{n}.shared_head.head.weight",
)
# Qwen3-Next's and Qwen 3.5's.
MTP = FurtherLayer(
    layer="mtp.layers.{i}.",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    state_norm="mtp.pre_fc_norm_hidden.weight",
    project="mtp.fc.weight",
    final_norm="mtp.norm.weight",
    goes_on_normed=True,
    tensors=r"mtp\.(?!layers\.[1-9]).*",
)
