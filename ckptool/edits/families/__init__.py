"""Give Megatron-LM tensors the names of other libraries: a table for each family of models, and its application."""
