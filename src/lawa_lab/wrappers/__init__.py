"""Methods that change training itself, wrapped around the optimizer's step."""
