"""Models that a GPU benchmark trains: RoBERTa-Base, and a plain decoder of a billion parameters."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")

Step = Callable[[], None]

# Sequences and their length in a batch. Short steps: what a snapshot costs shows more.
TOKENS = {"roberta": (128, 128), "decoder": (3, 2048), "decoder-fsdp": (3, 2048)}


class Layer(nn.Module):
    """Causal attention and a gated MLP, each behind an RMSNorm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_and_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Decoder(nn.Module):
    """A plain language model; its loss on tokens that it sees."""

    def __init__(self, *, vocab: int, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        return functional.cross_entropy(logits.float(), ids[:, 1:].flatten())


def decoder(smoke: bool) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """1.06 billion parameters."""
    size = {"vocab": 32_000, "width": 2048, "heads": 16, "hidden": 5632, "layers": 18}
    if smoke:
        size = {"vocab": 100, "width": 32, "heads": 2, "hidden": 48, "layers": 2}
    with DEVICE:
        model = Decoder(**size)
        ids = torch.randint(size["vocab"], (2, 16) if smoke else TOKENS["decoder"])
    return model, lambda run: run(ids)


def decoder_fsdp(smoke: bool) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The same, sharded by FSDP2 over one process."""
    import atexit

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    folder = tempfile.mkdtemp()
    backend = "cpu:gloo,cuda:nccl" if GPU else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1
    )
    atexit.register(dist.destroy_process_group)
    model, loss = decoder(smoke)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(DEVICE.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    return fully_shard(model, **options), loss


def roberta(smoke: bool) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """RoBERTa-Base masked-language modelling."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    size: dict[str, int] = {}
    if smoke:
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        size["intermediate_size"] = 48
    vocab = 100 if smoke else 50_265
    config = RobertaConfig(vocab_size=vocab, max_position_embeddings=514, type_vocab_size=1, **size)
    model = RobertaForMaskedLM(config).to(DEVICE)
    ids = torch.randint(5, vocab, (2, 16) if smoke else TOKENS["roberta"], device=DEVICE)
    return model, lambda run: run(input_ids=ids, labels=ids).loss


MODELS = {"roberta": roberta, "decoder": decoder, "decoder-fsdp": decoder_fsdp}


def prepare(name: str, smoke: bool, compiled: bool) -> tuple[nn.Module, Step]:
    """A model and one step of its training: bf16, fused AdamW."""
    torch.manual_seed(0)
    model, loss = MODELS[name](smoke)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        sharded = name.endswith("fsdp")  # casts by itself
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=not sharded):
            value = loss(run)  # type: ignore[arg-type]
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()

    return model, step
