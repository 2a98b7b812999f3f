"""safetensors: one file, a JSON header and bare tensors."""
