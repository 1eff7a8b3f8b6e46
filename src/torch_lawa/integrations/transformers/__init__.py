"""Averaging in the Transformers `Trainer`: change two lines.

```python
trainer = LatestWeightAveragingTrainer(  # instead of Trainer
    model, args, train_dataset=..., eval_dataset=...,
    callbacks=[LatestWeightAveragingCallback(k=6, collect_strategy="steps", collect_every=100)],
)
```
"""

from torch_lawa.integrations.transformers.callback import LatestWeightAveragingCallback
from torch_lawa.integrations.transformers.mixin import (
    LatestWeightAveragingMixin,
    LatestWeightAveragingTrainer,
)

__all__ = [
    "LatestWeightAveragingCallback",
    "LatestWeightAveragingMixin",
    "LatestWeightAveragingTrainer",
]
