"""What averaging saved: tables and figures, made from metrics files alone."""
