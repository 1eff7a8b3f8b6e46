"""A decoder of Llama's design: RMSNorm, rotary positions, SwiGLU, tied embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LlamaDecoder"]

_HEAD = 64  # units per attention head


class LlamaDecoder(nn.Module):
    """Predicts the next token at every position.

    >>> model = LlamaDecoder(width=64, depth=1, vocabulary=100, sequence_length=8)
    >>> ids = torch.zeros(2, 8, dtype=torch.long)
    >>> model(ids, ids).shape, model(ids, ids, per_token=True).shape
    (torch.Size([]), torch.Size([2, 8]))
    """

    def __init__(self, *, width: int, depth: int, vocabulary: int, sequence_length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        cosine, sine = _rotations(sequence_length)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self._initialise(depth)

    def forward(self, ids: Tensor, targets: Tensor, *, per_token: bool = False) -> Tensor:
        """The mean cross-entropy of the targets; `per_token`: that of each."""
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, self.cosine, self.sine)
        logits = F.linear(self.norm(hidden), self.embedding.weight).float()
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none" if per_token else "mean"
        )
        return losses.view_as(targets) if per_token else losses

    def _initialise(self, depth: int) -> None:
        """Normal with deviation 0.02; layers that add to the residual stream start smaller."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if added else 0.02)


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 32 * round(8 * width / 3 / 32)
        self.heads = max(1, width // _HEAD)
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inner, bias=False)  # gate and value
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.transpose(1, 3).unbind(2)
        q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        down: Tensor = self.down(F.silu(gate) * value)
        return x + down


def _rotations(length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation angles."""
    frequencies = 10_000.0 ** -(torch.arange(0, _HEAD, 2) / _HEAD)
    angles = torch.outer(torch.arange(length), frequencies)
    return angles.cos(), angles.sin()


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of units, the first half of a head with the second, by the position."""
    a, b = x.chunk(2, dim=-1)
    turned = torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1)
    return turned.to(x.dtype)
