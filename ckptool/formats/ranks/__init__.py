"""Folders of files that many ranks wrote with ``torch.save``, read as the one checkpoint that they are parts of."""
