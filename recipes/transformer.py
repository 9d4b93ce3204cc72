"""A decoder-only transformer in plain torch: RoPE, RMSNorm, SwiGLU, grouped-query attention.

The block is Llama's (Touvron et al. 2023): norms before each part, no biases, rotary positions, a gated feed-forward.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_plugin.errors import explain

__all__ = [
    "IGNORED",
    "Transformer",
    "TransformerConfig",
    "apply_rotary",
    "generate",
    "grouped_query_attention",
    "rotary_angles",
    "token_nats",
]

IGNORED = -100
"""Target that counts for nothing: padding behind the last token of a set."""


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a :class:`Transformer`.

    Attributes:
        vocab_size: number of token ids.
        block_size: longest context in tokens.
        num_layers: blocks.
        dim: width of the residual stream.
        num_heads: query heads; ``dim / num_heads`` is the width of a head and has to be even.
        num_kv_heads: key and value heads, each shared by ``num_heads / num_kv_heads`` query heads.
        hidden_dim: width of the feed-forward.
        rope_base: base of the rotary frequencies.
        tie_weights: whether the output layer is the embedding.
        init_std: standard deviation of initial weights.

    Raises:
        ValueError: sizes that do not divide as they must.
    """

    vocab_size: int
    block_size: int
    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    rope_base: float = 10000.0
    tie_weights: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "block_size", "num_layers", "dim", "num_heads", "num_kv_heads", "hidden_dim")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(explain(f"model.{name} to be at least 1", str(getattr(self, name)), "Raise it"))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                explain(
                    "model.num_heads to be a multiple of model.num_kv_heads",
                    f"{self.num_heads} and {self.num_kv_heads}",
                    "Change one of them",
                )
            )
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                explain(
                    "model.dim to be a multiple of 2 * model.num_heads, because rotary positions turn pairs",
                    f"dim={self.dim} and num_heads={self.num_heads}",
                    "Change one of them",
                )
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, by its formula."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.num_kv_heads * self.head_dim
        feed_forward = 3 * self.dim * self.hidden_dim
        embeddings = (1 if self.tie_weights else 2) * self.vocab_size * self.dim
        return embeddings + self.num_layers * (attention + feed_forward + 2 * self.dim) + self.dim

    @property
    def training_flops_per_token(self) -> int:
        """Floating-point operations to train on one token.

        Six for each weight of a matrix product (two forward, four backward), and attention over the whole block, as if
        it were not causal (Chowdhery et al. 2022, "PaLM", appendix B). Looking up an embedding is no product; norms and
        the softmax are left out.
        """
        num_vectors = self.num_layers * 2 + 1
        num_lookups = 0 if self.tie_weights else self.vocab_size * self.dim
        num_products = self.num_parameters - num_lookups - num_vectors * self.dim
        return 6 * num_products + 12 * self.num_layers * self.dim * self.block_size

    def activation_bytes(self, batch_size: int, activation_size_bytes: int = 4) -> int:
        """Estimates what an eager forward on full blocks keeps for its backward; fused norms keep a little less.

        Args:
            batch_size: samples.
            activation_size_bytes: 4 in fp32; 2 with bf16 autocast, where the residual stream and the loss stay fp32.
        """
        wide, narrow = max(4, activation_size_bytes), activation_size_bytes
        # Of a norm: its input and the input without the gain, both as wide as the residual stream, and its result.
        norm = self.dim * (2 * wide + narrow)
        # Query, key and value with their repeats, attention's result and its copy; the gate, its silu, up, the product.
        block = 2 * norm + (5 * self.dim + 4 * self.hidden_dim) * narrow
        return batch_size * self.block_size * (self.num_layers * block + norm + self.vocab_size * wide)


def rotary_angles(num_positions: int, head_dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cosine and sine of the rotary angles (Su et al. 2021, "RoFormer", section 3.2.2).

    Args:
        num_positions: positions from 0.
        head_dim: width of a head, even.
        base: position ``p`` turns pair ``i`` by ``p * base ** (-2 i / head_dim)``.
        like: gives the device; float64 if it is float64, else float32.

    Returns:
        Two tensors of shape ``(num_positions, head_dim / 2)``.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype)
    positions = torch.arange(num_positions, device=like.device, dtype=dtype)
    angles = positions[:, None] * (base ** (-pairs / head_dim))[None, :]
    return angles.cos(), angles.sin()


