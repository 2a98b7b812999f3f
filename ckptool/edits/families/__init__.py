"""Names of the tensors of Megatron-LM in other libraries: a table for each family of models, and how to apply one."""
