"""The shape of a Gated DeltaNet layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

OutputGate = Literal["silu", "sigmoid"]

_HF_FIELDS = {
    "hidden_size": "hidden_size",
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_kernel_size": "linear_conv_kernel_dim",
    "rms_norm_eps": "rms_norm_eps",
}


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """Sizes and constants of one Gated DeltaNet layer.

    Attributes:
        hidden_size: width of the layer's input and output.
        num_key_heads: heads of queries and keys.
        num_value_heads: heads of values and states, a multiple of num_key_heads: value head h reads
            key head `h // (num_value_heads // num_key_heads)`.
        key_head_dim: channels of a query or key head; a state has as many rows.
        value_head_dim: channels of a value head; a state has as many columns.
        conv_kernel_size: taps of the causal convolution over queries, keys and values, at least 2.
        rms_norm_eps: added to the mean of squares in the output norm.
        output_gate: activation of the gate that multiplies the normed output.

    Raises:
        ValueError: a field is not as above; the message names it.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_size: int = 4
    rms_norm_eps: float = 1e-6
    output_gate: OutputGate = "silu"

    def __post_init__(self):
        for name, least in (
            ("hidden_size", 1),
            ("num_key_heads", 1),
            ("num_value_heads", 1),
            ("key_head_dim", 1),
            ("value_head_dim", 1),
            ("conv_kernel_size", 2),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}, must be an integer of at least {least}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads is {self.num_value_heads}, must be a multiple of num_key_heads = {self.num_key_heads}"
            )
        if self.output_gate not in get_args(OutputGate):
            raise ValueError(f"output_gate is {self.output_gate!r}, must be one of {get_args(OutputGate)}")

    @property
    def key_dim(self) -> int:
        """Channels of all queries, or of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of a fused `[Q | K | V]` row."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_hf(cls, config: Any) -> "GatedDeltaNetConfig":
        """The layer inside a Hugging Face model.

        Args:
            config: a configuration object or dict of transformers with the `linear_*` fields
                (Qwen3-Next, Qwen3.5 and their relatives), or one that holds it as `text_config`.
                `output_gate_type` sets the output gate where it is present and not None, else
                `hidden_act` does.

        Raises:
            ValueError: a field is missing, or names an activation this layer does not have.
        """
        get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
        missing = [name for name in _HF_FIELDS.values() if get(name) is None]
        if missing:
            text_config = get("text_config")
            if text_config is not None:
                return cls.from_hf(text_config)
            raise ValueError(f"config has no field {', '.join(missing)}; is this a Gated DeltaNet model?")
        hidden_act = get("hidden_act") or "silu"
        if hidden_act != "silu":
            raise ValueError(f"config.hidden_act is {hidden_act!r}, must be 'silu': the convolution's activation")
        output_gate = get("output_gate_type") or hidden_act
        if output_gate not in get_args(OutputGate):
            raise ValueError(f"config.output_gate_type is {output_gate!r}, must be one of {get_args(OutputGate)}")
        fields: dict[str, Any] = {ours: get(theirs) for ours, theirs in _HF_FIELDS.items()}
        return cls(output_gate=output_gate, **fields)