def apply_rotary(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turns neighbouring pairs of the last dimension by the angles of their position.

    Args:
        heads: shape ``(..., num_positions, head_dim)``.
        cosine: shape ``(num_positions, head_dim / 2)``.
        sine: the same.

    Returns:
        Same shape and dtype as ``heads``.
    """
    real, imaginary = heads[..., 0::2], heads[..., 1::2]
    turned = torch.stack((real * cosine - imaginary * sine, real * sine + imaginary * cosine), dim=-1)
    return turned.flatten(-2).to(heads.dtype)


def grouped_query_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention where groups of query heads share a key and value head (Ainslie et al. 2023, "GQA").

    Args:
        query: shape ``(batch, num_heads, num_positions, head_dim)``.
        key: shape ``(batch, num_kv_heads, num_positions, head_dim)``; head ``h`` of the query reads head
            ``h // (num_heads / num_kv_heads)``.
        value: as ``key``.

    Returns:
        Shape of ``query``.
    """
    num_shared = query.shape[1] // key.shape[1]
    if num_shared > 1:
        key, value = key.repeat_interleave(num_shared, dim=1), value.repeat_interleave(num_shared, dim=1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and shared key and value heads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps ``(batch, num_positions, dim)`` to the same shape."""
        query, key, value = (
            projection(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = apply_rotary(query, cosine, sine), apply_rotary(key, cosine, sine)
        mixed: Tensor = self.out(grouped_query_attention(query, key, value).transpose(1, 2).flatten(-2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.out = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(batch, num_positions, dim)`` to the same shape."""
        mapped: Tensor = self.out(F.silu(self.gate(x)) * self.up(x))
        return mapped


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Maps ``(batch, num_positions, dim)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        return x  # noqa: RET504  # the two residuals read alike


class Transformer(nn.Module):
    """The language model: token ids in, logits of the next token out.

    Weights start normal with ``init_std``; those that write into the residual stream are smaller by
    ``sqrt(2 * num_layers)``, so that its variance does not grow with depth (Radford et al. 2019, "GPT-2").

    Args:
        config: the sizes.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights anew from torch's global random stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                writes_residual = name.endswith("out.weight")
                shrink = (2 * self.config.num_layers) ** -0.5 if writes_residual else 1.0
                nn.init.normal_(parameter, std=self.config.init_std * shrink)
            else:
                nn.init.ones_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token ids to logits.

        Args:
            tokens: int64, shape ``(batch, num_positions)``, at most ``block_size`` positions.

        Returns:
            Shape ``(batch, num_positions, vocab_size)``; position ``t`` has seen tokens ``0 … t``.
        """
        x = self.embedding(tokens)
        cosine, sine = rotary_angles(tokens.shape[1], self.config.head_dim, self.config.rope_base, like=x)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: Tensor = self.head(self.norm(x))
        return logits


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of ``-ln p(target)`` over all targets that are not :data:`IGNORED`.

    Args:
        logits: shape ``(batch, num_positions, vocab_size)``; half precisions are widened to float32.
        targets: int64, shape ``(batch, num_positions)``.

    Returns:
        A scalar, float32 or float64.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: list[int],
    num_tokens: int,
    *,
    num_usable: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[int]:
    """Samples a continuation, one token at a time, with the whole context read again for each.

    Args:
        model: the bare model; it is called past any wrapper and past ``compile``.
        tokens: the prompt, at least one token.
        num_tokens: how many to add.
        num_usable: ids from here on are never drawn.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among the likeliest ``top_k`` only; 0 draws among all.
        seed: of a random stream of its own; the global one is left alone.

    Returns:
        The prompt and its continuation.

    Collectives:
        None.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(tokens)
    for _ in range(num_tokens):
        context = torch.tensor([tokens[-model.config.block_size :]], device=device)
        logits = model.forward(context)[0, -1, :num_usable].float().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        values, ids = logits.topk(min(top_k, len(logits))) if top_k else (logits, torch.arange(len(logits)))
        chosen = torch.multinomial(F.softmax(values / temperature, dim=-1), 1, generator=generator)
        tokens.append(int(ids[chosen]))
    return tokens
