"""Everything that makes processes synchronise or agree, on `torch.distributed`.

`barrier`: wait for all ranks, or raise an error that names the missing one. `agreement`: exchange
values, and fail together. `world`: the processes that torchrun started. `connection`: such
processes without a process group, for work on files.
"""
