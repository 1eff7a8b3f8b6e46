"""A small language model in the Transformers Trainer, which loads the best average at the end.

pip install 'torch-lawa[transformers]' && python examples/transformers_text.py
"""

import random
import sys

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from torch_lawa.integrations.transformers import (
    LatestWeightAveragingCallback,
    LatestWeightAveragingTrainer,
)

WHO = ["the cat", "a small dog", "my neighbour", "the old clock", "nobody", "every child"]
DOES = ["likes", "looks for", "runs after", "has never seen", "dreams of", "would sell"]
WHAT = ["warm milk", "the red ball", "a long walk", "seven stars", "the sea", "apple pie"]
WHEN = ["at night", "on Sundays", "in spring", "before lunch", "when it rains", "again and again"]
WORDS = sorted({word for part in (WHO, DOES, WHAT, WHEN) for text in part for word in text.split()})
LENGTH = 24


def sentences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Random sentences as rows of word indices."""
    rng = random.Random(seed)
    text: list[int] = []
    while len(text) < count * LENGTH:
        for part in (WHO, DOES, WHAT, WHEN):
            text += [WORDS.index(word) for word in rng.choice(part).split()]
    rows = torch.tensor(text[: count * LENGTH]).view(count, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder: str = "runs/text", *, max_steps: int = 200) -> dict[str, float]:
    """Train, and return the metrics of the best average."""
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(WORDS), n_positions=LENGTH, n_embd=48, n_layer=2, n_head=4,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    args = TrainingArguments(
        folder,
        max_steps=max_steps,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_averaged_loss",
        report_to="none",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer = LatestWeightAveragingTrainer(
        model,
        args,
        train_dataset=sentences(1000, seed=1),
        eval_dataset=sentences(100, seed=2),
        callbacks=[LatestWeightAveragingCallback(k=4, collect_strategy="steps", collect_every=10)],
    )
    trainer.train()
    for row in trainer.state.log_history:
        if "eval_averaged_loss" in row:
            print(f"step {row['step']:3d}   averaged {row['eval_averaged_loss']:.3f}")
        elif "eval_loss" in row:
            print(f"step {row['step']:3d}   raw {row['eval_loss']:.3f}")
    trainer.save_model(f"{folder}/best")  # the best average, loaded at the end
    return {**trainer.evaluate(), "best": trainer.state.best_metric}


if __name__ == "__main__":
    main(*sys.argv[1:])
