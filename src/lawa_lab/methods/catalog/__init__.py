"""The methods, one file each; `lawa_lab.methods.registry` imports every module here.

The modules import torch only inside `build`.
"""
