"""Which checkpoints an input names, and in which order.

`discovery.find_checkpoints` is the way in. It calls, in this order: `expand` (inputs to
candidates; `folders` looks into folders, `step_names` reads names), then orders them.
`discovery.select` chooses some of them by step.
"""
