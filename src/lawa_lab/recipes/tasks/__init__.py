"""Tasks of the recipes: data, model, loss and evaluation behind the protocol `Task`."""
