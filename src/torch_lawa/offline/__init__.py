"""Average, sweep, watch, inspect and compare checkpoints on disk or on a server.

Every verb makes a plan, which is a value, and carries it out. `plan` decides which checkpoints are
averaged (with `checkpoints.find`), which tensors (`matching`) and into which files (`output_plan`).
`average` carries a plan out in one process, `multi_process` on all ranks of a job. Both read and
average pieces in threads (`engine`, `threads`), refuse inputs that change meanwhile (`changes`),
and write a result that appears whole (`output_files`).
"""
