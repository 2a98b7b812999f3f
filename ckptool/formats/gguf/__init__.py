"""GGUF files of llama.cpp: metadata, and tensors in blocks of quantized values."""
