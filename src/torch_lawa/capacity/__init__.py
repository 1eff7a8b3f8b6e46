"""What averaging a model of a given size costs on given machines: `lawa plan`."""
