"""The exact mean of snapshots: blocks of tensors, kernels over bytes, a sliding sum."""
