"""Suffixes of file names that announce a checkpoint. What is in the file decides; a name tells what was meant."""

from __future__ import annotations

from typing import Final

#: Files that torch.save writes.
TORCH: Final = (".pt", ".pth", ".ckpt", ".bin", ".th", ".pth.tar")
SAFETENSORS: Final = ".safetensors"
#: Programs with weights: mobile models, torch.export and TorchServe.
PROGRAMS: Final = (".ptl", ".pt2", ".mar")
WEIGHTS: Final = (*TORCH, SAFETENSORS)
CHECKPOINTS: Final = (*WEIGHTS, *PROGRAMS)
ARCHIVES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
#: Files that programs unpickle.
PICKLES: Final = (".pkl", ".pickle", ".p", ".joblib", ".dill", ".npy", ".npz", ".dat", ".data", ".model")
#: The formats that can be written, and the suffixes that mean them.
TARGETS: Final = {
    "torch": TORCH,
    "safetensors": (SAFETENSORS,),
    "dcp": (".dcp",),
    "legacy": (),
}
