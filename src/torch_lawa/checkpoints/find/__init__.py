"""Which checkpoints an input names, and in which order.

Call `discovery.find_checkpoints`. It expands the inputs to candidates (`expand`, which looks into
folders with `folders` and reads names with `step_names`), then orders them. `discovery.select`
chooses some of them by step, `scores.choose_best` by a metric.
"""
