"""What averaging a model of a given size costs on given hardware: `lawa plan`."""
