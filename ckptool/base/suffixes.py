"""Suffixes of file names that announce a checkpoint. The content decides the format; the name shows the intention."""

from __future__ import annotations

from typing import Final

#: Files that torch.save writes.
TORCH: Final = (".pt", ".pth", ".ckpt", ".bin", ".th", ".pth.tar")
SAFETENSORS: Final = ".safetensors"
WEIGHTS: Final = (*TORCH, SAFETENSORS)
#: Also GGUF, and programs with weights: mobile models, torch.export and TorchServe.
CHECKPOINTS: Final = (*WEIGHTS, ".gguf", ".ptl", ".pt2", ".mar")
ARCHIVES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
#: Files that programs unpickle.
PICKLES: Final = (".pkl", ".pickle", ".p", ".joblib", ".dill", ".npy", ".npz", ".dat", ".data", ".model")
