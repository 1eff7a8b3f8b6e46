"""The lab: recipes, comparators, reports and the demo. It imports torch_lawa, never the reverse."""
