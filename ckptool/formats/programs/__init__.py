"""Programs with weights: TorchScript, torch.export, torch.package."""
