"""The models that are measured: Llama's names and shapes, scaled to a number of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

HEAD_DIM = 32
MAX_VOCAB = 32_000
_WIDTHS = range(2 * HEAD_DIM, 16_385, 2 * HEAD_DIM)  # an even number of heads: two queries a key


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named weight.

    Attributes:
        name: its name in the module, which for Llama is its name on the hub.
        shape: its shape.
        start: how many elements of the model come before it.
        frozen: the optimizer does not update it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    frozen: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Llama:
    """The sizes that say everything about a Llama model; vocabulary and output are not tied."""

    hidden: int
    layers: int
    intermediate: int
    vocab: int

    @property
    def numel(self) -> int:
        """Number of parameters."""
        last = self.parameters()[-1]
        return last.start + last.numel

    def parameters(self, *, frozen: bool = False) -> list[Parameter]:
        """Every weight in the module's order; ``frozen`` freezes embeddings and the first layers.

        Half of the layers freeze, which is what training the upper half of a model looks like.
        """
        layers = (f"model.layers.{layer}." for layer in range(self.layers // 2))
        still = ("model.embed_tokens.", *layers)
        parameters, start = [], 0
        for name, shape in self._shapes():
            parameters.append(Parameter(name, shape, start, frozen and name.startswith(still)))
            start += prod(shape)
        return parameters

    def config(self) -> dict[str, object]:
        """What ``config.json`` says of this model (transformers 5, ``LlamaConfig``)."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "dtype": "bfloat16",
            "eos_token_id": 2,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": 2048,
            "model_type": "llama",
            "num_attention_heads": self.hidden // HEAD_DIM,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.hidden // HEAD_DIM // 2,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden, self.intermediate
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (hidden // 2, hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (hidden // 2, hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
            yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab, hidden)


def fit(numel: int) -> Llama:
    """The model of usual proportions whose number of parameters is nearest to ``numel``.

    The width is chosen first, then the inner width makes up the difference, in steps of 8. From
    about ten million parameters on, the result is within 1 % of what was asked for.
    """
    base = min((_proportioned(hidden) for hidden in _WIDTHS), key=lambda m: abs(m.numel - numel))
    per_inner = 3 * base.hidden * base.layers
    inner = base.intermediate + round((numel - base.numel) / per_inner / 8) * 8
    return Llama(base.hidden, base.layers, max(8, inner), base.vocab)


def _proportioned(hidden: int) -> Llama:
    return Llama(
        hidden=hidden,
        layers=max(2, hidden // 128),
        intermediate=round(hidden / 3) * 8,
        vocab=min(MAX_VOCAB, 16 * hidden),
    )
