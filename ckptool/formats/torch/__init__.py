"""The formats of ``torch.save``: readers and writers of zip, legacy, tar and unpacked archives."""
