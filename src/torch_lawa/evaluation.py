"""Raw and averaged weights, evaluated side by side."""
