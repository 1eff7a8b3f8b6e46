"""The pure part: means, coefficients, schedules, names and records. No loops over epochs, no I/O
beyond one metrics file."""
