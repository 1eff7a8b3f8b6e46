"""The model is transformers' RoBERTa in names, size, values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RobertaForMaskedLM, masking_utils

from lawa_lab.recipes.models.roberta import SparseRobertaForMaskedLM, roberta
from lawa_lab.recipes.task import seeded
from lawa_lab.recipes.tasks.masking import IGNORED, mask_tokens
from torch_lawa.averager import LatestWeightAverager


def small(num_chosen: int = 3, dropout: float = 0.0) -> SparseRobertaForMaskedLM:
    torch.manual_seed(1)
    return roberta(
        width=128,
        depth=2,
        vocabulary=300,
        sequence_length=20,
        dropout=dropout,
        num_chosen=num_chosen,
    )


def batch(num_chosen: int = 3) -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, 300, (4, 20))
    ids[:, 0], ids[:, -1] = 0, 2
    return mask_tokens(ids, num_chosen, 300, seeded(torch.device("cpu"), 1))


def plain(model: SparseRobertaForMaskedLM) -> RobertaForMaskedLM:
    """The same weights in transformers' own class."""
    other = RobertaForMaskedLM(model.config)
    other.load_state_dict(model.state_dict())
    return other


def test_roberta_base_has_its_published_size() -> None:
    with torch.device("meta"):
        model = roberta(
            width=768,
            depth=12,
            vocabulary=50_265,
            sequence_length=512,
            dropout=0.1,
            num_chosen=76,
        )
    assert sum(p.numel() for p in {*model.parameters()}) == 124_697_433
    assert model.config.num_attention_heads == 12
    assert model.config._attn_implementation == "sdpa"


def test_names_are_transformers_and_embeddings_stay_tied() -> None:
    model = small()
    assert set(model.state_dict()) == set(RobertaForMaskedLM(model.config).state_dict())
    words = model.roberta.embeddings.word_embeddings.weight
    assert model.lm_head.decoder.weight is words
    assert model.lm_head.decoder.bias is model.lm_head.bias


def test_the_loss_and_its_gradients_are_transformers() -> None:
    model = small()
    other = plain(model)
    inputs, labels = batch()
    loss, reference = model(inputs, labels), other(inputs, labels=labels).loss
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6)
    loss.backward()
    reference.backward()
    gradients = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name  # none is unused: gradients are exchanged
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)


def test_the_same_dropout_gives_the_same_loss() -> None:
    model = small(dropout=0.1).train()
    other = plain(model).train()
    inputs, labels = batch()
    torch.manual_seed(5)
    loss = model(inputs, labels)
    torch.manual_seed(5)
    torch.testing.assert_close(loss, other(inputs, labels=labels).loss, rtol=1e-6, atol=1e-6)


def test_losses_and_hits_of_each_token() -> None:
    model = small().eval()
    inputs, labels = batch()
    losses, hits = model(inputs, labels, per_token=True)
    logits = plain(model).eval()(inputs).logits.double()
    chosen = labels != IGNORED
    reference = -torch.log_softmax(logits[chosen], 1).gather(1, labels[chosen].unsqueeze(1))
    torch.testing.assert_close(losses.double(), reference.squeeze(1), rtol=1e-5, atol=1e-5)
    assert hits.tolist() == (logits[chosen].argmax(1) == labels[chosen]).tolist()
    best = torch.where(chosen, logits.argmax(2), IGNORED)
    assert model(inputs, best, per_token=True)[1].all()


def test_a_half_precision_model_has_a_float32_loss() -> None:
    model = small().bfloat16().eval()
    inputs, labels = batch()
    losses, _ = model(inputs, labels, per_token=True)
    assert model(inputs, labels).dtype == losses.dtype == torch.float32


def test_fewer_labels_than_places_count_for_nothing() -> None:
    model = small(num_chosen=5)
    inputs, labels = batch(num_chosen=3)
    labels[1] = IGNORED
    torch.testing.assert_close(
        model(inputs, labels), plain(model)(inputs, labels=labels).loss, rtol=1e-6, atol=1e-6
    )
    losses, hits = model(inputs, labels, per_token=True)
    assert losses.shape == hits.shape == (20,)
    assert int((losses > 0).sum()) == 9
    assert int(hits.sum()) <= 9


def test_the_head_sees_chosen_places_only() -> None:
    model = small()
    seen: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    model(*batch())
    assert seen == [(12, 300)]


def test_attention_is_never_given_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where it is compiled either, when some versions of transformers make one of ones."""
    monkeypatch.setattr(masking_utils, "_ignore_bidirectional_mask_sdpa", lambda *_, **__: False)
    masks: list[object] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def recorded(*args: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    model = small()
    model(*batch())
    assert masks == [None, None]
    RobertaForMaskedLM(model.config)(batch()[0])
    assert masks[2] is not None  # the test sees masks


@pytest.mark.parametrize("width", [32, 64, 192])
def test_heads_have_64_units_where_they_can(width: int) -> None:
    model = roberta(
        width=width, depth=1, vocabulary=300, sequence_length=20, dropout=0.0, num_chosen=3
    )
    assert model.config.num_attention_heads == max(1, width // 64)
    assert model.config.intermediate_size == 4 * width
    assert torch.isfinite(model(*batch()))


def test_an_average_stays_tied_and_loads_into_transformers() -> None:
    model = small()
    averager = LatestWeightAverager(k=2)
    words: list[Tensor] = []
    step: Callable[[], None] = torch.optim.SGD(model.parameters(), lr=0.1).step
    for _ in range(2):
        model(*batch()).backward()
        step()
        averager.collect(model)
        words.append(model.lm_head.decoder.weight.detach().double().clone())
    other = RobertaForMaskedLM(model.config)
    other.load_state_dict(averager.average())
    assert other.lm_head.decoder.weight is other.roberta.embeddings.word_embeddings.weight
    assert torch.equal(other.lm_head.decoder.weight, ((words[0] + words[1]) / 2).float())
