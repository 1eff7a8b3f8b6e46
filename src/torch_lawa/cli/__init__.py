"""The `lawa` command: one file per verb, imported when that verb is called."""
