"""The decoder against transformers' Llama with the same weights."""

import pytest
import torch

from lawa_lab.recipes.models.llama import LlamaDecoder

transformers = pytest.importorskip("transformers")


def test_it_computes_what_llama_of_transformers_computes() -> None:
    width, depth, vocabulary, length = 128, 2, 50, 12
    torch.manual_seed(0)
    ours = LlamaDecoder(width=width, depth=depth, vocabulary=vocabulary, sequence_length=length)
    inner = ours.layers[0].down.in_features
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=2,
        intermediate_size=inner,
        max_position_embeddings=length,
        rms_norm_eps=torch.finfo(torch.float32).eps,  # the default of nn.RMSNorm
        tie_word_embeddings=True,
    )
    theirs = transformers.LlamaForCausalLM(config)
    state = {
        "model.embed_tokens.weight": ours.embedding.weight,
        "model.norm.weight": ours.norm.weight,
    }
    state["lm_head.weight"] = ours.embedding.weight
    for i, layer in enumerate(ours.layers):
        q, k, v = layer.qkv.weight.chunk(3)
        gate, up = layer.up.weight.chunk(2)
        parts = {
            "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
            "self_attn.o_proj": layer.out.weight, "mlp.gate_proj": gate, "mlp.up_proj": up,
            "mlp.down_proj": layer.down.weight, "input_layernorm": layer.attention_norm.weight,
            "post_attention_layernorm": layer.feed_forward_norm.weight,
        }  # fmt: skip
        state |= {f"model.layers.{i}.{name}.weight": value for name, value in parts.items()}
    theirs.load_state_dict(state)
    ids = torch.randint(vocabulary, (3, length + 1))
    logits = theirs.eval()(ids[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    losses = ours(ids[:, :-1], ids[:, 1:], per_token=True)
    torch.testing.assert_close(losses.flatten(), wanted, rtol=1e-4, atol=1e-5)
    assert ours(ids[:, :-1], ids[:, 1:]).item() == pytest.approx(wanted.mean().item(), rel=1e-5)


def test_the_recipe_has_34_million_parameters() -> None:
    with torch.device("meta"):
        model = LlamaDecoder(width=512, depth=8, vocabulary=16_384, sequence_length=256)
    assert 33e6 < sum(p.numel() for p in model.parameters()) < 35e6
