"""Files that are programs with weights: TorchScript, torch.export, torch.package."""
