"""The `lawa` command: a file for each verb, loaded when it is called."""
