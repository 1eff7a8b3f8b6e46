"""The recipes, one file each; `lawa_lab.recipes.registry` imports every module here.

The modules import torch and data libraries only inside `make_task`.
"""
