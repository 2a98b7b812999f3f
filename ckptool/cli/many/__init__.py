"""Commands on many files: their inputs, the loop that runs them, and what it writes."""
