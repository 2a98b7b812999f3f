"""Find pickles and configuration in any bytes."""
