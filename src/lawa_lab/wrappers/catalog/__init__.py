"""The wrappers, one file each; `lawa_lab.wrappers.registry` imports every module here.

The modules import no torch: `--help` lists them. What they compute with is given to `build`.
"""
